"""PODNet: maps of every stage and features are held where the old network had them; classes have several proxies.

Douillard, Cord, Ollion, Robert and Valle, "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning",
ECCV 2020, as the local training of each client inside federated averaging. In each stage, what a map's squares sum up
to along rows and along columns is distilled (spatial POD), at the end the direction of the features (flat POD), both
before the last ReLU. A class is scored by its proxies. At the start of a task the proxies of new classes are imprinted:
each client sends centres of its features, the server takes centres of those. Old proxies are frozen in the main rounds.
At the end, the proxies alone are fine-tuned on exemplars, equally many of each class as far as a client has them.

The server looks at single proposals, and where a client has few images of a class, at their single features. The
released code clamps each entry of a gradient to 5 in size; here the protocol bounds its norm, as for every method. How
sharp the scores are is learned, but unless `nca=printed` not from the margin, which on hard images turns it negative.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from fcil.blocks.codec import named
from fcil.blocks.exemplars import paired, passed, pictured, rehearsed, replayed, room_for_one, with_replay
from fcil.blocks.losses import masked
from fcil.blocks.pooled_outputs import flat, spatial
from fcil.blocks.proxies import Proposal, frozen, imprinted, nca, nca_as_printed, nca_of_the_code, proposed
from fcil.blocks.training import by_class, features_of, loaded, weights_of
from fcil.federation.rounds import fit_codec, measure
from fcil.knobs import knob
from fcil.method import Answer, Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.networks import ProxyClassifier
from fcil.networks.heads import pooled
from fcil.records import ByClass, Done, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask

PROXIES = "head.weight"  # by which name they travel
FORMULAS = {"paper": nca, "printed": nca_as_printed, "code": nca_of_the_code}


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.1, "learning rate of the clients' SGD", above=0)
    spatial: float = knob(3.0, "weight of the spatial POD, before the factor sqrt(classes seen / new)", least=0)
    flat: float = knob(1.0, "weight of the flat POD, before the same factor", least=0)
    proxies: int = knob(10, "proxies of each class", least=1)
    similarity: str = knob(
        "distance",
        "of features and proxies of length 1: minus the squared distance, as in the released code, or the cosine",
        choices=("distance", "cosine"),
    )
    nca: str = knob(
        "paper",
        "classification loss: the paper's formula; printed, where the margin teaches eta, too; or what the code does",
        choices=("paper", "printed", "code"),
    )
    margin: float = knob(0.6, "by how much the label's similarity is to exceed the others'", least=0)
    tune_share: float = knob(
        0.125, "rounds of fine-tuning after a task but the first, as a share of its rounds", least=0
    )
    tune_lr: float = knob(0.05, "learning rate of the fine-tuning", above=0)
    exemplar_codec: str = knob("raw", "how exemplars are kept: raw, or klt, trellis, dct or webp with bytes: webp:300")


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights  # with the proxies, and eta as `scale`
    old_weights: Weights  # the global model after the last task
    new: Tensor  # classes of this task, as a mask
    old: Tensor  # classes of earlier tasks
    codec: Weights  # what was fitted of the exemplars' codec


@record
class Given:
    """What the losses need of the message."""

    seen: Tensor
    old: Tensor
    factor: Tensor  # sqrt(classes seen / new), over all clients


@record
class Memory:
    """Exemplars by class, the best first."""

    exemplars: ByClass = field(default_factory=dict)


class Server:
    """Averages what the clients train, and imprints the proxies of new classes."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.seed, self.codec = config, setting.seed, named(config.exemplar_codec, setting.shape)
        self.tune_rounds = math.ceil(config.tune_share * setting.protocol.rounds)
        nothing = mask((), setting.capacity)
        self.state = Model(weights_of(network(config, setting)), {}, nothing, nothing, {})

    @staticmethod
    def one_by_one(config: Config) -> list[Answer]:
        return [Client.propose]

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        fit_codec(self, task, clients, Client.measure)
        if clients.once("imprint"):
            self.state.old_weights = self.state.weights if task.old else {}
            self.state.new, self.state.old = (mask(own, len(self.state.new)) for own in (task.new, task.old))
            if task.old:
                proposals = clients.ask(clients.everyone(), Client.propose, replace(self.state, old_weights={}))
                proxies = imprinted(self.state.weights[PROXIES], task, proposals, self.seed)
                self.state.weights = self.state.weights | {PROXIES: proxies}
        for _ in clients.rounds():
            trained = clients.ask(clients.sample(), Client.train, self.broadcast()).mean("weights")
            proxies = frozen(trained[PROXIES], self.state.weights[PROXIES], self.state.old)
            self.state.weights = trained | {PROXIES: proxies}
            yield
        if clients.once("remember"):
            clients.ask(clients.everyone(), Client.remember, replace(self.state, old_weights={}))
        if task.old and self.tune_rounds:
            for _ in clients.rounds(self.tune_rounds, "tune"):
                updates = clients.ask(clients.sample(), Client.tune, replace(self.state, old_weights={}))
                self.state.weights = {**self.state.weights, **updates.mean("weights")}
                yield


