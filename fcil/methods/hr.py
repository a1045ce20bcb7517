"""Hybrid Replay made to work on natural images: the default method.

The algorithm of Khademi Nori, Kim and Wang (ICLR 2025), with the numbers of its lines at the line ends: `Server` is
Algorithm 1 and `Client` is Algorithm 2. What differs from `hr-literal`, which collapses, is in PAPER.md from item 45;
three things matter most:

- Codes come from a codec that is fitted once, in the first task, and never changes, so that nothing drifts and nothing
  is encoded twice. The encoder is free to classify.
- New images pass the codec, too. Else the network learns that what was decoded is old and what is sharp is new.
- Beside the pull to an image's own centroid stands a softmax over the distances to those of all classes that the
  client has or replays: it tells apart what is alike.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fcil.blocks import centroids as placing
from fcil.blocks import exemplars as keeping
from fcil.blocks import made_up as making
from fcil.blocks.codec import KINDS, Fitted, LearnedCodec, RawCodec, TransformCodec, WebpCodec, build
from fcil.blocks.losses import log_shares, masked, squared_error
from fcil.blocks.training import by_class, in_parts, loaded, weights_of
from fcil.federation.rounds import fit_codec, measure
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.records import ByClass, Update, Weights, flatten, record, unflatten
from fcil.scenario.tasks import LocalData, Task, mask
from fcil.seeds import seed_of

JUDGED = 64  # images made up of a class to see whether they are like it


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.1, "learning rate of the clients' SGD", above=0)
    latent: int = knob(
        0, "numbers in which the encoder classifies; 0 is twice the classes: room for a simplex", least=0
    )
    spacing: float = knob(5.0, "sigma of Eq. 8: centroids rest 2^(1/6) sigma apart", above=0)
    pull: float = knob(1 / 30, "lambda of Eq. 7 over an image's numbers; also scales distillation", above=0)
    contrast: float = knob(
        0.1, "weight of cross-entropy beside the pull: a softmax over distances to classes it has or replays", least=0
    )
    temperature: float = knob(2.5, "of that softmax over negative squared distances", above=0)
    calibrate: float = knob(
        0.0, "1: what is frequent at the client gains nothing by it in that softmax; 0: as it comes",
        least=0, most=1,
    )  # fmt: skip
    balance: float = knob(0.0, "0: images weigh alike; 1: the classes that a client has do", least=0, most=1)
    alignment: str = knob("lennard-jones", "how the server places new centroids", choices=tuple(placing.ALIGNMENTS))
    align_steps: int = knob(3000, "most steps of an alignment", least=1)
    codec: str = knob("klt", "what makes codes of images", choices=KINDS)
    code_bytes: int = knob(0, "bytes of a code; 0 is a tenth of an image's, and at least 12", least=0)
    codec_rounds: int = knob(60, "rounds in which codec=autoencoder is trained before the first task", least=1)
    codec_width: int = knob(64, "channels of its two networks: the capacity of its decoder", least=1, most=1024)
    codec_lr: float = knob(0.1, "learning rate of that", above=0)
    one_domain: bool = knob(
        True, "new images pass the codec, too, before they are trained on; or are made up, where all replay is"
    )
    exemplars: str = knob(
        "codes", "what is kept: codes; raw images that fit; images, one for each code (hr-perfect); nothing",
        choices=("codes", "raw", "images", "none"),
    )  # fmt: skip
    memory_share: float = knob(1.0, "share of the benchmark's memory that is used", least=0, most=1)
    distill: float = knob(0.1, "weight of line 20 beside the pull: the old encoder keeps old classes in place", least=0)
    new_share: float = knob(0.2, "least share of a step's images that are of new classes", least=0, most=0.99)
    global_replay: bool = knob(True, "line 9: make up images of classes that the client has no code of")
    lifelike: float = knob(
        0.8, "least share of a class's made-up images that the encoder must know for use beside codes", least=0, most=1
    )
    tied: int = knob(
        32, "leading numbers of a code that are made up as they vary together, and contrast; 0: each by itself", least=0
    )
    made_up: int = knob(
        0, "images made up of such a class; 0: as many as there are codes of others, on average", least=0
    )
    made_weight: float = knob(
        1.0, "weight of made-up images in the loss; 0: the share of the old classes that a client must make up", least=0
    )


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights  # theta_h, the encoder
    old_weights: Weights  # theta_{h-1}; empty where it teaches nothing
    centroids: Tensor  # p, a row for each class
    seen: Tensor  # classes that have a centroid, as a mask
    codec: Weights  # what was fitted in the first task
    means: ByClass  # of each class: the mean of what codes keep of its images, and the deviation
    deviations: ByClass
    roots: ByClass  # and of the covariance of the leading numbers the root
    lifelike: ByClass  # the share of made-up images that the encoder knew when it had just learned the class
    error: Tensor  # of the last task's images: the codec's squared error, summed, and over how many numbers


@record
class Proposal:
    """Unaligned centroids of one client's new classes, and the moments of their codes, as sums."""

    sums: ByClass
    firsts: ByClass
    seconds: ByClass
    counts: ByClass
    count: int


