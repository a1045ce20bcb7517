"""SS-IL: the outputs of new and of old classes never compete in one softmax.

Ahn, Kwak, Lim, Bang, Kim and Moon, "SS-IL: Separated Softmax for Incremental Learning", ICCV 2021, as the local
training of each client inside federated averaging. An image of a new class is classified among the new classes, an
exemplar among the old ones. The old network teaches each earlier task apart, with a softmax of its own, on all images.
A batch has a fixed ratio of new images to exemplars, which are chosen at random. The head classifies as it is.

Where this differs from the released code: few exemplars come again and again, where a step would be left out for want
of them; and the learning rate is the same in every task, where it falls with their number.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.codec import Fitted, named
from fcil.blocks.exemplars import paired, passed, pictured, quotas, replayed, room_for_one, shuffled_rows, updated
from fcil.blocks.losses import masked
from fcil.blocks.training import loaded, weights_of
from fcil.federation.rounds import fedavg, fit_codec, measure
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.records import ByClass, Done, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.1, "learning rate of the clients' SGD", above=0)
    temperature: float = knob(2.0, "temperature of the distillation", above=0)
    ratio: float = knob(4.0, "new images in a batch for each exemplar in it", above=0)
    exemplar_codec: str = knob("raw", "how exemplars are kept: raw, or klt, trellis, dct or webp with bytes: webp:300")


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights
    old_weights: Weights  # the global model after the last task
    came: Tensor  # the task that each class came with; -1 before it comes
    codec: Weights  # what was fitted of the exemplars' codec


@record
class Memory:
    """Exemplars by class, in random order."""

    exemplars: ByClass = field(default_factory=dict)


class Server:
    """Keeps the last task's model as a teacher, and averages what the clients train."""

    def __init__(self, config: Config, setting: Setting):
        self.codec = named(config.exemplar_codec, setting.shape)
        self.state = Model(weights_of(setting.classifier()), {}, torch.full((setting.capacity,), -1), {})

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        fit_codec(self, task, clients, Client.measure)
        if clients.once("keep the old model"):
            self.state.old_weights = self.state.weights if task.old else {}
            number = {j: h for h, group in enumerate(task.groups) for j in group}
            self.state.came = torch.tensor([number.get(j, -1) for j in range(len(self.state.came))])
        yield from fedavg(self, clients, Client.train)
        clients.ask(clients.everyone(), Client.remember, Fitted(self.state.codec))


class Client:
    """Trains on new images, and a fixed share of exemplars beside them."""

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
        pool = Pool(passed(self.codec, message.codec, data), data.labels)
        replay = data.cached("replay", lambda _: self.replay(memory, data, message))
        trained = yield Fit(
            self.loss, load, ("net",), pool, self.config.lr, message.came, beside={"replay": replay}
        )  # fmt: skip
        return Update(trained.weights, trained.count)

    def replay(self, memory: Memory, data: LocalData, message: Model) -> Pool:
        """Return the exemplars of classes that are not at hand; batches of them start over where they are few."""
        own = {j: codes for j, codes in memory.exemplars.items() if j not in data.classes()}
        images, labels = replayed(self.codec, message.codec, own, data)
        size = max(1, round(self.setting.protocol.batch_size / self.config.ratio))
        return Pool(images, labels, batch_size=size)

    def loss(self, nets: Nets, batch: Batch, came: Tensor) -> Tensor:
        """Separated softmax, and distillation of each earlier task; both on new images and exemplars alike."""
        every = [batch, *batch.beside.values()]
        images, labels = torch.cat([b.images for b in every]), torch.cat([b.labels for b in every])
        logits = nets["net"](images)
        total = separated_cross_entropy(logits, labels, came)
        if "old" in nets:
            with torch.no_grad():
                teacher = nets["old"](images)
            total = total + taskwise_distillation(logits, teacher, came, self.config.temperature)
        return total

    @remote
    def remember(self, memory: Memory, data: LocalData, message: Fitted) -> Done:
        keep = quotas(self.codec, memory.exemplars, data, self.setting.budget.at(data.task))
        rows = {j: own[: keep[j]] for j, own in shuffled_rows(data).items() if j in keep}
        memory.exemplars = updated(self.codec, message.weights, memory.exemplars, data, rows, keep)
        return Done()

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return masked(loaded(self.net, message.weights)(images), message.came >= 0)

    def look(self, memory: Memory, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        return Pictures(*pictured(self.codec, message.codec, memory.exemplars, data, classes), {})

    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        return Exposed(*paired(self.codec, message.codec, memory.exemplars, data))


def separated_cross_entropy(logits: Tensor, labels: Tensor, came: Tensor) -> Tensor:
    """Cross-entropy among the new classes where the label is new, and among the old ones where it is old."""
    new, old = came == came.max(), (came >= 0) & (came < came.max())
    return F.cross_entropy(masked(logits, torch.where(new[labels][:, None], new, old)), labels)


def taskwise_distillation(logits: Tensor, teacher: Tensor, came: Tensor, temperature: float) -> Tensor:
    """T^2 times the KL divergence from teacher to student, summed over earlier tasks, each with its own softmax."""
    old = (came >= 0) & (came < came.max())
    student, target = (log_softmax_by_task(said / temperature, came) for said in (logits, teacher))
    each = target.exp() * (target - student)
    return temperature**2 * each.masked_fill(~old, 0.0).sum(1).mean()


def log_softmax_by_task(logits: Tensor, came: Tensor) -> Tensor:
    """Log-probability of each class among those that came with it."""
    return logits - masked(logits[:, None], came[:, None] == came).logsumexp(2)


METHOD = Method(Config, Server, Client, Memory)
