"""GeoDL on iCaRL: features may move, but along the shortest way between the subspaces of old and new ones.

Simon, Koniusz and Harandi, "On Learning the Geodesic Path for Incremental Learning", CVPR 2021, with iCaRL's
exemplars and nearest mean (Rebuffi et al., CVPR 2017), as the local training of each client inside federated
averaging. The old network's features of a batch span one subspace, the new network's another. Old and new features
of an image should look alike in all subspaces on the way from one to the other, which a kernel in closed form tells.
This term stands in place of iCaRL's distillation; the head learns labels by cross-entropy and serves training only.

Where this differs from the released code, which has no iCaRL: the head is linear, and its new rows begin at random, not
as a cosine head with rows imprinted. The kernel is exact (`centre` and `form` have what that code does). A batch of
fewer than four images goes without the term. Memory and means are as in fcil/methods/icarl.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.codec import named
from fcil.blocks.exemplars import paired, pictured, recalled, rehearsed, room_for_one, with_replay
from fcil.blocks.losses import cross_entropy
from fcil.blocks.nearest_mean import (
    FeatureSums,
    Model,
    class_means,
    feature_sums,
    nearest_or_head,
    with_mean_features,
    without_mean,
)
from fcil.blocks.subspaces import geodesic, principal
from fcil.blocks.training import features_of, loaded, weights_of
from fcil.federation.rounds import fedavg, fit_codec, measure
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.networks.heads import pooled
from fcil.records import ByClass, Update, record
from fcil.scenario.tasks import LocalData, Task, mask

FEWEST = 4  # images in a batch that make a subspace


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.1, "learning rate of the clients' SGD", above=0)
    distill: float = knob(5.0, "weight of the geodesic term, times sqrt(old classes / new classes)", least=0)
    form: str = knob(
        "cosine",
        "cosine: 1 - the kernel's cosine of old and new features, as in the paper; distance: the kernel's squared "
        "length of their difference, as in its code",
        choices=("cosine", "distance"),
    )
    centre: str = knob(
        "images",
        "what features are centred over before they span a subspace: images, or the numbers of each image, as in the "
        "paper's code",
        choices=("images", "numbers"),
    )
    grid: int = knob(2, "side of the grid to which maps are averaged for the term; 1 is what the head sees", least=1)
    exemplar_codec: str = knob("raw", "how exemplars are kept: raw, or klt, trellis, dct or webp with bytes: webp:300")


@record
class Given:
    """What the loss needs of the message."""

    seen: Tensor  # classes so far, as a mask
    weight: Tensor  # of the geodesic term


@record
class Memory:
    """Exemplars by class, the best first."""

    exemplars: ByClass = field(default_factory=dict)


class Server:
    """Averages what the clients train, and the means of their exemplars."""

    def __init__(self, config: Config, setting: Setting):
        net, self.codec = setting.classifier(), named(config.exemplar_codec, setting.shape)
        nothing, width = mask((), setting.capacity), net.head.in_features
        self.state = Model(weights_of(net), {}, nothing, nothing, torch.zeros(setting.capacity, width), {})

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        fit_codec(self, task, clients, Client.measure)
        if clients.once("keep the old model"):
            self.state.old_weights = self.state.weights if task.old else {}
            self.state.new, self.state.old = (mask(own, len(self.state.new)) for own in (task.new, task.old))
        yield from fedavg(self, clients, Client.train)
        replies = clients.ask(clients.everyone(), Client.remember, replace(self.state, old_weights={}))
        self.state.means = class_means(replies.sum("sums"), replies.sum("counts"), self.state.means)

    def measured(self) -> dict[str, float | None]:
        return without_mean(self.state.means, self.state.new | self.state.old)


class Client:
    """Trains on new images and exemplars under the geodesic term, and chooses new exemplars by herding."""

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
        pool = data.cached("pool", lambda _: Pool(*with_replay(self.codec, message.codec, memory.exemplars, data)))
        weight = self.config.distill * (message.old.sum() / message.new.sum()).sqrt()
        given = Given(message.new | message.old, weight)
        trained = yield Fit(self.loss, load, ("net",), pool, self.config.lr, given)
        return Update(trained.weights, trained.count)

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        maps = nets["net"].stages(batch.images)
        learned = cross_entropy(nets["net"].head(pooled(maps)), batch.labels, given.seen)
        if "old" not in nets or len(batch.labels) < FEWEST:
            return learned
        with torch.no_grad():
            old_maps = nets["old"].stages(batch.images)
        moved = geodesic_loss(self.flat(old_maps), self.flat(maps), self.config.form, self.config.centre)
        return learned + given.weight * moved.to(learned)

    def flat(self, maps: list[Tensor]) -> Tensor:
        """Return the last maps, averaged to a small grid, as one vector an image."""
        return F.adaptive_avg_pool2d(maps[-1].double(), self.config.grid).flatten(1)

    @remote
    @torch.no_grad()
    def remember(self, memory: Memory, data: LocalData, message: Model) -> FeatureSums:
        features, room = partial(features_of, loaded(self.net, message.weights)), self.setting.budget.at(data.task)
        memory.exemplars = rehearsed(self.codec, message.codec, memory.exemplars, data, features, room)
        exemplars = recalled(self.codec, message.codec, memory.exemplars)
        return feature_sums(features, exemplars, self.setting.augment)

    def predict(self, message: Model, images: Tensor) -> Tensor:
        features = loaded(self.net, message.weights).features(images)  # type: ignore[operator]
        return nearest_or_head(features, self.net.head, message.means, message.new, message.old)

    def look(self, memory: Memory, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        return Pictures(*pictured(self.codec, message.codec, memory.exemplars, data, classes), {})

    def exposed(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        return Exposed(*paired(self.codec, message.codec, memory.exemplars, data))

    def overheard(self, memory: Memory, data: LocalData, message: Model) -> Exposed:
        """Show images that have the mean features of exemplars, which `remember` sends."""
        real, kept = paired(self.codec, message.codec, memory.exemplars, data)
        net = loaded(self.net, message.weights)
        return Exposed(real, with_mean_features(net, kept))


def geodesic_loss(old: Tensor, new: Tensor, form: str, centre: str) -> Tensor:
    """Say how far features moved, by the kernel between what the old and the new ones span; it has no gradient."""
    old, new = F.normalize(old), F.normalize(new)
    over, number = (0 if centre == "images" else 1), min(old.shape) - 2
    spans = [principal(own - own.mean(over, keepdim=True), number) for own in (old.detach(), new.detach())]
    kernel = geodesic(*spans)
    if form == "distance":
        return kernel.product(old - new, old - new).mean()
    lengths = [kernel.product(own, own).clamp_min(1e-12).sqrt() for own in (old, new)]
    return (1 - kernel.product(old, new) / (lengths[0] * lengths[1])).mean()


METHOD = Method(Config, Server, Client, Memory)
