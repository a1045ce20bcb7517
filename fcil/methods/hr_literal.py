"""Hybrid Replay as its paper prints it, with its errata mended: PAPER.md says where and why.

Khademi Nori, Kim and Wang, "Federated Class-Incremental Learning: A Hybrid Approach Using Latent Exemplars and
Data-Free Techniques to Address Local and Global Forgetting", ICLR 2025. `Server` is Algorithm 1 and `Client` is
Algorithm 2; the numbers at the line ends are the paper's lines. An autoencoder's encoder f classifies by the nearest
class centroid; its decoder g turns stored codes (against local forgetting) and noisy centroids (against global
forgetting) back into images. On natural images it collapses: see RESULTS.md.
"""

import math
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fcil.blocks import centroids as placing
from fcil.blocks import made_up as making
from fcil.blocks.augment import augmented
from fcil.blocks.codes import BITS, code_bytes, renewed, scale_bytes, unpacked
from fcil.blocks.exemplars import holdings, labels_of, new_images, shares, shuffled
from fcil.blocks.losses import divergence_from_normal, expected_squared_error, norm_error, squared_error
from fcil.blocks.training import as_bytes, by_class, in_parts, loaded, normal, weights_of
from fcil.knobs import knob
from fcil.method import Answer, Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.networks import AutoEncoder
from fcil.records import ByClass, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs; what the paper leaves open is chosen as PAPER.md says."""

    lr: float = knob(0.1, "learning rate of the clients' SGD", above=0)
    latent: int = knob(0, "numbers in a code; 0 is a tenth of an image's", least=0)
    variational: bool = knob(True, "variational autoencoder; false is a deterministic one, without KL term")
    decoder_width: int = knob(
        0, "channels of the decoder before its last layer; 0 is as many as the encoder begins with", least=0, most=1024
    )
    pull: float = knob(
        0.0,
        "lambda of Eq. 7, the pull of a code to its centroid; 0 is 1/30 of an image's numbers: 102 at 32x32",
        least=0,
    )
    kl: float = knob(1.0, "weight of the KL term of Eq. 7", least=0)
    distill_codes: float = knob(1.0, "weight of line 20: the old encoder teaches the new one", least=0)
    distill_images: float = knob(1.0, "weight of line 21: the old autoencoder teaches the new one", least=0)
    distill_form: str = knob(
        "squared", "norms of lines 20 and 21: squared, or as printed (with scale=printed)", choices=("squared", "norm")
    )
    distill_on: str = knob("all", "images that the old autoencoder teaches on", choices=("all", "replay"))
    scale: str = knob(
        "pixels", "pixels: the loss is divided by an image's numbers; printed: it is not", choices=("pixels", "printed")
    )
    alignment: str = knob("lennard-jones", "how the server places new centroids", choices=tuple(placing.ALIGNMENTS))
    spacing: float = knob(5.0, "sigma of Eq. 8: centroids rest 2^(1/6) sigma apart", above=0)
    align_steps: int = knob(3000, "most steps of an alignment", least=1)
    proposers: str = knob("everyone", "clients that propose centroids", choices=("everyone", "selected"))
    selection: str = knob("round", "clients are selected once a round, or once a task", choices=("round", "task"))
    centroids: str = knob(
        "shared", "classify by the aligned centroids, or by each client's own class means",
        choices=("shared", "per_client"),
    )  # fmt: skip
    exemplars: str = knob(
        "codes", "what is kept: codes; raw images that fit; images, one for each code (hr-literal-perfect); nothing",
        choices=("codes", "raw", "images", "none"),
    )  # fmt: skip
    code_bits: str = knob("8", "bits for each number of a code that is kept", choices=BITS)
    memory_share: float = knob(1.0, "share of the benchmark's memory that is used", least=0, most=1)
    quota_over: str = knob(
        "held", "memory is shared by the classes a client holds, or by all seen", choices=("held", "seen")
    )
    memory_update: str = knob("reencode", "line 26: codes are re-encoded, or stay", choices=("reencode", "frozen"))
    global_replay: bool = knob(True, "line 9: make up images of classes the client holds no code of")
    noise: float = knob(
        0.0, "sigma of line 9; 0 is the spread of one image's code at best: 1/sqrt(1 + 2 lambda/kl)", least=0
    )
    fresh_noise: bool = knob(False, "draw the noise of line 9 anew whenever an image is used, not once a task")
    made_up: int = knob(
        0,
        "images made up for a class of which there is no code; 0: as many as there are codes of others, on average",
        least=0,
    )


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights  # theta_h
    old_weights: Weights  # theta_{h-1}
    centroids: Tensor  # p, a row for each class
    seen: Tensor  # classes that have a centroid, as a mask
    of_clients: Tensor  # p^c where centroids=per_client: (clients, classes, latent), infinite where one has no image
    judged: Tensor  # the old exemplars of the last task, by class: how many, and how many were classified rightly


@record
class Proposal:
    """Unaligned centroids of one client's new classes, as sums: they add up over clients."""

    sums: ByClass
    counts: ByClass
    count: int


