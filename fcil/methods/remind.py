"""REMIND: the lower layers stay as the first task left them, and old maps are replayed from codes of a few bytes.

Hayes, Kafle, Shrestha, Acharya and Kanan, "REMIND Your Neural Network to Prevent Catastrophic Forgetting", ECCV 2020,
in a federation. In the first task clients train the whole network by federated averaging. Then its lower part is
frozen, and product quantisation is fitted to the maps that it makes: k-means by exchanges of sums, so that no map
leaves its client. From then on a client has its images as codes, and learns the upper part from maps that codes give
back: those of new images and those that it replays, which are mixed by twos. All are cropped at random. When a task
ends, its codes join those kept, and whichever class has most of them gives way. A device quantises its maps, too,
before it classifies them.

The paper learns from a stream, each image once: `single_pass=true`. Else a task's images are there as long as it lasts,
as for every other method. In both the learning rate is the protocol's; in the paper every class has one of its own,
which falls as its images come. A code that is kept already is not kept twice.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fcil.blocks.feature_replay import Memory, due, keep, looked_up, portions, recalled, replay_loss, room_for
from fcil.blocks.losses import cross_entropy, masked
from fcil.blocks.quantizer import Cells, cells, code_bytes, coded, decoded, no_codebooks, quantised, vectors
from fcil.blocks.training import in_parts, loaded, weights_of
from fcil.federation.rounds import fit_codebooks
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pool, Setting, Training, remote
from fcil.networks.split import SplitClassifier
from fcil.records import Done, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.05, "learning rate of the clients' SGD", above=0)
    plastic: int = knob(
        1, "pieces at the end of the network that go on learning, with the head: blocks of ResNet-18 (of its 8) "
        "or ResNet-8 (of its 3), convolutions of the small network (of its 3)", least=1,
    )  # fmt: skip
    part: int = knob(16, "channels that a byte stands for: 32 codebooks for 512 channels", least=1)
    centres: int = knob(256, "entries of a codebook", least=1, most=256)
    exchanges: int = knob(10, "exchanges of sums in which codebooks are found", least=1)
    replay: int = knob(
        0, "replayed maps beside the new ones of a step, each mixed of two; 0 is so many that an old class comes as "
        "often as a new one, or 50 beside the only new map in a single pass", least=0,
    )  # fmt: skip
    mixup: float = knob(0.1, "alpha of the Beta(alpha, alpha) by which they are mixed; 0 mixes none", least=0, most=1)
    crop: float = knob(2.0, "a random crop of a map has at least crop / side of its area; 0 crops none", least=0)
    single_pass: bool = knob(
        False, "after the first task, each image is learned from once, by itself, in the first round that its client "
        "takes part in after it came; images come evenly over the rounds",
    )  # fmt: skip


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights
    codebooks: Tensor  # (books, centres, part)
    fitted: bool  # whether the codebooks have been fitted
    seen: Tensor  # classes that have come so far, as a mask
    round: int  # of this task's training


@record
class Given:
    """What the loss needs of the message."""

    codebooks: Tensor
    seen: Tensor


class Server:
    """Averages what the clients train, and moves the centres of the codebooks."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting = config, setting
        net = SplitClassifier(setting.classifier(), config.plastic)
        codebooks = no_codebooks(net.maps_of(setting.shape)[0], config.part, config.centres)
        self.state = Model(weights_of(net), codebooks, False, mask((), setting.capacity), 0)

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        self.state.seen = mask(task.seen, len(self.state.seen))
        for round in clients.rounds():
            self.state.round = round
            updates = clients.ask(clients.sample(), Client.train, self.broadcast())
            self.state.weights = self.state.weights | updates.mean("weights")
            yield
        if task.index == 0:
            yield from fit_codebooks(self, clients, Client.measure, self.config.exchanges)
        clients.ask(clients.everyone(), Client.remember, self.broadcast())