class Client:
    """Trains on new images and exemplars, proposes proxies, and chooses new exemplars by herding."""

    measure = measure

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting, self.codec = config, setting, named(config.exemplar_codec, setting.shape)
        room_for_one(self.codec.size, setting.budget.per_client, "another exemplar_codec")
        self.net, self.old = network(config, setting), network(config, setting)

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old}

    @remote
    @torch.no_grad()
    def propose(self, memory: Memory, data: LocalData, message: Model) -> Proposal:
        loaded(self.net, message.weights)
        images = passed(self.codec, message.codec, data)
        own = {j: images[data.labels == j] for j in data.classes() if j in data.task.new}
        return proposed(by_class(partial(features_of, self.net), own), self.config.proxies, data.generator)

    @remote
    def train(self, memory: Memory, data: LocalData, message: Model) -> Training[Update]:
        load = {"net": message.weights} | ({"old": message.old_weights} if message.old_weights else {})
        pool = data.cached("pool", lambda _: Pool(*with_replay(self.codec, message.codec, memory.exemplars, data)))
        trained = yield Fit(self.loss, load, ("net",), pool, self.config.lr, given(message))
        return Update(trained.weights, trained.count)

    @remote
    @torch.no_grad()
    def remember(self, memory: Memory, data: LocalData, message: Model) -> Done:
        features, room = partial(features_of, loaded(self.net, message.weights)), self.setting.budget.at(data.task)
        memory.exemplars = rehearsed(self.codec, message.codec, memory.exemplars, data, features, room)
        return Done()

    @remote
    def tune(self, memory: Memory, data: LocalData, message: Model) -> Training[Update]:
        pool = data.cached("exemplars", lambda _: Pool(*replayed(self.codec, message.codec, memory.exemplars, data)))
        load, head = {"net": message.weights}, ("net.head",)
        trained = yield Fit(self.tuning_loss, load, head, pool, self.config.tune_lr, given(message))
        return Update({PROXIES: trained.weights[PROXIES]}, trained.count)

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        maps = nets["net"].stages(batch.images)
        features = pooled(maps)
        total = self.classification(nets, nets["net"].head(features, given.old), batch.labels, given)
        if "old" in nets:
            with torch.no_grad():
                old = nets["old"].stages(batch.images)
            kept = self.config.spatial * spatial(maps, old) + self.config.flat * flat(features, pooled(old))
            total = total + given.factor * kept
        return total

    def tuning_loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        return self.classification(nets, nets["net"](batch.images), batch.labels, given)

    def classification(self, nets: Nets, scores: Tensor, labels: Tensor, given: Given) -> Tensor:
        return FORMULAS[self.config.nca](scores, labels, given.seen, nets["net"].scale, self.config.margin)

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return masked(loaded(self.net, message.weights)(images), message.new | message.old)

    def look(self, memory: Memory, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        return Pictures(*pictured(self.codec, message.codec, memory.exemplars, data, classes), {})

    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        return Exposed(*paired(self.codec, message.codec, memory.exemplars, data))


def network(config: Config, setting: Setting) -> ProxyClassifier:
    return setting.proxy_classifier(config.proxies, cosine=config.similarity == "cosine")


def given(message: Model) -> Given:
    seen = message.new | message.old
    return Given(seen, message.old, (seen.sum() / message.new.sum()).sqrt())


METHOD = Method(Config, Server, Client, Memory)
