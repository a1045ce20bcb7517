"""Joint training: every client keeps every image it ever held and trains on all of them. The upper bound, not a method.

Its memory is weighed like any other, so the ledger shows what this bound costs; the benchmark's budget does not hold
for it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fcil.blocks.losses import cross_entropy
from fcil.blocks.softmax import Model, scores, untrained
from fcil.federation.rounds import fedavg
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pool, Setting, Training, remote
from fcil.records import ByClass, Done, Update, record
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.01, "learning rate of the clients' SGD", above=0)


@record
class Memory:
    """Every image of every earlier task, by class."""

    images: ByClass = field(default_factory=dict)


class Server:
    """Averages what the clients train; lets everyone keep the task's images at its end."""

    def __init__(self, config: Config, setting: Setting):
        self.state = untrained(setting.classifier(), setting.capacity)

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        self.state.seen = mask(task.seen, len(self.state.seen))
        yield from fedavg(self, clients, Client.train)
        clients.ask(clients.everyone(), Client.remember, Done())


class Client:
    """Trains on all images it ever held."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.net = config, setting.classifier()

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    @remote
    def train(self, memory: Memory, data: LocalData, message: Model) -> Training[Update]:
        trained = yield Fit(
            loss, load={"net": message.weights}, trains=("net",), lr=self.config.lr,
            pool=data.cached("pool", lambda _: pool(memory, data)), given=message.seen,
        )  # fmt: skip
        return Update(trained.weights, trained.count)

    @remote
    def remember(self, memory: Memory, data: LocalData, message: Done) -> Done:
        for j in data.classes():
            earlier, new = memory.images.get(j, data.images[:0]), data.of(j)
            if not torch.equal(earlier, new):  # a client that stayed behind has the same images again
                memory.images[j] = torch.cat([earlier, new])
        return Done()

    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        kept = {j: memory.images[j] for j in data.classes() if j in memory.images}
        return Exposed(kept, kept)

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return scores(self.net, message, images)


def loss(nets: Nets, batch: Batch, seen: Tensor) -> Tensor:
    """Cross-entropy among the classes seen so far."""
    return cross_entropy(nets["net"](batch.images), batch.labels, seen)


def pool(memory: Memory, data: LocalData) -> Pool:
    """Put the current images beside all earlier ones; empty for a client that never had an image."""
    earlier = {j: images for j, images in memory.images.items() if not torch.equal(images, data.of(j))}
    labels = [data.labels.new_full((len(images),), j) for j, images in earlier.items()]
    return Pool(torch.cat([data.images, *earlier.values()]), torch.cat([data.labels, *labels]))


METHOD = Method(Config, Server, Client, Memory)
