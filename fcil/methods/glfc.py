"""GLFC: old and new classes learn at an even pace, and a proxy server picks the old model that teaches them.

Dong, Wang, Fang, Sun, Xu, Wang and Zhu, "Federated Class-Incremental Learning", CVPR 2022. A client weighs each image
by how far it is from being learned, over the mean of the old or of the new classes, and holds the outputs of old
classes where an old model has them. It notices a new task by itself: the global model becomes unsure of its images.
Then it sends what a small fixed network learns from a typical image of each of its classes; the proxy server rebuilds
these images and keeps the model that classifies them best. Whoever has such gradients has the images: see replay.png.

Where this differs from the released code: exemplars are chosen when a task ends, not when the next one is noticed, for
the model is the same, but by then the images are gone; none is chosen twice. The rise of the entropy that tells of a
task is the paper's where it brings ten classes, and is scaled for other numbers; it is that of images as they are, also
where exemplars have a codec. At most `prototypes` are rebuilt at a time. The learning rate follows the protocol; there
it falls in some rounds and is back in the next.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from torch import Tensor, nn

from fcil.blocks.codec import named
from fcil.blocks.exemplars import paired, passed, pictured, rehearsed, room_for_one, sources, with_replay
from fcil.blocks.inversion import LeNet, perturbed
from fcil.blocks.losses import binary_cross_entropies, masked, one_hot
from fcil.blocks.prototype_gradients import ProxyServer, Search, rebuilt, typical, unnamed_gradients
from fcil.blocks.training import features_of, in_parts, loaded, weights_of
from fcil.federation.rounds import fit_codec, measure
from fcil.knobs import knob
from fcil.method import Answer, Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.records import ByClass, Done, Weights, record, varying
from fcil.scenario.tasks import LocalData, Task, mask
from fcil.seeds import seed_of

DECAY, ENTROPY_BYTES = 1e-5, 4


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(2.0, "learning rate of the clients' SGD: large, as the loss is a mean over classes, too", above=0)
    compensate: float = knob(0.5, "lambda_1: weight of the labels, where there is an old model", least=0)
    distill: float = knob(0.5, "lambda_2: weight of the old model's outputs", least=0)
    task_detect: str = knob(
        "entropy", "how a client learns of a new task: the entropy of its images rises, or it is told",
        choices=("entropy", "oracle"),
    )  # fmt: skip
    entropy_rise: float = knob(
        1.2,
        "rise that tells of a new task, in nats, where it brings ten classes; for n of them log10(n) times",
        above=0,
    )
    exemplar_codec: str = knob("raw", "how exemplars are kept: raw, or klt, dct or webp and its bytes, as webp:300")
    perturb_steps: int = knob(50, "steps that a prototype takes down the local model's loss before it is used", least=0)
    perturb_lr: float = knob(0.2, "learning rate of that", least=0)
    prototypes: int = knob(50, "most prototypes that the server rebuilds at a time, of all classes alike", least=1)
    inversion_steps: int = knob(250, "steps of L-BFGS in which prototypes are rebuilt from their gradients", least=1)
    inversion_inner: int = knob(20, "moves in a step; a search that has arrived takes no more", least=1)
    inversion_lr: float = knob(0.1, "length of a move", above=0)
    iterates: int = knob(20, "last steps of a search whose pictures make up the proxy set", least=1)
    reset_best: bool = knob(False, "a new proxy set forgets how good the best model was on the last one")


@record
class Model:
    """What the server broadcasts."""

    weights: Weights
    best_1: Weights  # the best model of the last task; empty if there is none
    best_2: Weights  # the best model since prototypes came
    knows_1: Tensor  # classes that each of them has outputs of, as a mask
    knows_2: Tensor
    seen: Tensor  # classes that have come so far
    noticed: bool  # whether prototypes of this task have come
    codec: Weights  # what was fitted of the exemplars' codec


@record
class State(Model):
    """The server's own: beside that, what the proxy server keeps for itself."""

    accuracy: float  # of the best model on the proxy set that it was chosen by
    proxies: Tensor  # rebuilt prototypes, uint8, those of the last step at the end
    labels: Tensor
    signals: int  # how often a client noticed a new task since this one began


@record
class Current:
    """The global model alone."""

    weights: Weights
    seen: Tensor
    codec: Weights


@record
class Noticed:
    """Whether a client noticed a new task."""

    signals: int


@record
class Trained:
    """A locally trained network, and the gradients of prototypes where a new task was noticed."""

    weights: Weights
    count: int
    gradients: Weights = varying("names")  # a row for each prototype, under a number that says nothing of its class
    signals: int


@record
class Given:
    """What the loss needs of the message and the memory: masks over the classes."""

    seen: Tensor
    knows: Tensor  # those that the old model knows
    learned: Tensor  # those that the client learned in earlier tasks


