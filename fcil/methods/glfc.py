"""GLFC: old and new classes learn at an even pace, and a proxy server picks the old model that teaches them.

Dong, Wang, Fang, Sun, Xu, Wang and Zhu, "Federated Class-Incremental Learning", CVPR 2022. A client weighs each image
by how far it is from being learned, over the mean of the old or of the new classes, and holds the outputs of old
classes where an old model has them. It notices a new task by itself: the global model becomes unsure of its images.
Then it sends what a small fixed network learns from a typical image of each of its classes; the proxy server rebuilds
these images and keeps the model that classifies them best. Whoever has such gradients has the images: see replay.png.

Where this differs from the released code: exemplars are chosen when a task ends, not when the next one is noticed, for
the model is the same, but by then the images are gone; none is chosen twice. The rise of the entropy that tells of a
task is the paper's where it brings ten classes, and is scaled for other numbers. At most `prototypes` are rebuilt at a
time. The learning rate follows the protocol; there it falls in some rounds and is back in the next.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from torch import Tensor, nn

from fcil.blocks import prototype_gradients as sending
from fcil.blocks.class_pace import compensated, related, unsureness
from fcil.blocks.codec import named
from fcil.blocks.exemplars import paired, passed, pictured, rehearsed, room_for_one, sources, with_replay
from fcil.blocks.inversion import LeNet
from fcil.blocks.losses import masked
from fcil.blocks.prototype_gradients import DECAY, Best, Choice, ProxyServer, Search
from fcil.blocks.training import features_of, loaded, outputs_of, weights_of
from fcil.federation.rounds import fit_codec, measure
from fcil.knobs import knob
from fcil.method import Answer, Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.records import ByClass, Done, Weights, record, varying
from fcil.scenario.tasks import LocalData, Task, mask
from fcil.seeds import seed_of

ENTROPY_BYTES = 4


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
        1.2, "rise that tells of a new task, in nats, where it brings ten classes; for n of them log10(n) times",
        above=0,
    )  # fmt: skip
    exemplar_codec: str = knob("raw", "how exemplars are kept: raw, or klt, trellis, dct or webp with bytes: webp:300")
    perturb_steps: int = knob(50, "steps that a prototype takes down the local model's loss before it is used", least=0)
    perturb_lr: float = knob(0.2, "learning rate of that", least=0)
    prototypes: int = knob(50, "most prototypes that the server rebuilds at a time, of all classes alike", least=1)
    inversion_steps: int = knob(250, "steps of L-BFGS in which prototypes are rebuilt from their gradients", least=1)
    inversion_inner: int = knob(20, "moves in a step; a search that has arrived takes no more", least=1)
    inversion_lr: float = knob(0.1, "length of a move", above=0)
    iterates: int = knob(20, "last steps of a search whose pictures make up the proxy set", least=1)
    reset_best: bool = knob(False, "a new proxy set forgets how good the best model was on the last one")


@record
class Model(Best):
    """What the server broadcasts."""

    codec: Weights  # what was fitted of the exemplars' codec


@record
class State(Choice):
    """The server's own: beside that, what its proxy chooses models by."""

    codec: Weights
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
            weights_of(net), {}, {}, nothing, nothing, nothing, noticed=False, accuracy=0.0, proxies=none,
            labels=torch.zeros(0, dtype=torch.int64), codec={}, signals=0,
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
            s, c = self.state, self.config
            chosen = clients.sample()
            if c.task_detect == "entropy":  # all others watch; whoever trains has the model anyway
                others = [client for client in clients.everyone() if client not in chosen]
                s.signals += clients.ask(others, Client.notice, self.current()).sum("signals") or 0
            updates = clients.ask(chosen, Client.train, self.broadcast())
            sent = [row for update in updates for row in update.gradients.values()]
            s.signals += sum(update.signals for update in updates)
            s.weights, seed = updates.mean("weights"), seed_of(self.setting.seed, "proxies", task.index, round)
            self.proxy.choose(s, sent, c.prototypes, search(c, c.iterates), c.reset_best, seed)
            yield
        clients.ask(clients.everyone(), Client.remember, self.current())

    def current(self) -> Current:
        return Current(self.state.weights, self.state.seen, self.state.codec)

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
        room_for_one(self.codec.size, setting.budget.per_client, "another exemplar_codec")

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old, "lenet": self.lenet}

    @remote
    def notice(self, memory: Memory, data: LocalData, message: Current) -> Noticed:
        return Noticed(int(self.signal(memory, data, message)))

    @torch.no_grad()
    def signal(self, memory: Memory, data: LocalData, message: Current | Model) -> bool:
        """Tell whether a new task has come: the global model is far less sure of the images than when last asked."""
        if not len(data.labels):
            return False
        images = passed(self.codec, message.codec, data)
        entropy = unsureness(outputs_of(loaded(self.net, message.weights), images), message.seen)
        rise = float(entropy - memory.entropy.sum())
        if self.setting.budget.at(data.task) >= ENTROPY_BYTES:
            memory.entropy = entropy.view(1)
        return rise > self.config.entropy_rise * math.log10(max(2, len(data.task.new)))

    @remote
    def train(self, memory: Memory, data: LocalData, message: Model) -> Training[Trained]:
        signal = not message.noticed
        if self.config.task_detect == "entropy":
            signal = self.signal(memory, data, message)
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
        labelled = compensated(logits, batch.labels, given.seen, given.learned)
        if "old" not in nets:
            return labelled
        with torch.no_grad():
            teacher = nets["old"](batch.images)
        kept = related(logits, batch.labels, given.seen, teacher, given.knows)
        return self.config.compensate * labelled + self.config.distill * kept

    def gradients(self, data: LocalData, weights: Weights, message: Model) -> Weights:
        """Return what LeNet learns from a prototype of each class at hand, moved down the local model's loss."""
        c, classes = self.config, torch.tensor(data.classes(), device=data.labels.device)
        images = self.prototypes(data, weights, message)
        images = sending.moved_down(self.net, images, classes, message.seen, c.perturb_steps, c.perturb_lr)
        return sending.unnamed_gradients(self.lenet, images, classes, data.generator)

    @torch.no_grad()
    def prototypes(self, data: LocalData, weights: Weights, message: Model) -> Tensor:
        """Return a typical image of each class."""
        images, features = passed(self.codec, message.codec, data), partial(features_of, loaded(self.net, weights))
        return sending.typical(images, data.labels, data.classes(), features)

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
        rows, images = self.gradients(data, message.weights, message), passed(self.codec, message.codec, data)
        rebuilt = sending.shown(self.lenet, rows, self.setting.shape, data.generator, search(self.config, 1))
        sent = self.prototypes(data, message.weights, message)
        real = data.images[sources(sent.flatten(1), images.flatten(1))]
        return Exposed({j: image[None] for j, image in zip(data.classes(), real, strict=True)}, rebuilt)


def search(config: Config, iterates: int) -> Search:
    return Search(config.inversion_steps, config.inversion_inner, config.inversion_lr, iterates)


METHOD = Method(Config, Server, Client, Memory)