@record
class Remembered:
    """How one client's old exemplars were classified when the task ended, and its own class means if asked for."""

    judged: Tensor
    means: ByClass


@record
class Memory:
    """M^c: what one client keeps."""

    codes: ByClass = field(default_factory=dict)  # latent exemplars less their centroid, packed; or images
    scales: ByClass = field(default_factory=dict)


class Server:  # Algorithm 1
    """Places the centroids of new classes, and averages what the clients train."""

    def __init__(self, config: Config, setting: Setting):  # 1
        self.config, self.setting = config, setting
        latent, capacity = latent_size(config, setting), setting.capacity
        weights = weights_of(network_of(config, setting))  # 3
        self.state = Model(
            weights, weights, torch.zeros(capacity, latent), mask((), capacity),
            of_clients=torch.zeros(0, capacity, latent), judged=torch.zeros(2, capacity, dtype=torch.int64),
        )  # fmt: skip

    @staticmethod
    def one_by_one(config: Config) -> list[Answer]:
        return [Client.remember] if config.centroids == "per_client" else []

    def broadcast(self) -> Model:
        return self.state  # 2

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:  # 4
        chosen = clients.sample()  # 5
        if clients.once("align"):
            self.state.old_weights = self.state.weights  # Algorithm 2, line 12
            asked = clients.everyone() if self.config.proposers == "everyone" else chosen
            proposals = clients.ask(asked, Client.propose_centroids, self.broadcast())  # 6
            self.align(task, proposals.sum("sums") or {}, proposals.sum("counts") or {})  # 7
        for _ in clients.rounds():  # 9
            active = clients.sample() if self.config.selection == "round" else chosen
            updates = clients.ask(active, Client.train, self.broadcast())  # 8, 10-13
            self.state.weights = updates.mean("weights")  # 14
            yield  # 15, 16
        replies = clients.ask(clients.everyone(), Client.remember, self.broadcast())  # Algorithm 2, lines 26-28
        if self.config.centroids == "per_client":
            self.state.of_clients = placing.side_by_side([reply.means for reply in replies], self.state.centroids)
        judged = replies.sum("judged")
        self.state.judged = torch.zeros_like(self.state.judged) if judged is None else judged  # 17

    def align(self, task: Task, sums: ByClass, counts: ByClass) -> None:
        """Place the centroids of new classes beside the old ones, which stay; Eq. 9, mended."""
        c = self.config
        p = placing.placed(self.state.centroids, task, sums, counts, c.alignment, c.spacing, c.align_steps)
        self.state.centroids, self.state.seen = p, mask(task.seen, len(p))
        self.state.of_clients = self.state.of_clients.clone()
        self.state.of_clients[:, list(task.new)] = p[list(task.new)]

    def measured(self) -> dict[str, float | None]:
        """Say how many of the old exemplars that were replayed are classified rightly.

        Far above the accuracy on real test images, the encoder tells decoded from real, not class from class. They are
        judged by the shared centroids, so there is nothing to compare where clients' own decide.
        """
        asked, right = self.state.judged.sum(1).tolist()
        return {"old_exemplars": 100 * right / asked if asked and self.config.centroids == "shared" else None}


