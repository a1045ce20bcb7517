"""BiC: distillation, and then two numbers that take back the bias of the head towards new classes.

Wu, Chen, Wang, Ye, Liu, Guo and Fu, "Large Scale Incremental Learning", CVPR 2019, as the local training of each client
inside federated averaging. Stage 1 learns new images and exemplars under an old model that is corrected itself. Stage 2
freezes the network and corrects the outputs of the new classes to alpha o + beta, with which least is lost on images
that were held out: a tenth of the exemplars, and of each new class as many as of an old one, or one that weighs as
much. What was trained on once is never held out. The clients send sums of slopes and curvatures over theirs, so that
the server descends on the loss of all of them together. The pairs of earlier tasks stay with their classes, in
training and at test.

Where this differs from the paper: exemplars are drawn at random, since of a herded list the best would be held out. The
server takes a few of Newton's steps in place of hundreds of plain ones. Distillation is a KL divergence in place of a
soft cross-entropy, which is more by the teacher's entropy and has the same gradient. And alpha is held near 1 as beta
is near 0 in the released code, or a few easy images would drive it to infinity.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fcil.blocks.codec import Fitted, named
from fcil.blocks.correction import Slope, corrected, descended, slopes
from fcil.blocks.exemplars import paired, pictured, quotas, room_for_one, updated, with_replay
from fcil.blocks.held_out import balanced, divided, rows_in_order, to_hold_out, whole
from fcil.blocks.losses import cross_entropy, distillation, masked
from fcil.blocks.training import loaded, outputs_of, weights_of
from fcil.federation.rounds import fedavg, fit_codec, measure
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.records import ByClass, Done, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.1, "learning rate of the clients' SGD", above=0)
    temperature: float = knob(2.0, "temperature of the distillation", above=0)
    validation: float = knob(0.1, "share of the exemplars that is held out to find alpha and beta", above=0, most=0.9)
    correction_rounds: int = knob(10, "rounds in which the server finds alpha and beta of a task", least=1)
    hold_alpha: float = knob(0.01, "weight of (alpha - 1)^2 / 2, which keeps alpha finite", above=0)
    hold_beta: float = knob(0.1, "weight of beta^2 / 2", above=0)
    exemplar_codec: str = knob("raw", "how exemplars are kept: raw, or klt, trellis, dct or webp with bytes: webp:300")


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights
    old_weights: Weights  # the global model after the last task
    new: Tensor  # classes of this task, as a mask
    old: Tensor  # classes of earlier tasks
    alpha: Tensor  # of each class; those of a task have it in common
    beta: Tensor
    codec: Weights  # what was fitted of the exemplars' codec


@record
class Given:
    """What the loss needs of the message."""

    new: Tensor
    old: Tensor
    alpha: Tensor
    beta: Tensor


@record
class Memory:
    """Exemplars by class: those that are trained on, and those that are held out."""

    exemplars: ByClass = field(default_factory=dict)
    held_out: ByClass = field(default_factory=dict)


class Server:
    """Averages what the clients train, then finds alpha and beta of the new classes."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.codec = config, named(config.exemplar_codec, setting.shape)
        nothing, ones = mask((), setting.capacity), torch.ones(setting.capacity)
        self.state = Model(weights_of(setting.classifier()), {}, nothing, nothing, ones, 0 * ones, {})

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        fit_codec(self, task, clients, Client.measure)
        if clients.once("keep the old model"):
            self.state.old_weights = self.state.weights if task.old else {}
            self.state.new, self.state.old = (mask(own, len(self.state.new)) for own in (task.new, task.old))
        yield from fedavg(self, clients, Client.train)
        if task.old:
            yield from self.correct(clients)
        clients.ask(clients.everyone(), Client.remember, Fitted(self.state.codec))

    def correct(self, clients: Clients) -> Iterator[None]:
        """Stage 2: Newton's method on the mean loss of all images held out anywhere."""
        for _ in clients.rounds(self.config.correction_rounds, "correct"):
            replies = clients.ask(clients.everyone(), Client.judge, replace(self.state, old_weights={}))
            weight = replies.sum("weight")
            if weight is not None and 0 < weight[1] < weight[0]:  # one side alone would push the other out of sight
                gradient, curvature = (replies.sum(part) / weight[0] for part in ("gradient", "curvature"))
                s, c = self.state, self.config
                s.alpha, s.beta = descended(s.alpha, s.beta, s.new, gradient, curvature, (c.hold_alpha, c.hold_beta))
            yield

    def measured(self) -> dict[str, float | None]:
        """Say what the newest classes are corrected by."""
        return {"alpha": self.state.alpha[self.state.new][0].item(), "beta": self.state.beta[self.state.new][0].item()}


