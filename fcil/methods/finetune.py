"""Fine-tuning: federated averaging on what each task brings, and nothing against forgetting. The lower bound.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fcil.blocks.losses import cross_entropy
from fcil.blocks.softmax import Model, scores, untrained
from fcil.federation.rounds import fedavg
from fcil.knobs import knob
from fcil.method import Batch, Clients, Fit, Method, Nets, Pool, Setting, Training, remote
from fcil.records import Nothing, Update
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.01, "learning rate of the clients' SGD", above=0)


class Server:
    """Averages what the clients train."""

    def __init__(self, config: Config, setting: Setting):
        self.state = untrained(setting.classifier(), setting.capacity)

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        self.state.seen = mask(task.seen, len(self.state.seen))
        yield from fedavg(self, clients, Client.train)


class Client:
    """Trains on the images of the current task."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.net = config, setting.classifier()

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    @remote
    def train(self, memory: Nothing, data: LocalData, message: Model) -> Training[Update]:
        trained = yield Fit(
            loss, load={"net": message.weights}, trains=("net",), lr=self.config.lr,
            pool=Pool(data.images, data.labels), given=message.seen,
        )  # fmt: skip
        return Update(trained.weights, trained.count)

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return scores(self.net, message, images)


def loss(nets: Nets, batch: Batch, seen: Tensor) -> Tensor:
    """Cross-entropy among the classes seen so far."""
    return cross_entropy(nets["net"](batch.images), batch.labels, seen)


METHOD = Method(Config, Server, Client, Nothing)
