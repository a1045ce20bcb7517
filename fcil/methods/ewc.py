"""Elastic weight consolidation, in a federation: weights that mattered to earlier tasks are held where they were.

Kirkpatrick et al., "Overcoming catastrophic forgetting in neural networks", PNAS 2017, with one running Fisher
information for all earlier tasks (Schwarz et al., "Progress & Compress", ICML 2018). Each client sends the sum of
squared gradients over its own images; the server divides by the number of images in the federation. No memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fcil.blocks.losses import cross_entropy, masked, weighted_distance
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
    strength: float = knob(1000.0, "lambda: weight of the penalty, lambda/2 F (w - w_old)^2", least=0)
    decay: float = knob(
        0.9, "what stays of the earlier tasks' Fisher information when a new task's is added", least=0, most=1
    )
    samples: int = knob(64, "images of a client that its Fisher information is estimated from", least=1)


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights
    anchor: Weights  # w_old: the global weights after the last task
    fisher: Weights  # F, diagonal, zero before the first task ends
    seen: Tensor


@record
class Squares:
    """One client's share of the Fisher information."""

    fisher: Weights  # sums over images
    count: int


@record
class Given:
    """What the loss needs of the message."""

    anchor: Weights
    fisher: Weights
    seen: Tensor


class Server:
    """Averages what the clients train; adds up at a task's end which weights mattered."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting = config, setting
        net = setting.classifier()
        zeros = {name: torch.zeros_like(p, requires_grad=False) for name, p in net.named_parameters()}
        anchor = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.state = Model(weights_of(net), anchor, zeros, mask((), setting.capacity))

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        self.state.seen = mask(task.seen, self.setting.capacity)
        yield from fedavg(self, clients, Client.train)
        replies = clients.ask(clients.everyone(), Client.measure, self.broadcast())
        squares, count = replies.sum("fisher"), replies.sum("count")
        if squares is not None:
            kept = {name: self.config.decay * f for name, f in self.state.fisher.items()}
            self.state.fisher = {name: kept[name].to(s) + s / count for name, s in squares.items()}
        self.state.anchor = {name: self.state.weights[name] for name in self.state.fisher}


class Client:
    """Trains against a pull to the old weights; measures which weights matter."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.net = config, setting.classifier()

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    @remote
    def train(self, memory: Nothing, data: LocalData, message: Model) -> Training[Update]:
        trained = yield Fit(
            self.loss, load={"net": message.weights}, trains=("net",), lr=self.config.lr,
            pool=Pool(data.images, data.labels), given=Given(message.anchor, message.fisher, message.seen),
        )  # fmt: skip
        return Update(trained.weights, trained.count)

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        net = nets["net"]
        penalty = weighted_distance(dict(net.named_parameters()), given.anchor, given.fisher)
        return cross_entropy(net(batch.images), batch.labels, given.seen) + self.config.strength / 2 * penalty

    @remote
    def measure(self, memory: Nothing, data: LocalData, message: Model) -> Squares:
        some = torch.randperm(len(data.labels), generator=data.generator, device=data.generator.device)
        some = some[: self.config.samples]
        fisher = squared_gradients(
            loaded(self.net, message.weights), data.images[some], data.labels[some], message.seen
        )
        return Squares(fisher, len(some))

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return masked(loaded(self.net, message.weights)(images), message.seen)


def squared_gradients(net: nn.Module, images: Tensor, labels: Tensor, seen: Tensor) -> Weights:
    """Sum the squared gradient of every single image's log-likelihood (the empirical Fisher information)."""
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights: Weights, image: Tensor, label: Tensor) -> Tensor:
        return cross_entropy(functional_call(net, weights, image[None]), label[None], seen)

    sums = {name: torch.zeros_like(w) for name, w in weights.items()}
    if len(images) == 0:
        return sums
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))
    for some, their_labels in zip(
        torch.split(images, 8), torch.split(labels, 8), strict=True
    ):  # eight gradients of 45 MB at a time
        for name, g in gradients(weights, some, their_labels).items():
            sums[name] += g.square().sum(0)
    return sums


METHOD = Method(Config, Server, Client, Nothing)
