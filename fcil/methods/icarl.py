"""iCaRL: exemplars chosen by herding, old outputs as targets, classification by the nearest mean of exemplars.

Rebuffi, Kolesnikov, Sperl and Lampert, "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017, as the
local training of each client inside federated averaging. Every output is a sigmoid; those of old classes are held
where the old network had them, for new images and exemplars alike, and those of new classes learn the label. The head
serves training only: an image belongs to the class whose exemplars' mean feature is nearest, means taken over all
clients.

Where this differs from the paper: memory is shared out among the classes that a client itself has had, and what small
ones leave over goes to the others; mirror images count in the means only where training mirrors; and inside a task,
before its classes have exemplars, the head classifies. And from the released code: unless `over=all` is set, which is
its own, the loss is a mean over the classes seen so far.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from fcil.blocks.codec import named
from fcil.blocks.exemplars import paired, pictured, recalled, rehearsed, room_for_one, with_replay
from fcil.blocks.losses import binary_cross_entropy, one_hot
from fcil.blocks.nearest_mean import (
    FeatureSums,
    Model,
    class_means,
    feature_sums,
    nearest_or_head,
    with_mean_features,
    without_mean,
)
from fcil.blocks.training import features_of, loaded, weights_of
from fcil.federation.rounds import fedavg, fit_codec, measure
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.records import ByClass, Update, record
from fcil.scenario.tasks import LocalData, Task, mask


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(1.0, "learning rate: large, since the loss is a mean over classes, too", above=0)
    sgd_momentum: float = knob(0.0, "momentum, in place of the protocol's", least=0, most=0.999)
    sgd_decay: float = knob(1e-5, "weight decay, in place of the protocol's", least=0)
    over: str = knob(
        "seen",
        "classes that the loss is averaged over: those seen so far, so that steps become shorter with every task, or "
        "all that will come, the mean of the released code, which wants a larger lr",
        choices=("seen", "all"),
    )
    exemplar_codec: str = knob("raw", "how exemplars are kept: raw, or klt, trellis, dct or webp with bytes: webp:300")
    mask_absent_new: bool = knob(
        False, "leave out new classes that a client has no image of, which else are pushed down"
    )


@record
class Given:
    """What the loss needs of the message."""

    old: Tensor
    taught: Tensor  # classes whose outputs learn: all seen, as a mask
    share: Tensor  # that they are of the classes the loss is averaged over


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
    """Trains on new images and exemplars, and chooses new exemplars by herding."""

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
        taught = message.new | message.old
        if self.config.mask_absent_new:
            taught = message.old | mask(tuple(data.classes()), len(message.new)).to(message.new.device)
        c, share = self.config, taught.float().mean()
        given = Given(message.old, taught, share if c.over == "all" else torch.ones_like(share))
        trained = yield Fit(loss, load, ("net",), pool, c.lr, given, momentum=c.sgd_momentum, weight_decay=c.sgd_decay)
        return Update(trained.weights, trained.count)

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


def loss(nets: Nets, batch: Batch, given: Given) -> Tensor:
    """Cross-entropy of each output; the targets of old classes are what the old network says."""
    logits = nets["net"](batch.images)
    target = one_hot(batch.labels, logits)
    if "old" in nets:
        with torch.no_grad():
            target = torch.where(given.old, nets["old"](batch.images).sigmoid(), target)
    return given.share * binary_cross_entropy(logits, target, given.taught)


METHOD = Method(Config, Server, Client, Memory)
