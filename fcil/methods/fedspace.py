"""FedSpace: rotated images as classes of their own, global prototypes with noise in place of old images, no memory.

Shenaj, Toldo, Rigon and Zanuttigh, "Asynchronous Federated Continual Learning", CVPR Workshops 2023. The network's body
first learns fractals, which are nobody's data. Clients, who may be at different tasks (`lag`), train with three losses:
labels and rotations among the classes at hand; prototypes of all others, mean features pooled over clients, with noise;
and a contrast that draws images to their class, prototypes included. The server follows slowly: prototypes by a moving
average, and half of the global model is the last one.

In the released code labels are told from all classes of the tasks that a client has reached, and no class of its task
is replayed, even if it has no image of it: that is `mask=reached`. It is not the default, since it forgets far more: on
digits it ends at 35 to 37 percent, in two of three seeds less than 15 points above fine-tuning.

Here clients have SGD, not Adam, and no Cutout; the rate was chosen on held-out images of the first task. With
`weighting=samples` averages are the paper's. The released code pre-trains nothing, as its loop takes no step; and its
clients measure the radius in their own first task, here in the first that anyone has images of.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from fcil.blocks.fractals import fractals, pretrained
from fcil.blocks.inversion import inverted
from fcil.blocks.losses import cross_entropy, masked
from fcil.blocks.prototypes import contrast, followed, noisy, radius_of
from fcil.blocks.training import features_of, loaded, weights_of
from fcil.knobs import knob
from fcil.method import Batch, Clients, Exposed, Fit, Method, Nets, Pool, Setting, Training, remote
from fcil.records import ByClass, Nothing, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask
from fcil.seeds import seed_of

TURNS = 4  # rotations by 0, 90, 180 and 270 degrees: class c turned k times is output 4 c + k
EACH, GRID = 16, 8  # images of a fractal class; rows and columns of those that are shown


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.01, "learning rate of the clients' SGD", above=0)
    sgd_decay: float = knob(2e-4, "weight decay, in place of the protocol's", least=0)
    mask: str = knob(
        "held",
        "classes that labels are told from, and those that are not replayed: held, for both what a client has images "
        "of; or reached, all of its tasks so far and all of its task, as in the released code, which forgets far more",
        choices=("held", "reached"),
    )
    temperature: float = knob(0.1, "temperature of the softmax over labels and rotations", above=0)
    prototype_weight: float = knob(0.01, "weight of old classes' prototypes", least=0)
    contrast_weight: float = knob(0.01, "weight of the contrast between classes", least=0)
    contrast_self: bool = knob(False, "let a row count in its own contrast with similarity 0, as released")
    pace: float = knob(0.1, "share of a round's own means in the prototypes", above=0, most=1)
    mix: float = knob(0.5, "share of a round's average in the global model; the rest is the last one", above=0, most=1)
    pretrain: int = knob(15, "steps on fractals before the first task, for each round of a task; 0 is none", least=0)
    pretrain_lr: float = knob(1e-3, "learning rate of that, by Adam", above=0)
    fractals: int = knob(200, "classes of fractals; the paper has 1,000", least=2)


@record
class Model:
    """What the server broadcasts."""

    weights: Weights
    seen: Tensor  # classes that have come so far, as a mask
    prototypes: Tensor  # mean feature of each class, (capacity, width)
    known: Tensor  # classes that have one, as a mask
    radius: Tensor  # how far features are from their prototype in one direction
    measures: bool  # whether clients are to say how far


@record
class State(Model):
    """The server's own: beside that, what came of the fractals."""

    fractals: Tensor  # some of them, uint8 (rows, columns, channels, height, width)
    fractal_losses: Tensor  # before and after; empty if there were none


@record
class Update:
    """A locally trained network, and what it makes of the client's images."""

    weights: Weights
    count: int
    sums: ByClass  # of the features of each class
    counts: ByClass
    radius: Tensor  # times the images it was measured on
    measured: int  # how many


@record
class Given:
    """What the loss needs of the message and the data."""

    among: Tensor  # classes that the labels are told from, as a mask
    current: Tensor  # classes that are not replayed, and whose images the contrast draws together
    seen: Tensor
    prototypes: Tensor
    known: Tensor
    radius: Tensor


