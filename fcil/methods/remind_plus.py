"""REMIND+, our reading: REMIND with more layers that learn, and an autoencoder between the parts of the network.

Wang, Herranz and van de Weijer, "ACAE-REMIND for Online Continual Learning with Compressed Feature Replay", Pattern
Recognition Letters 2021, in a federation. There is no public code; what its abstract leaves open is our specification,
so results are to be called "REMIND+ (our reading)". The network is split earlier than REMIND's, where maps are too
large to be kept. So an autoencoder makes them small, whose bottleneck also has to be classified: by a linear layer of
its own, and after decoding by the rest of the network. Clients train it by federated averaging in the first task, after
the network. From then on all but the upper part is frozen. What is quantised, kept and replayed is the bottleneck;
the rest is as in REMIND: codebooks by exchanges of sums, crops, mixing by twos, quantised maps also for a device that
classifies.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.feature_replay import Memory, due, keep, looked_up, portions, recalled, replay_loss, room_for
from fcil.blocks.losses import cross_entropy, masked
from fcil.blocks.quantizer import Cells, cells, code_bytes, coded, decoded, no_codebooks, quantised, vectors
from fcil.blocks.training import in_parts, loaded, weights_of
from fcil.federation.rounds import fit_codebooks
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pool, Setting, Training, remote
from fcil.networks.map_autoencoder import MapAutoEncoder
from fcil.networks.split import SplitClassifier
from fcil.records import Done, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.05, "learning rate of the clients' SGD", above=0)
    plastic: int = knob(
        2, "pieces at the end of the network that go on learning, with the head: blocks of ResNet-18 (of its 8) "
        "or ResNet-8 (of its 3), convolutions of the small network (of its 3)", least=1,
    )  # fmt: skip
    bottleneck: int = knob(0, "channels of the autoencoder's bottleneck; 0 is a quarter of the maps'", least=0)
    autoencoder_rounds: int = knob(0, "rounds in which the autoencoder is trained; 0 is the protocol's", least=0)
    reconstruct: float = knob(1.0, "weight of the mean squared error of decoded maps", least=0)
    auxiliary: float = knob(1.0, "weight of the auxiliary classifier's cross-entropy, on the bottleneck", least=0)
    classify: float = knob(1.0, "weight of the network's own cross-entropy, on decoded maps", least=0)
    part: int = knob(4, "channels of the bottleneck that a byte stands for: 16 codebooks for 64 channels", least=1)
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
    autoencoder: Weights
    codebooks: Tensor  # (books, centres, part)
    fitted: bool  # whether autoencoder and codebooks have been fitted
    seen: Tensor  # classes that have come so far, as a mask
    round: int  # of this task's training


@record
class Tuned:
    """A locally trained autoencoder."""

    autoencoder: Weights
    count: int


@record
class Given:
    """What the loss needs of the message."""

    codebooks: Tensor
    seen: Tensor


def networks_of(config: Config, setting: Setting) -> tuple[SplitClassifier, MapAutoEncoder, Tensor]:
    """Return the network in two parts, the autoencoder between them, and codebooks for its bottleneck."""
    net = SplitClassifier(setting.classifier(), config.plastic)
    shape = net.maps_of(setting.shape)
    channels = config.bottleneck or max(1, shape[0] // 4)
    autoencoder = MapAutoEncoder(shape, channels, setting.capacity, setting.norm)
    return net, autoencoder, no_codebooks(channels, config.part, config.centres)


class Server:
    """Averages what the clients train, and moves the centres of the codebooks."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting = config, setting
        net, autoencoder, codebooks = networks_of(config, setting)
        nothing = mask((), setting.capacity)
        self.state = Model(weights_of(net), weights_of(autoencoder), codebooks, False, nothing, 0)

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
            for _ in clients.rounds(self.config.autoencoder_rounds, "autoencoder"):
                tuned = clients.ask(clients.sample(), Client.tune, self.broadcast())
                self.state.autoencoder = tuned.mean("autoencoder")
                yield
            yield from fit_codebooks(self, clients, Client.measure, self.config.exchanges)
        clients.ask(clients.everyone(), Client.remember, self.broadcast())