class Client:  # Algorithm 2
    """Replays what it has codes of and what it has not, trains, and re-encodes its memory."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting, self.latent = config, setting, latent_size(config, setting)
        self.net, self.old = (network_of(config, setting) for _ in range(2))  # 1
        self.bits, self.pull = int(config.code_bits), config.pull or math.prod(setting.shape) / 30
        self.noise = config.noise or ((1 + 2 * self.pull / config.kl) ** -0.5 if config.kl else 0.0)
        self.at_once = max(1, 2**17 // math.prod(setting.shape[1:]))  # images through a network at a time

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old}

    @remote
    @torch.no_grad()
    def propose_centroids(self, memory: Memory, data: LocalData, message: Model) -> Proposal:
        loaded(self.net, message.weights)
        sums, counts = placing.proposed(by_class(self.encoded, new_images(data)))  # 13
        return Proposal(sums, counts, len(data.labels))  # 14

    @remote
    def train(self, memory: Memory, data: LocalData, message: Model) -> Training[Update]:  # 3
        load = {"net": message.weights}  # 12
        distils = self.config.distill_codes + self.config.distill_images > 0
        if data.task.old and (distils or self.config.fresh_noise):
            load["old"] = message.old_weights
        pool = data.cached("interleaved", lambda generator: self.interleaved(memory, data, message, generator))
        fit = Fit(self.loss, load=load, trains=("net",), lr=self.config.lr, pool=pool, given=message.centroids)
        trained = yield fit  # 15-17, 22-25
        return Update(trained.weights, trained.count)

    @torch.no_grad()
    def interleaved(self, memory: Memory, data: LocalData, message: Model, generator: torch.Generator) -> Pool:
        """Put what is replayed beside the images of the task: of kind 0 themselves, 1 if decoded, 2 if made up."""
        loaded(self.old, message.old_weights)
        at_hand = data.classes()  # of old ones, too, in a client that stayed behind
        kept = {j: images for j, images in self.recalled(memory, message).items() if j not in at_hand}  # 5-7
        absent = making.absent(data, kept) if self.config.global_replay else []  # 8
        number = self.config.made_up or making.usual_number(memory.codes, data)
        made = self.made_up(absent, number, message, generator)  # 9
        images = torch.cat([data.images, *kept.values(), *made.values()])  # 4, 10, 11
        labels = torch.cat([data.labels, labels_of(kept | made).to(data.labels)])
        counts = torch.tensor([len(data.labels), len(labels_of(kept)), len(labels_of(made))])
        kinds = torch.tensor([0, 1, 2]).repeat_interleave(counts)
        return Pool(images, labels, extra={"kind": kinds.to(labels)})

    def made_up(self, classes: list[int], number: int, message: Model, generator: torch.Generator) -> ByClass:
        """Decode noisy centroids, with the weights last loaded: so many images of each class."""
        z = {j: message.centroids[j].expand(number, -1) for j in classes if number}
        return by_class(lambda rows: self.decoded(rows + self.noise * normal(rows.shape, generator)), z)

    def loss(self, nets: Nets, batch: Batch, centroids: Tensor) -> Tensor:  # 18
        """Eq. 7 and the two distillation terms, averaged over a minibatch."""
        c, net, old, p = self.config, nets["net"], nets.get("old"), centroids[batch.labels]
        images = self.refreshed(old, batch, p) if c.fresh_noise and old is not None else batch.images
        mean, logvar = net.encode(images)
        z, off, clustering = mean, torch.zeros_like(mean), self.pull * squared_error(mean, p)
        if c.variational:
            off = (logvar / 2).exp() * normal(mean.shape, batch.generator)
            z, clustering = mean + off, self.pull * expected_squared_error(mean, logvar, p)
            clustering = clustering + c.kl * divergence_from_normal(mean, logvar)
        decoded = net.decode(z)
        total = squared_error(decoded, images) / 2 + clustering  # 19
        if old is not None:
            with torch.no_grad():
                old_mean, _ = old.encode(images)
                old_images = old.decode(old_mean + off)  # off by the same: where nothing was learned nothing differs
            gap = squared_error if c.distill_form == "squared" else norm_error
            distilled = c.distill_codes * gap(mean, old_mean)  # 20
            distilled = distilled + c.distill_images * gap(decoded, old_images)  # 21
            total = total + (distilled if c.distill_on == "all" else distilled * (batch.extra["kind"] > 0))
        return total.mean() / (math.prod(self.setting.shape) if c.scale == "pixels" else 1)

    def refreshed(self, old: Any, batch: Batch, p: Tensor) -> Tensor:
        """Make up anew what was made up in a batch."""
        with torch.no_grad():
            fresh = old.decode(p + self.noise * normal(p.shape, batch.generator))
            fresh = augmented(fresh, self.setting.augment, batch.generator)
        return torch.where((batch.extra["kind"] == 2).view(-1, 1, 1, 1), fresh, batch.images)

    @remote
    @torch.no_grad()
    def remember(self, memory: Memory, data: LocalData, message: Model) -> Remembered:
        c, p = self.config, message.centroids
        loaded(self.net, message.weights)
        loaded(self.old, message.old_weights)
        again = by_class(self.encoded, self.recalled(memory, message))  # 26
        keep, new = self.quotas(memory, data), shuffled(data)
        chosen = {j: new[j][:number] for j, number in keep.items() if j in new}  # 28
        if c.exemplars in ("raw", "images"):
            memory.codes = {j: (memory.codes | chosen)[j][:number] for j, number in keep.items()}
        else:
            fresh = (again if c.memory_update == "reencode" else {}) | by_class(self.encoded, chosen)
            rows = {j: z - p[j] for j, z in fresh.items()}
            memory.codes, memory.scales = renewed(memory.codes, memory.scales, rows, keep, self.bits)
        own = again | by_class(self.encoded, new) if c.centroids == "per_client" else {}
        means = {j: z.mean(0) for j, z in own.items()}
        return Remembered(placing.counted(again, p, message.seen), means)  # 2, 27, 29

    def quotas(self, memory: Memory, data: LocalData) -> dict[int, int]:
        """Say how many exemplars of each class to keep from now on; `images` count as the codes they stand for."""
        held = holdings(memory.codes, data) if self.config.exemplars != "none" else {}
        room = int(self.config.memory_share * self.setting.budget.at(data.task))
        if self.config.quota_over == "seen":
            room = room * len(held) // len(data.task.seen)
        size, each = code_bytes(self.latent, self.bits), scale_bytes(self.bits)
        if self.config.exemplars == "raw":
            size, each = math.prod(self.setting.shape), 0
        return {j: number for j, number in shares(held, room, size, each, data.generator).items() if number}

    def predict(self, message: Model, images: Tensor) -> Tensor:
        codes, _ = loaded(self.net, message.weights).encode(images)  # type: ignore[operator]
        if len(message.of_clients) == 0:
            return placing.nearest(codes, message.centroids, message.seen)
        return torch.stack([placing.nearest(codes, p, message.seen) for p in message.of_clients]).amax(0)

    @torch.no_grad()
    def look(self, memory: Memory, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        loaded(self.old, message.weights)
        new = shuffled(data)
        return Pictures(
            real={j: new[j][0] for j in classes if j in new},
            kept={j: images[0] for j, images in self.recalled(memory, message, classes).items()},
            made={j: self.decoded(message.centroids[j : j + 1])[0] for j in classes},
        )

    @torch.no_grad()
    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        loaded(self.old, message.weights)
        new = shuffled(data)
        kept = self.recalled(memory, message, new)
        return Exposed({j: new[j][: len(own)] for j, own in kept.items()}, kept, drawn=True)

    @torch.no_grad()
    def overheard(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        """Show the decoded class means that `propose_centroids` sends, by the model that they were made with."""
        loaded(self.net, message.old_weights), loaded(self.old, message.old_weights)
        new = new_images(data)
        means = {j: z.mean(0, True) for j, z in by_class(self.encoded, new).items()}
        return Exposed(new, by_class(self.decoded, means))

    @torch.no_grad()
    def invented(self, message: Model, number: int, generator: torch.Generator) -> Tensor:
        loaded(self.old, message.weights)
        z = message.centroids[message.seen]
        z = z.repeat_interleave(max(1, number // max(1, len(z))), 0)
        return self.decoded(z + self.noise * normal(z.shape, generator))

    def encoded(self, images: Tensor) -> Tensor:
        """Return f(images), with the weights last loaded."""
        return in_parts(lambda part: self.net.encode(part)[0], images, self.at_once)

    def decoded(self, codes: Tensor) -> Tensor:
        """Return g(codes) as bytes, with the weights last loaded."""
        return in_parts(lambda part: as_bytes(self.old.decode(part)), codes, self.at_once)

    def restored(self, memory: Memory, message: Model) -> ByClass:
        """Return the codes that are kept as numbers."""
        codes = unpacked(memory.codes, memory.scales, self.bits, self.latent)
        return {j: rows + message.centroids[j] for j, rows in codes.items()}

    def recalled(self, memory: Memory, message: Model, classes: Container[int] | None = None) -> ByClass:
        """Return the exemplars that are kept, of some classes or of all, as images; with the weights last loaded."""
        kept = {j: memory.codes[j] for j in sorted(memory.codes) if classes is None or j in classes}
        if self.config.exemplars in ("raw", "images"):
            return kept
        return by_class(self.decoded, self.restored(Memory(kept, memory.scales), message))


def latent_size(config: Config, setting: Setting) -> int:
    """Return how many numbers a code has: a tenth of an image's, as Table 3 implies, unless set."""
    return config.latent or max(1, round(math.prod(setting.shape) / 10))


def network_of(config: Config, setting: Setting) -> AutoEncoder:
    """Return the autoencoder that the knobs ask for."""
    return setting.autoencoder(latent_size(config, setting), config.variational, config.decoder_width)


METHOD = Method(Config, Server, Client, Memory)