class Server:
    """Pre-trains on fractals, then follows the clients' averages and prototypes."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.setting, self.net = config, setting, setting.classifier(TURNS)
        nothing, width = mask((), setting.capacity), self.net.head.in_features
        self.state = State(
            weights_of(self.net), nothing, torch.zeros(setting.capacity, width), nothing, torch.zeros(()), True,
            fractals=torch.zeros(0, 0, *setting.shape, dtype=torch.uint8), fractal_losses=torch.zeros(0),
        )  # fmt: skip

    def broadcast(self) -> Model:
        return Model(*(getattr(self.state, part.name) for part in fields(Model)))

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        if task.index == 0 and self.config.pretrain and clients.once("fractals"):
            self.learn_fractals()
        if clients.once("new classes"):
            self.state.seen, self.state.measures = mask(task.seen, len(self.state.seen)), not self.state.radius.any()
        for _ in clients.rounds():
            updates = clients.ask(clients.sample(), Client.train, self.broadcast())
            self.state.weights = mixed(updates.mean("weights"), self.state.weights, self.config.mix)
            self.state.prototypes, self.state.known = followed(
                self.state.prototypes, self.state.known, updates.sum("sums"), updates.sum("counts"), self.config.pace
            )
            if measured := updates.sum("measured"):
                self.state.radius = updates.sum("radius") / measured
            yield

    def learn_fractals(self) -> None:
        """Train the body to tell fractals apart; the head is as it was."""
        c, p, device = self.config, self.setting.protocol, torch.device(self.setting.device)
        generator = torch.Generator(device).manual_seed(seed_of(self.setting.seed, "fractals"))
        images, labels = fractals(c.fractals, EACH, self.setting.shape, generator)
        net, steps = loaded(self.net.to(device), self.state.weights), c.pretrain * p.rounds
        losses = pretrained(net, images, labels, steps, p.batch_size, c.pretrain_lr, generator)
        self.state.weights, self.state.fractal_losses = weights_of(net), torch.tensor(losses)
        self.state.fractals = images.view(c.fractals, EACH, *self.setting.shape)[:GRID, :GRID].cpu()

    def measured(self) -> dict[str, float | None]:
        """Say the loss on fractals before the pre-training and after, and the radius of the prototypes."""
        losses = self.state.fractal_losses.tolist() or (None, None)
        return {"fractal_loss_before": losses[0], "fractal_loss_after": losses[1], "radius": float(self.state.radius)}

    def pages(self) -> dict[str, Tensor]:
        """Show fractals of the pre-training, a class a row."""
        return {"fractals": self.state.fractals} if self.state.fractals.numel() else {}


class Client:
    """Trains on its images and on prototypes of what it does not have, and says where its own classes are."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.net = config, setting.classifier(TURNS)

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    @remote
    def train(self, memory: Nothing, data: LocalData, message: Model) -> Training[Update]:
        own, held, seen = data.own_task(), tuple(data.classes()), message.seen
        which = (own.seen, own.new) if self.config.mask == "reached" else (held, held)
        among, current = (mask(classes, len(seen)).to(seen.device) for classes in which)
        trained = yield Fit(
            self.loss, {"net": message.weights}, ("net",), Pool(data.images, data.labels), self.config.lr,
            Given(among, current, seen, message.prototypes, message.known, message.radius),
            weight_decay=self.config.sgd_decay,
        )  # fmt: skip
        features = self.features(trained.weights, data)
        sums = {j: own.sum(0) for j, own in features.items()}
        counts = {j: torch.tensor(len(own)) for j, own in features.items()}
        radius = radius_of(features) if message.measures else None
        if radius is None:
            return Update(trained.weights, trained.count, sums, counts, torch.zeros(()), 0)
        return Update(trained.weights, trained.count, sums, counts, radius * trained.count, trained.count)

    @torch.no_grad()
    def features(self, weights: Weights, data: LocalData) -> ByClass:
        """Return the features of each class's images, as they are."""
        if not len(data.labels):
            return {}
        found = features_of(loaded(self.net, weights), data.images)
        return {j: found[data.labels == j] for j in data.classes()}

    def overheard(self, memory: Nothing, data: LocalData, message: Model) -> Exposed:
        """Show images that have the mean features which `train` sends, as the global model has them."""
        features = self.features(message.weights, data)
        if not features:
            return Exposed({}, {})
        means, net = torch.stack([own.mean(0) for own in features.values()]), self.net
        found = inverted(net.features, means, net.normalise, tuple(data.images.shape[1:]))  # type: ignore[arg-type]
        return Exposed({j: data.of(j) for j in features}, dict(zip(features, found[:, None], strict=True)))

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        c, net, labels, old = self.config, nets["net"], batch.labels, given.known & ~given.current
        features = net.features(torch.cat([batch.images.rot90(k, (2, 3)) for k in range(TURNS)]))
        turned = TURNS * labels + torch.arange(TURNS, device=labels.device)[:, None]
        labelled = cross_entropy(net.head(features) / c.temperature, turned.flatten(), turns(given.among))
        rows, which = noisy(given.prototypes, given.radius, old, len(labels), batch.generator)
        kept = cross_entropy(net.head(rows) / c.temperature, TURNS * which, turns(given.seen)) * old.any()
        rows, which = noisy(given.prototypes, given.radius, given.known, len(labels), batch.generator)
        there = torch.cat([torch.ones_like(labels, dtype=torch.bool), given.known.any().expand(len(labels))])
        rows, which = torch.cat([features[: len(labels)], rows]), torch.cat([labels, which])
        apart = contrast(rows, which, there, given.current, c.contrast_self)
        return labelled + c.prototype_weight * kept + c.contrast_weight * apart

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return masked(loaded(self.net, message.weights)(images)[:, ::TURNS], message.seen)


def mixed(average: Weights, last: Weights, share: float) -> Weights:
    """Return what lies between two models; counters are those of the first."""
    return {n: last[n].to(new).lerp(new, share) if new.is_floating_point() else new for n, new in average.items()}


def turns(classes: Tensor) -> Tensor:
    """Return the mask of outputs that belongs to a mask of classes."""
    return classes[:, None].expand(-1, TURNS).flatten()


METHOD = Method(Config, Server, Client, Nothing)