class Client:
    """Trains the whole network in the first task, and then its upper part on codes."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting = config, setting
        self.net = SplitClassifier(setting.classifier(), config.plastic)
        self.shape = self.net.maps_of(setting.shape)
        unit = code_bytes(no_codebooks(self.shape[0], config.part, config.centres), self.shape)
        room_for(unit, config.single_pass, setting.budget.per_client)

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    @remote
    def train(self, memory: Memory, data: LocalData, message: Model) -> Training[Update]:
        load, lr = {"net": message.weights}, self.config.lr
        if data.task.index == 0:
            trained = yield Fit(first_loss, load, ("net",), Pool(data.images, data.labels), lr, message.seen)
            return Update(trained.weights, trained.count)
        codes, old = self.codes(data, message), data.cached("old", lambda _: recalled(memory.codes, data))
        once = self.config.single_pass
        new = due(memory, data, once, message.round, self.setting.protocol.rounds)
        batch_size = self.setting.protocol.batch_size
        size, steps, again = portions(once, len(new), len(old[1]), self.config.replay, data.task, batch_size)
        if once:  # from the next time on they are replayed, too
            keep(memory, data, codes, new, once, self.setting.budget.at(data.task), ends=False)
        trained = yield Fit(
            self.loss, load, ("net.upper",), pool_of(codes[new], data.labels[new], size), lr,
            Given(message.codebooks, message.seen), {"replay": pool_of(*old, 2 * again)}, steps,
        )  # fmt: skip
        return Update({n: w for n, w in trained.weights.items() if n.startswith("upper.")}, trained.count)

    @torch.no_grad()
    def maps(self, data: LocalData, message: Model) -> Tensor:
        """Return the maps of the task's images between the network's parts."""
        net: Any = loaded(self.net, message.weights)
        return in_parts(net.lower, data.images, max(1, 2**17 // math.prod(self.setting.shape)))

    def codes(self, data: LocalData, message: Model) -> Tensor:
        """Return their codes."""
        return data.cached("codes", lambda _: coded(message.codebooks, self.maps(data, message)))

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        codes, labels, c = batch.extra["codes"], batch.labels, self.config
        if "replay" in batch.beside:
            again = batch.beside["replay"]
            codes, labels = torch.cat([codes, again.extra["codes"]]), torch.cat([labels, again.labels])
        maps = decoded(given.codebooks, codes, self.shape)
        least = min(1.0, c.crop / self.shape[1])
        return replay_loss(
            nets["net"].upper, maps, labels, len(batch.labels), given.seen, c.mixup, least, batch.generator
        )

    @remote
    @torch.no_grad()
    def measure(self, memory: Memory, data: LocalData, message: Model) -> Cells:
        maps = data.cached("maps", lambda _: self.maps(data, message))
        return cells(message.codebooks, vectors(maps, self.config.part))

    @remote
    @torch.no_grad()
    def remember(self, memory: Memory, data: LocalData, message: Model) -> Done:
        once, codes = self.config.single_pass, self.codes(data, message)
        rest = due(memory, data, once, self.setting.protocol.rounds - 1, self.setting.protocol.rounds)
        keep(memory, data, codes, rest, once, self.setting.budget.at(data.task), ends=True)
        return Done()

    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        """Show images that have the maps which codes give back, as nearly as a search finds them."""
        codes, net = self.codes(data, message), loaded(self.net, message.weights)

        def maps(codes: Tensor) -> Tensor:
            return decoded(message.codebooks, codes, self.shape)

        return Exposed(*looked_up(memory, data, codes, net.lower, self.setting.shape, maps))  # type: ignore[arg-type]

    def predict(self, message: Model, images: Tensor) -> Tensor:
        net: Any = loaded(self.net, message.weights)
        maps = net.lower(images)
        return masked(net.upper(quantised(message.codebooks, maps) if message.fitted else maps), message.seen)


def first_loss(nets: Nets, batch: Batch, seen: Tensor) -> Tensor:
    """Cross-entropy over the classes seen: the first task's loss."""
    return cross_entropy(nets["net"](batch.images), batch.labels, seen)


def pool_of(codes: Tensor, labels: Tensor, batch_size: int) -> Pool:
    """Return codes to draw batches from: there are no images to them."""
    return Pool(codes[:, :0], labels, augment=False, batch_size=batch_size, extra={"codes": codes})


METHOD = Method(Config, Server, Client, Memory)
