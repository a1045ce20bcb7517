"""FedProx: fine-tuning with a pull of each local training towards the global model it started from.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. Made against heterogeneous clients, not
against forgetting: a reference for what that alone does.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from fcil.blocks.losses import cross_entropy, squared_distance
from fcil.blocks.softmax import Model, scores, untrained
from fcil.federation.rounds import fedavg
from fcil.knobs import knob
from fcil.method import Batch, Clients, Fit, Method, Nets, Pool, Setting, Training, remote
from fcil.records import Nothing, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.01, "learning rate of the clients' SGD", above=0)
    mu: float = knob(0.01, "weight of the proximal term, mu/2 |w - w_global|^2", least=0)


@record
class Given:
    """What the loss needs of the message."""

    anchor: Weights  # the global weights
    seen: Tensor


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
    """Trains on the images of the current task, on a leash."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.net = config, setting.classifier()

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    @remote
    def train(self, memory: Nothing, data: LocalData, message: Model) -> Training[Update]:
        trained = yield Fit(
            self.loss, load={"net": message.weights}, trains=("net",), lr=self.config.lr,
            pool=Pool(data.images, data.labels), given=Given(message.weights, message.seen),
        )  # fmt: skip
        return Update(trained.weights, trained.count)

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        net = nets["net"]
        pull = squared_distance(dict(net.named_parameters()), given.anchor)
        return cross_entropy(net(batch.images), batch.labels, given.seen) + self.config.mu / 2 * pull

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return scores(self.net, message, images)


METHOD = Method(Config, Server, Client, Nothing)