@record
class Memory:
    """Exemplars by class, the best first, and how unsure the global model was when last asked."""

    exemplars: ByClass = field(default_factory=dict)
    entropy: Tensor = field(default_factory=lambda: torch.zeros(0))


class Server:
    """Averages what the clients train; its proxy rebuilds prototypes and keeps the model that knows them best."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting, self.codec = config, setting, named(config.exemplar_codec, setting.shape)
        net = setting.classifier()
        self.proxy = ProxyServer(net, setting.shape, setting.capacity, setting.augment, setting.device)
        nothing, none = mask((), setting.capacity), torch.zeros(0, *setting.shape, dtype=torch.uint8)
        self.state = State(
            weights_of(net), {}, {}, nothing, nothing, nothing, False, {},
            accuracy=0.0, proxies=none, labels=torch.zeros(0, dtype=torch.int64), signals=0,
        )  # fmt: skip

    @staticmethod
    def one_by_one(config: Config) -> list[Answer]:
        return [Client.train]

    def broadcast(self) -> Model:
        return Model(*(getattr(self.state, part.name) for part in fields(Model)))

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        fit_codec(self, task, clients, Client.measure)
        if clients.once("new classes"):
            self.state.seen, self.state.noticed, self.state.signals = mask(task.seen, len(self.state.seen)), False, 0
        for round in clients.rounds():
            chosen = clients.sample()
            if self.config.task_detect == "entropy":  # all others watch; whoever trains has the model anyway
                others = [client for client in clients.everyone() if client not in chosen]
                self.state.signals += clients.ask(others, Client.notice, self.current(False)).sum("signals") or 0
            updates = clients.ask(chosen, Client.train, self.broadcast())
            sent = [row for update in updates for row in update.gradients.values()]
            self.state.signals += sum(update.signals for update in updates)
            self.state.weights = updates.mean("weights")
            self.choose(sent, seed_of("proxies", task.index, round))
            yield
        clients.ask(clients.everyone(), Client.remember, self.current())

    def current(self, with_codec: bool = True) -> Current:
        """Return the global model, and the codec for those who need it."""
        return Current(self.state.weights, self.state.seen, self.state.codec if with_codec else {})

    def choose(self, sent: list[Tensor], seed: int) -> None:
        """Take over what prototypes came, and keep the global model if none was better on the proxy set."""
        s, c = self.state, self.config
        if sent:
            s.proxies, s.labels = self.proxy.rebuilt(torch.stack(sent), c.prototypes, search(c, c.iterates), seed)
            s.best_1, s.knows_1, s.noticed = s.best_2, s.knows_2, True
            s.accuracy = 0.0 if c.reset_best else s.accuracy
        if len(s.labels):
            accuracy = self.proxy.accuracy(s.weights, s.seen, s.proxies, s.labels, seed)
            if accuracy >= s.accuracy:
                s.best_2, s.knows_2, s.accuracy = s.weights, s.seen, accuracy

    def measured(self) -> dict[str, float | None]:
        """Say how often clients noticed a new task, and the best model's accuracy on the proxy set."""
        s = self.state
        return {"signals": float(s.signals), "proxy_accuracy": 100 * s.accuracy if len(s.labels) else None}

    def look(self) -> ByClass:
        """Show a rebuilt prototype of each class."""
        return dict(zip(self.state.labels.tolist(), self.state.proxies, strict=True))


