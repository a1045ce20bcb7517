"""DDE on iCaRL: the effect of data that are gone, through their neighbours; the bias of momentum, taken out again.

Hu, Tang, Miao, Hua and Zhang, "Distilling Causal Effect of Data in Class-Incremental Learning", CVPR 2021, as the
local training of each client inside federated averaging, with iCaRL's exemplars. An image is classified together with
its neighbours among the client's new images, near in the old network's features: so these keep an effect on what is
learned. Old outputs are distilled as in LUCIR's iCaRL, where the number of old classes in the weight undoes a mean
over them. While features learn they gather along the new classes; what scores owe to that is subtracted in part.

Where this differs from the released code: neighbours are found once a task, among images as they are, and augmented in
every step; there, in every epoch among images as augmented for it. A client finds them among its own images, so that it
may have fewer. The direction is averaged as weights are, by samples with `weighting=samples`. The share that is
subtracted is fixed, and not learned.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from fcil.blocks.augment import augmented
from fcil.blocks.causal_effects import joint_cross_entropy, nearest, total_direct_effect
from fcil.blocks.codec import named
from fcil.blocks.exemplars import paired, pictured, rehearsed, room_for_one, with_replay
from fcil.blocks.losses import distillation, masked
from fcil.blocks.training import features_of, loaded, weights_of
from fcil.federation.rounds import fedavg, fit_codec, measure
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.networks import Classifier
from fcil.records import ByClass, Done, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.1, "learning rate of the clients' SGD", above=0)
    neighbours: int = knob(10, "neighbours that an image is classified together with; 0 is none", least=0)
    distill: float = knob(0.25, "weight of the distillation from the old model", least=0)
    temperature: float = knob(2.0, "temperature of the distillation", above=0)
    decay: float = knob(0.9, "what is left after a step of the direction in which features gather", least=0, most=1)
    effect: float = knob(0.5, "share of a score's part along that direction which is subtracted", least=0)
    exemplar_codec: str = knob("raw", "how exemplars are kept: raw, or klt, trellis, dct or webp with bytes: webp:300")


@record
class Model:
    """The server's state, and what it broadcasts; the direction travels with the weights, and is averaged like them."""

    weights: Weights
    old_weights: Weights  # the global model after the last task
    new: Tensor  # classes of this task, as a mask
    old: Tensor  # classes of earlier tasks
    codec: Weights  # what was fitted of the exemplars' codec


@record
class Given:
    """What the loss needs beside the batch."""

    seen: Tensor  # classes so far, as a mask
    old: Tensor
    images: Tensor  # all that the client trains on, for neighbours are among them; filled up, so that few sizes occur


@record
class Memory:
    """Exemplars by class, the best first."""

    exemplars: ByClass = field(default_factory=dict)


def network(setting: Setting) -> Classifier:
    """Return the benchmark's network with room for the direction in which its features gather."""
    net = setting.classifier()
    net.register_buffer("direction", torch.zeros(net.head.in_features))
    return net


class Server:
    """Averages what the clients train, and the direction in which their features gather."""

    def __init__(self, config: Config, setting: Setting):
        self.codec, nothing = named(config.exemplar_codec, setting.shape), mask((), setting.capacity)
        self.state = Model(weights_of(network(setting)), {}, nothing, nothing, {})

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        fit_codec(self, task, clients, Client.measure)
        if clients.once("keep the old model"):
            weights = self.state.weights
            self.state.old_weights = weights if task.old else {}
            self.state.weights = weights | {"direction": torch.zeros_like(weights["direction"])}
            self.state.new, self.state.old = (mask(own, len(self.state.new)) for own in (task.new, task.old))
        yield from fedavg(self, clients, Client.train)
        clients.ask(clients.everyone(), Client.remember, replace(self.state, old_weights={}))


class Client:
    """Trains on new images and exemplars together with their neighbours, and chooses new exemplars by herding."""

    measure = measure

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting, self.codec = config, setting, named(config.exemplar_codec, setting.shape)
        self.net, self.old = network(setting), network(setting)
        room_for_one(self.codec.size, setting.budget.per_client, "another exemplar_codec")

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old}

    @remote
    def train(self, memory: Memory, data: LocalData, message: Model) -> Training[Update]:
        load = {"net": message.weights} | ({"old": message.old_weights} if message.old_weights else {})
        pool, images = data.cached("pool", lambda _: self.pool(memory, data, message))
        given = Given(message.new | message.old, message.old, images)
        trained = yield Fit(self.loss, load, ("net",), pool, self.config.lr, given)
        return Update(trained.weights, trained.count)

    @torch.no_grad()
    def pool(self, memory: Memory, data: LocalData, message: Model) -> tuple[Pool, Tensor]:
        """Put exemplars beside the task's images, say which new ones are near each, and give a copy to find them in."""
        images, labels = with_replay(self.codec, message.codec, memory.exemplars, data)
        if not message.old_weights or not self.config.neighbours:
            return Pool(images, labels), images[:0]
        features = features_of(loaded(self.old, message.old_weights), images)
        rows, real = nearest(features, message.new[labels], self.config.neighbours)
        room = max(16, 1 << (len(images) - 1).bit_length())  # few sizes, or a GPU would need a graph for each
        table = torch.cat([images, images.new_zeros(room - len(images), *self.setting.shape)])
        return Pool(images, labels, extra={"neighbours": rows, "real": real}), table

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        net, config = nets["net"], self.config
        near = self.neighbours(net, batch, given) if "neighbours" in batch.extra else None  # first, as in their code
        features = net.features(batch.images)
        with torch.no_grad():
            net.direction.mul_(config.decay).add_(features.mean(0))
        logits = net.head(features)
        learned = joint_cross_entropy(logits, batch.labels, given.seen, near, batch.extra.get("real"))
        if "old" not in nets:
            return learned
        with torch.no_grad():
            teacher = nets["old"](batch.images)
        return learned + config.distill * distillation(logits, teacher, given.old, config.temperature)

    @torch.no_grad()
    def neighbours(self, net: nn.Module, batch: Batch, given: Given) -> Tensor:
        """Return the probabilities of each image's neighbours, augmented anew: (batch, neighbours, classes)."""
        rows = batch.extra["neighbours"]
        images = given.images[rows.flatten()].to(batch.images.dtype) / 255
        images = augmented(images, self.setting.augment, batch.generator)
        return masked(net(images), given.seen).softmax(1).view(*rows.shape, -1)

    @remote
    @torch.no_grad()
    def remember(self, memory: Memory, data: LocalData, message: Model) -> Done:
        features, room = partial(features_of, loaded(self.net, message.weights)), self.setting.budget.at(data.task)
        memory.exemplars = rehearsed(self.codec, message.codec, memory.exemplars, data, features, room)
        return Done()

    def predict(self, message: Model, images: Tensor) -> Tensor:
        net = loaded(self.net, message.weights)
        features = net.features(images)  # type: ignore[operator]
        effect = self.config.effect * message.old.any()  # nothing is subtracted in the first task
        scores = total_direct_effect(features, net.head, net.direction, effect)  # type: ignore[arg-type]
        return masked(scores, message.new | message.old)

    def look(self, memory: Memory, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        return Pictures(*pictured(self.codec, message.codec, memory.exemplars, data, classes), {})

    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        return Exposed(*paired(self.codec, message.codec, memory.exemplars, data))


METHOD = Method(Config, Server, Client, Memory)