class Client:
    """Trains the whole network, then the autoencoder, and after the first task the upper part on codes."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting = config, setting
        self.net, self.autoencoder, codebooks = networks_of(config, setting)
        self.shape, self.least = self.autoencoder.bottleneck, min(1.0, config.crop / self.autoencoder.height)
        room_for(code_bytes(codebooks, self.shape), config.single_pass, setting.budget.per_client)

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "autoencoder": self.autoencoder}

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
        load |= {"autoencoder": message.autoencoder}
        if once:  # from the next time on they are replayed, too
            keep(memory, data, codes, new, once, self.setting.budget.at(data.task), ends=False)
        trained = yield Fit(
            self.loss, load, ("net.upper",), pool_of(codes[new], data.labels[new], size), lr,
            Given(message.codebooks, message.seen), {"replay": pool_of(*old, 2 * again)}, steps,
        )  # fmt: skip
        return Update({n: w for n, w in trained.weights.items() if n.startswith("upper.")}, trained.count)

    @remote
    def tune(self, memory: Memory, data: LocalData, message: Model) -> Training[Tuned]:
        load, pool = {"net": message.weights, "autoencoder": message.autoencoder}, Pool(data.images, data.labels)
        trained = yield Fit(self.autoencoder_loss, load, ("autoencoder",), pool, self.config.lr, message.seen)
        return Tuned(trained.weights, trained.count)

    def autoencoder_loss(self, nets: Nets, batch: Batch, seen: Tensor) -> Tensor:
        with torch.no_grad():
            maps = nets["net"].lower(batch.images)
        codes = nets["autoencoder"].encode(maps)
        there = nets["autoencoder"].decode(codes)
        error = F.mse_loss(there, maps)
        looked_at = cross_entropy(nets["autoencoder"].classify(codes), batch.labels, seen)
        passed_on = cross_entropy(nets["net"].upper(there), batch.labels, seen)
        c = self.config
        return c.reconstruct * error + c.auxiliary * looked_at + c.classify * passed_on

    @torch.no_grad()
    def bottleneck(self, data: LocalData, message: Model) -> Tensor:
        """Return the bottleneck of the task's images."""
        net: Any = loaded(self.net, message.weights)
        autoencoder: Any = loaded(self.autoencoder, message.autoencoder)

        def encode(images: Tensor) -> Tensor:
            code: Tensor = autoencoder.encode(net.lower(images))
            return code

        return in_parts(encode, data.images, max(1, 2**17 // math.prod(self.setting.shape)))

    def codes(self, data: LocalData, message: Model) -> Tensor:
        """Return their codes."""
        return data.cached("codes", lambda _: coded(message.codebooks, self.bottleneck(data, message)))

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        codes, labels = batch.extra["codes"], batch.labels
        if "replay" in batch.beside:
            again = batch.beside["replay"]
            codes, labels = torch.cat([codes, again.extra["codes"]]), torch.cat([labels, again.labels])
        with torch.no_grad():
            maps = nets["autoencoder"].decode(decoded(given.codebooks, codes, self.shape))
        return replay_loss(
            nets["net"].upper, maps, labels, len(batch.labels), given.seen, self.config.mixup, self.least,
            batch.generator,
        )  # fmt: skip

    @remote
    @torch.no_grad()
    def measure(self, memory: Memory, data: LocalData, message: Model) -> Cells:
        found = data.cached("bottleneck", lambda _: self.bottleneck(data, message))
        return cells(message.codebooks, vectors(found, self.config.part))

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
        loaded(self.autoencoder, message.autoencoder)

        def maps(codes: Tensor) -> Tensor:
            return self.autoencoder.decode(decoded(message.codebooks, codes, self.shape)).detach()

        return Exposed(*looked_up(memory, data, codes, net.lower, self.setting.shape, maps))  # type: ignore[arg-type]

    def predict(self, message: Model, images: Tensor) -> Tensor:
        net: Any = loaded(self.net, message.weights)
        maps = net.lower(images)
        if message.fitted:
            autoencoder: Any = loaded(self.autoencoder, message.autoencoder)
            maps = autoencoder.decode(quantised(message.codebooks, autoencoder.encode(maps)))
        return masked(net.upper(maps), message.seen)


def first_loss(nets: Nets, batch: Batch, seen: Tensor) -> Tensor:
    """Cross-entropy over the classes seen: the first task's loss."""
    return cross_entropy(nets["net"](batch.images), batch.labels, seen)


def pool_of(codes: Tensor, labels: Tensor, batch_size: int) -> Pool:
    """Return codes to draw batches from: there are no images to them."""
    return Pool(codes[:, :0], labels, augment=False, batch_size=batch_size, extra={"codes": codes})


METHOD = Method(Config, Server, Client, Memory)