class Client:
    """Watches for new tasks, trains on new images and exemplars, and sends gradients of prototypes."""

    measure = measure

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting, self.codec = config, setting, named(config.exemplar_codec, setting.shape)
        self.net, self.old = setting.classifier(), setting.classifier()
        self.lenet = LeNet(setting.shape, setting.capacity)
        self.at_once = max(1, 2**17 // math.prod(setting.shape))  # images through a network at a time
        room_for_one(self.codec.size, setting.budget.per_client, "another exemplar_codec")

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old, "lenet": self.lenet}

    @remote
    def notice(self, memory: Memory, data: LocalData, message: Current) -> Noticed:
        return Noticed(int(self.signal(memory, data, message.weights, message.seen)))

    @torch.no_grad()
    def signal(self, memory: Memory, data: LocalData, weights: Weights, seen: Tensor) -> bool:
        """Tell whether a new task has come: the global model is far less sure of the images than when last asked."""
        if not len(data.labels):
            return False
        p = masked(in_parts(loaded(self.net, weights), data.images, self.at_once), seen).softmax(1)
        entropy = -(p * (p + 1e-5).log()).sum(1).mean().float()
        rise = float(entropy - memory.entropy.sum())
        if self.setting.budget.at(data.task) >= ENTROPY_BYTES:
            memory.entropy = entropy.view(1)
        return rise > self.config.entropy_rise * math.log10(max(2, len(data.task.new)))

    @remote
    def train(self, memory: Memory, data: LocalData, message: Model) -> Training[Trained]:
        signal = not message.noticed
        if self.config.task_detect == "entropy":
            signal = self.signal(memory, data, message.weights, message.seen)
        old, knows = (message.best_2, message.knows_2) if signal else (message.best_1, message.knows_1)
        load = {"net": message.weights} | ({"old": old} if old else {})
        pool = data.cached("pool", lambda _: Pool(*with_replay(self.codec, message.codec, memory.exemplars, data)))
        learned = mask(tuple(memory.exemplars), len(message.seen)).to(message.seen.device)
        trained = yield Fit(
            self.loss, load, ("net",), pool, self.config.lr, Given(message.seen, knows, learned),
            momentum=0.0, weight_decay=DECAY,
        )  # fmt: skip
        sent = self.gradients(data, trained.weights, message) if signal and len(data.labels) else {}
        return Trained(trained.weights, trained.count, sent, int(signal))

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        logits = nets["net"](batch.images)
        target = one_hot(batch.labels, logits)
        weight = compensation(logits, batch.labels, given.learned)
        labelled = (weight * binary_cross_entropies(logits, target, given.seen)).mean()
        if "old" not in nets:
            return labelled
        with torch.no_grad():
            target = torch.where(given.knows, nets["old"](batch.images).sigmoid(), target)
        kept = binary_cross_entropies(logits, target, given.seen).mean()
        return self.config.compensate * labelled + self.config.distill * kept

    def gradients(self, data: LocalData, weights: Weights, message: Model) -> Weights:
        """Return what LeNet learns from a prototype of each class at hand, moved down the local model's loss."""
        net, classes = loaded(self.net, weights), torch.tensor(data.classes(), device=data.labels.device)
        images, target = self.prototypes(data, message), one_hot(classes, message.weights["head.bias"][None])

        def loss(x: Tensor) -> Tensor:
            return binary_cross_entropies(net(self.net.normalise.pixels(x)), target, message.seen)

        start, c = self.net.normalise(images), self.config
        images = perturbed(loss, start, c.perturb_steps, c.perturb_lr, DECAY)
        return unnamed_gradients(self.lenet, images, classes, data.generator)

    @torch.no_grad()
    def prototypes(self, data: LocalData, message: Model) -> Tensor:
        """Return a typical image of each class, by the weights last loaded."""
        shown = passed(self.codec, message.codec, data)
        return typical(shown, data.labels, data.classes(), partial(features_of, self.net))

    @remote
    @torch.no_grad()
    def remember(self, memory: Memory, data: LocalData, message: Current) -> Done:
        features, room = partial(features_of, loaded(self.net, message.weights)), self.setting.budget.at(data.task)
        room = max(0, room - (ENTROPY_BYTES if self.config.task_detect == "entropy" else 0))
        memory.exemplars = rehearsed(self.codec, message.codec, memory.exemplars, data, features, room)
        return Done()

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return masked(loaded(self.net, message.weights)(images), message.seen)

    def look(self, memory: Memory, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        return Pictures(*pictured(self.codec, message.codec, memory.exemplars, data, classes), {})

    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        return Exposed(*paired(self.codec, message.codec, memory.exemplars, data))

    def overheard(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        """Show what comes of the gradients of prototypes, as the proxy server rebuilds them, beside the prototypes."""
        if not len(data.labels):
            return Exposed({}, {})
        rows, shown = self.gradients(data, message.weights, message), passed(self.codec, message.codec, data)
        real = data.images[sources(self.prototypes(data, message).flatten(1), shown.flatten(1))]
        sent = torch.stack(list(rows.values()))
        (pictures,), labels = rebuilt(self.lenet, sent, self.setting.shape, data.generator, search(self.config, 1))
        return Exposed(
            {j: image[None] for j, image in zip(data.classes(), real, strict=True)},
            {j: picture[None] for j, picture in zip(labels.tolist(), pictures, strict=True)},
        )


def search(config: Config, iterates: int) -> Search:
    return Search(config.inversion_steps, config.inversion_inner, config.inversion_lr, iterates)


def compensation(logits: Tensor, labels: Tensor, learned: Tensor) -> Tensor:
    """Weigh images by how far their own output is from 1, over the mean of old or of new ones; if none is old, 1."""
    off = (logits.detach().gather(1, labels[:, None])[:, 0].sigmoid() - 1).abs()
    old = learned[labels].to(off)
    means = [(off * kind).sum() / kind.sum().clamp_min(1) for kind in (old, 1 - old)]
    mean = (old * means[0] + (1 - old) * means[1]).clamp_min(1e-12)
    return torch.where(learned.any(), off / mean, 1.0)


METHOD = Method(Config, Server, Client, Memory)