@record
class Remembered:
    """What the codec lost of one client's new images."""

    error: Tensor


@record
class Given:
    """What the loss needs beside a batch."""

    centroids: Tensor
    old: Tensor  # classes that the old encoder knows, as a mask
    held: Tensor  # classes that the client replays or has at hand, likewise
    weight: Tensor  # of an image in the loss, by its class
    prior: Tensor  # what the softmax expects of a class before it sees an image


@record
class Memory:
    """M^c: what one client keeps, by class."""

    codes: ByClass = field(default_factory=dict)  # bytes of the codec; or images


class Server:  # Algorithm 1
    """Has the codec fitted, places the centroids of new classes, and averages what the clients train."""

    def __init__(self, config: Config, setting: Setting):  # 1
        self.config, self.codec, self.device = config, codec_of(config, setting), torch.device(setting.device)
        latent, capacity = latent_size(config, setting), setting.capacity
        self.net = setting.encoder(latent)
        self.state = Model(
            weights_of(self.net), {}, torch.zeros(capacity, latent), mask((), capacity),  # 3
            weights_of(self.codec.net) if isinstance(self.codec, LearnedCodec) else {}, {}, {}, {}, {}, torch.zeros(2),
        )  # fmt: skip

    def broadcast(self) -> Model:
        return self.state  # 2

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:  # 4
        fit_codec(self, task, clients, Client.measure)
        if isinstance(self.codec, LearnedCodec) and task.index == 0:
            yield from self.train_codec(clients)
        if clients.once("align"):  # 5
            self.state.old_weights = {}  # nobody needs them yet
            proposals = clients.ask(clients.everyone(), Client.propose, self.broadcast())  # 6
            self.align(task, *(proposals.sum(name) or {} for name in ("sums", "firsts", "seconds", "counts")))  # 7, 8
            self.state.old_weights = self.state.weights if task.old and self.config.distill else {}
        for _ in clients.rounds():  # 9, 10
            updates = clients.ask(clients.sample(), Client.train, self.broadcast())  # 11-13
            self.state.weights = updates.mean("weights")  # 14
            yield  # 15, 16
        replies = clients.ask(clients.everyone(), Client.remember, Fitted(self.state.codec))
        error = replies.sum("error")
        self.state.error = torch.zeros(2) if error is None else error  # 17
        self.state.lifelike = self.state.lifelike | self.judged(task)

    def train_codec(self, clients: Clients) -> Iterator[None]:
        """Train a codec that is learned, by federated averaging."""
        for _ in clients.rounds(self.config.codec_rounds, "codec"):
            updates = clients.ask(clients.sample(), Client.train_codec, Fitted(self.state.codec))
            self.state.codec = updates.mean("weights")
            yield

    def align(self, task: Task, sums: ByClass, firsts: ByClass, seconds: ByClass, counts: ByClass) -> None:
        """Place the centroids of new classes beside the old ones, and keep the moments of their codes."""
        c, s = self.config, self.state
        s.centroids = placing.placed(s.centroids, task, sums, counts, c.alignment, c.spacing, c.align_steps)
        s.seen = mask(task.seen, len(s.centroids))
        leading = making.leading(self.codec, s.codec, c.tied)
        means, deviations, roots = making.moments(firsts, seconds, counts, leading, task.new)
        s.means, s.deviations, s.roots = s.means | means, s.deviations | deviations, s.roots | roots

    @torch.no_grad()
    def judged(self, task: Task) -> ByClass:
        """Make up images of the new classes and see what share the encoder knows: it has learned from others."""
        if not self.config.global_replay:
            return {}
        s = unflatten(Model, {name: tensor.cpu() for name, tensor in flatten(self.state).items()})
        draws = torch.Generator().manual_seed(seed_of("judged", task.index))
        made = making.made(
            self.codec, s.codec, (s.means, s.deviations, s.roots), self.config.tied, task.new, JUDGED, draws
        )
        net, centroids, seen = loaded(self.net.to(self.device), s.weights), s.centroids.to(self.device), s.seen
        codes = by_class(lambda images: net(images.to(self.device))[0], made)
        known = {
            j: masked(placing.scores(z, centroids, 1.0), seen.to(self.device)).argmax(1) == j for j, z in codes.items()
        }
        return {j: right.float().mean().cpu() for j, right in known.items()}

    def measured(self) -> dict[str, float | None]:
        """Say how near to the last task's images decoded codes are, in dB, and what share of made-up ones is known."""
        error, numbers = self.state.error.tolist()
        shares = [float(share) for share in self.state.lifelike.values()]
        return {
            "psnr": 10 * math.log10(255**2 * numbers / error) if error else None,
            "lifelike": sum(shares) / len(shares) if shares else None,
            "least_lifelike": min(shares, default=None),
        }


