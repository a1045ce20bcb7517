"""Learning without forgetting, in a federation: the last task's global model teaches the new one on the new images.

Li and Hoiem, "Learning without Forgetting", ECCV 2016. New images are classified among the new classes only; the old
classes are held by distillation at temperature 2. No memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fcil.blocks.losses import cross_entropy, distillation, masked
from fcil.blocks.training import loaded, weights_of
from fcil.federation.rounds import fedavg
from fcil.knobs import knob
from fcil.method import Batch, Clients, Fit, Method, Nets, Pool, Setting, Training, remote
from fcil.records import Nothing, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.01, "learning rate of the clients' SGD", above=0)
    distill: float = knob(3.0, "weight of the distillation from the old model", least=0)
    temperature: float = knob(2.0, "temperature of the distillation", above=0)


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights
    old_weights: Weights  # the global model after the last task
    new: Tensor  # classes of this task, as a mask
    old: Tensor  # classes of earlier tasks


@record
class Given:
    """What the loss needs of the message."""

    new: Tensor
    old: Tensor


class Server:
    """Keeps the last task's model as a teacher, and averages what the clients train."""

    def __init__(self, config: Config, setting: Setting):
        self.setting = setting
        weights, nothing = weights_of(setting.classifier()), mask((), setting.capacity)
        self.state = Model(weights, weights, nothing, nothing)

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        if clients.once("keep the old model"):
            self.state.old_weights = self.state.weights
            self.state.new, self.state.old = (
                mask(task.new, self.setting.capacity),
                mask(task.old, self.setting.capacity),
            )
        yield from fedavg(self, clients, Client.train)


class Client:
    """Trains on the images of the current task under the eyes of the old model."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.net, self.old = config, setting.classifier(), setting.classifier()

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old}

    @remote
    def train(self, memory: Nothing, data: LocalData, message: Model) -> Training[Update]:
        # a client that stayed behind holds old classes, too
        held = mask(tuple(data.classes()), len(message.new)).to(message.new.device)
        trained = yield Fit(
            self.loss, load={"net": message.weights, "old": message.old_weights}, trains=("net",), lr=self.config.lr,
            pool=Pool(data.images, data.labels), given=Given(message.new | held, message.old),
        )  # fmt: skip
        return Update(trained.weights, trained.count)

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        logits = nets["net"](batch.images)
        with torch.no_grad():
            teacher = nets["old"](batch.images)
        kept = distillation(logits, teacher, given.old, self.config.temperature)
        return cross_entropy(logits, batch.labels, given.new) + self.config.distill * kept

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return masked(loaded(self.net, message.weights)(images), message.new | message.old)


METHOD = Method(Config, Server, Client, Nothing)