class Client:
    """Trains on what is not held out, and judges the outputs by what is."""

    measure = measure

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting, self.codec = config, setting, named(config.exemplar_codec, setting.shape)
        self.net, self.old = setting.classifier(), setting.classifier()
        room_for_one(self.codec.size, setting.budget.per_client, "another exemplar_codec")

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old}

    @remote
    def train(self, memory: Memory, data: LocalData, message: Model) -> Training[Update]:
        load = {"net": message.weights} | ({"old": message.old_weights} if message.old_weights else {})
        pool = data.cached("pool", lambda _: self.pool(memory, data, message.codec, held_out=False))
        given = Given(message.new, message.old, message.alpha, message.beta)
        trained = yield Fit(self.loss, load, ("net",), pool, self.config.lr, given)
        return Update(trained.weights, trained.count)

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        """Stage 1: as much distillation as there are old classes, and cross-entropy over all."""
        said = corrected(nets["net"](batch.images), given.alpha, given.beta)
        learned = cross_entropy(said, batch.labels, given.new | given.old)
        if "old" not in nets:
            return learned
        with torch.no_grad():
            taught = corrected(nets["old"](batch.images), given.alpha, given.beta)
        kept = distillation(said, taught, given.old, self.config.temperature) / self.config.temperature**2
        share = given.old.sum() / (given.new | given.old).sum()
        return share * kept + (1 - share) * learned

    @remote
    @torch.no_grad()
    def judge(self, memory: Memory, data: LocalData, message: Model) -> Slope:
        def outputs(_: torch.Generator) -> tuple[Tensor, Tensor]:
            pool = self.pool(memory, data, message.codec, held_out=True)
            return outputs_of(loaded(self.net, message.weights), pool.images).double(), pool.labels

        logits, labels = data.cached("judged", outputs)
        _, held = self.numbers(memory, data)
        weight = balanced(labels, message.new, [n for j, n in held.items() if j in data.task.old]).to(logits)
        new = (weight * message.new[labels]).sum()
        slope = slopes(logits, labels, weight, message.new, message.old, message.alpha, message.beta)
        return Slope(*slope, torch.stack([weight.sum(), new]), len(labels))

    def numbers(self, memory: Memory, data: LocalData) -> tuple[dict[int, int], dict[int, int]]:
        """Say how many exemplars of each class to keep when the task ends, and how many images to hold out now."""
        kept, room = whole(memory.held_out, memory.exemplars), self.setting.budget.at(data.task)
        keep = data.cached("quotas", lambda draws: quotas(self.codec, kept, replace(data, generator=draws), room))
        held = {j: len(memory.held_out.get(j, ())) for j in kept}
        return keep, held | to_hold_out(held, data, keep, self.config.validation)

    def pool(self, memory: Memory, data: LocalData, codec: Weights, held_out: bool) -> Pool:
        """Return what is held out of images and exemplars, or the rest: of images at hand the first are held out."""
        _, first = self.numbers(memory, data)
        rows = {j: own[: first[j]] if held_out else own[first[j] :] for j, own in rows_in_order(data).items()}
        kept = memory.held_out if held_out else memory.exemplars
        return Pool(*with_replay(self.codec, codec, kept, data, rows))

    @remote
    def remember(self, memory: Memory, data: LocalData, message: Fitted) -> Done:
        keep, held = self.numbers(memory, data)
        rows = {j: own[: keep[j]] for j, own in rows_in_order(data).items() if j in keep}
        kept = updated(self.codec, message.weights, whole(memory.held_out, memory.exemplars), data, rows, keep)
        memory.held_out, memory.exemplars = divided(kept, held, self.config.validation)
        return Done()

    def predict(self, message: Model, images: Tensor) -> Tensor:
        logits = loaded(self.net, message.weights)(images)
        return masked(corrected(logits, message.alpha, message.beta), message.new | message.old)

    def look(self, memory: Memory, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        kept = whole(memory.held_out, memory.exemplars)
        return Pictures(*pictured(self.codec, message.codec, kept, data, classes), {})

    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        return Exposed(*paired(self.codec, message.codec, whole(memory.held_out, memory.exemplars), data))


METHOD = Method(Config, Server, Client, Memory)