class Client:  # Algorithm 2
    """Replays what it has codes of and what it has not, trains, and keeps codes of what is new."""

    measure = measure

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting, self.codec = config, setting, codec_of(config, setting)
        self.net, self.old = (setting.encoder(latent_size(config, setting)) for _ in range(2))  # 1
        self.keeper = RawCodec(setting.shape) if config.exemplars in ("raw", "images") else self.codec
        self.at_once = max(1, 2**17 // math.prod(setting.shape[1:]))  # images through a network at a time

    def networks(self) -> dict[str, nn.Module]:
        learned = {"codec": self.codec.net} if isinstance(self.codec, LearnedCodec) else {}
        return {"net": self.net, "old": self.old, **learned}

    @remote
    def train_codec(self, memory: Memory, data: LocalData, message: Fitted) -> Training[Update]:
        pool = Pool(data.images, data.labels)
        trained = yield Fit(
            codec_loss, {"codec": message.weights}, ("codec",), pool, self.config.codec_lr, weight_decay=0.0
        )  # fmt: skip
        return Update(trained.weights, trained.count)

    @remote
    @torch.no_grad()
    def propose(self, memory: Memory, data: LocalData, message: Model) -> Proposal:
        loaded(self.net, message.weights)
        sums, counts = placing.proposed(by_class(self.encoded, keeping.new_images(data)))  # 13
        numbers = making.numbers_of(self.codec, message.codec, keeping.new_images(data))
        firsts, seconds = making.summed(numbers, making.leading(self.codec, message.codec, self.config.tied))
        return Proposal(sums, firsts, seconds, counts, len(data.labels))  # 14

    @remote
    def train(self, memory: Memory, data: LocalData, message: Model) -> Training[Update]:  # 3
        load = {"net": message.weights} | ({"old": message.old_weights} if message.old_weights else {})  # 12
        pool = data.cached("interleaved", lambda generator: self.interleaved(memory, data, message, generator))
        trained = yield Fit(
            self.loss, load, ("net",), pool, self.config.lr, self.given(pool, data.task, message),
            new_share=self.config.new_share,
        )  # fmt: skip  # 15-17, 22-25
        own = data.cached("own", lambda _: int((~pool.extra["made"]).sum()))  # made-up ones are no reason to weigh more
        return Update(trained.weights, min(trained.count, max(1, own)))

    @torch.no_grad()
    def interleaved(self, memory: Memory, data: LocalData, message: Model, generator: torch.Generator) -> Pool:
        """Put what is replayed beside the images of the task."""
        c, at_hand = self.config, data.classes()  # of old classes, too, in a client that stayed behind
        replay = {j: codes for j, codes in memory.codes.items() if j not in at_hand}
        kept = keeping.recalled(self.keeper, message.codec, replay)  # 5-7
        number = c.made_up or making.usual_number(memory.codes, data)
        absent = making.absent(data, kept) if c.global_replay and number else []  # 8
        if kept and c.lifelike:  # beside codes the network would learn which is which
            absent = [j for j in absent if j in message.lifelike and message.lifelike[j] >= c.lifelike]
        all_made = bool(absent) and not kept
        new = self.alike(all_made, data, message, generator) if c.one_domain else data.images  # 4
        made = self.made_up(absent, number, message, generator)  # 9
        images = torch.cat([new, *kept.values(), *made.values()])  # 10, 11
        labels = torch.cat([data.labels, keeping.labels_of(kept | made).to(data.labels)])
        is_made = torch.arange(len(images), device=labels.device) >= len(images) - number * len(made)
        weight = torch.where(is_made, c.made_weight or len(made) / max(1, len(data.task.old)), 1.0)
        return Pool(images, labels, extra={"made": is_made, "weight": weight})

    def alike(self, all_made: bool, data: LocalData, message: Model, generator: torch.Generator) -> Tensor:
        """Return the task's images as old ones look: decoded, or made up where all that is replayed is."""
        new = keeping.passed(self.keeper, message.codec, data)
        if all_made:
            new, counts = new.clone(), {j: len(data.of(j)) for j in data.classes()}
            for j, made in self.made_up(counts, max(counts.values(), default=0), message, generator).items():
                new[data.labels == j] = made[: counts[j]]
        return new

    def made_up(self, classes: Iterable[int], number: int, message: Model, generator: torch.Generator) -> ByClass:
        """Draw so many images of each class whose moments are known."""
        m = message
        moments = (m.means, m.deviations, m.roots)
        return making.made(self.codec, m.codec, moments, self.config.tied, classes, number, generator)

    def given(self, pool: Pool, task: Task, message: Model) -> Given:
        """Say what the loss has to know of the classes."""
        counts = torch.bincount(pool.labels, minlength=len(message.seen)).to(message.centroids)
        weight, new = counts.clamp_min(1) ** -self.config.balance, mask(task.new, len(counts)).to(counts.device)
        prior = self.config.calibrate * (log_shares(counts, new, self.config.new_share) + weight.log())
        weight = weight * counts.sum() / (weight * counts).sum().clamp_min(1)  # 1 on average
        return Given(message.centroids, mask(task.old, len(counts)), counts > 0, weight, prior)

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:  # 18
        """Eq. 7, a softmax beside the pull and no reconstruction, and line 20 where the old encoder knows the class."""
        c, old = self.config, nets.get("old")
        z = nets["net"](batch.images)[0]
        each = c.pull * squared_error(z, given.centroids[batch.labels])  # 19
        if c.contrast:
            scores = masked(placing.scores(z, given.centroids, c.temperature) + given.prior, given.held)
            each = each + c.contrast * nn.functional.cross_entropy(scores, batch.labels, reduction="none")
        if old is not None:
            with torch.no_grad():
                taught = old(batch.images)[0]  # 21: no decoder learns
            kept = c.distill * c.pull * given.old[batch.labels] * squared_error(z, taught)  # 20
            each = each + kept
        return (given.weight[batch.labels] * batch.extra["weight"] * each).mean()

    @remote
    @torch.no_grad()
    def remember(self, memory: Memory, data: LocalData, message: Fitted) -> Remembered:
        fitted, keep, rows = message.weights, self.quotas(memory, data), keeping.shuffled_rows(data)
        chosen = {j: rows[j][:number] for j, number in keep.items() if j in rows}  # 28
        memory.codes = keeping.updated(self.keeper, fitted, memory.codes, data, chosen, keep)  # 26: not encoded again
        error = squared_error(keeping.passed(self.keeper, fitted, data).float(), data.images.float()).sum()
        return Remembered(torch.stack([error, error.new_tensor(data.images.numel())]))  # 2, 27, 29

    def quotas(self, memory: Memory, data: LocalData) -> dict[int, int]:
        """Say how many exemplars of each class to keep from now on; `images` count as the codes they stand for."""
        if self.config.exemplars == "none":
            return {}
        room = int(self.config.memory_share * self.setting.budget.at(data.task))
        return keeping.quotas(self.keeper if self.config.exemplars == "raw" else self.codec, memory.codes, data, room)

    def encoded(self, images: Tensor) -> Tensor:
        """Return f(images), with the weights last loaded."""
        return in_parts(lambda part: self.net(part)[0], images, self.at_once)

    def predict(self, message: Model, images: Tensor) -> Tensor:
        codes, _ = loaded(self.net, message.weights)(images)
        return masked(placing.scores(codes, message.centroids, 1.0), message.seen)

    @torch.no_grad()
    def look(self, memory: Memory, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        new, some = keeping.shuffled_rows(data), {j: memory.codes[j] for j in classes if j in memory.codes}
        made = self.made_up(classes, 1, message, data.generator)
        return Pictures(
            real={j: data.images[new[j][0]] for j in classes if j in new},
            kept={j: images[0] for j, images in keeping.recalled(self.keeper, message.codec, some).items()},
            made={j: images[0] for j, images in made.items()},
        )

    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        return Exposed(*keeping.paired(self.keeper, message.codec, memory.codes, data))

    def overheard(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        """Show the images of mean codes: the first moments that `propose` sends."""
        numbers = making.numbers_of(self.codec, message.codec, keeping.new_images(data))
        means = {j: own.mean(0, True) for j, own in numbers.items()}
        return Exposed({j: data.of(j) for j in means}, making.pictures_of(self.codec, message.codec, means))

    @torch.no_grad()
    def invented(self, message: Model, number: int, generator: torch.Generator) -> Tensor:
        each = max(1, number // max(1, len(message.means)))
        made = self.made_up(message.means, each, message, generator)
        return torch.cat(list(made.values()) or [torch.zeros(0, *self.setting.shape, dtype=torch.uint8)])


def codec_of(config: Config, setting: Setting) -> TransformCodec | LearnedCodec | WebpCodec:
    """Return the codec that the knobs ask for."""
    numbers = math.prod(setting.shape)
    least = WebpCodec.least if config.codec == "webp" else 12  # fewer bytes hold nothing of a digit
    size = config.code_bytes or min(numbers, max(least, round(numbers / 10)))
    if config.exemplars in ("codes", "raw"):
        room = setting.budget.per_client  # a share of it may be too small: hr-mini keeps nothing then
        keeping.room_for_one(numbers if config.exemplars == "raw" else size, room, "a smaller code_bytes")
    return build(config.codec, setting.shape, size, config.codec_width)


def latent_size(config: Config, setting: Setting) -> int:
    """Return in how many numbers the encoder classifies."""
    return config.latent or 2 * setting.capacity


def codec_loss(nets: Nets, batch: Batch, given: None) -> Tensor:
    """Squared error of the pictures that a learned codec gives back, over the numbers of an image."""
    return squared_error(nets["codec"](batch.images), batch.images).mean() / math.prod(batch.images.shape[1:])


METHOD = Method(Config, Server, Client, Memory)
