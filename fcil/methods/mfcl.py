"""MFCL: a generator trained without data at the server stands in for old classes, in three losses kept apart.

Babakniya, Fabian, He, Soltanolkotabi and Avestimehr, "A Data-Free Approach to Mitigate Catastrophic Forgetting in
Federated Class Incremental Learning for Vision Tasks", NeurIPS 2023. When a task ends, the server trains a generator
against the global model alone: its images are to be classified surely and evenly, to be smooth, and to have the
statistics that batch normalisation keeps. In the next task clients draw images from it in every step. New classes are
learned on real images among themselves; the head learns all classes, with features that stay; and features are held
where the old head tells them apart. Clients keep nothing, so each message brings them the generator, which the paper
sends once a task. A client that is behind (`lag`) has those of its own task for new ones, and none that came later.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fcil.blocks.losses import cross_entropy, masked
from fcil.blocks.synthesis import (
    batch_norm_divergence,
    blur,
    indecision,
    most_certain,
    needs_batch_norm,
    roughness,
    unevenness,
    with_moments,
)
from fcil.blocks.training import as_bytes, in_parts, loaded, normal, weights_of
from fcil.federation.rounds import fedavg
from fcil.knobs import knob
from fcil.method import Batch, Clients, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.networks.generator import Generator
from fcil.records import ByClass, Nothing, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask
from fcil.seeds import seed_of

EPS = 0.8  # of the generator's normalisation, as in the released code
SHOWN = 512  # images drawn to show one of each class, and to say which are made


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.1, "learning rate of the clients' SGD, which has no momentum", above=0)
    decay: float = knob(1e-5, "weight decay of the clients' SGD, in place of the protocol's", least=0)
    synthetic: int = knob(128, "images that a client draws from the generator in every step", least=1)
    head: float = knob(
        1.0, "w_FT: weight of the cross-entropy over all classes, from which only the head learns", least=0
    )
    distill: float = knob(0.1, "w_KD: weight of the old head's difference between new and old features", least=0)
    latent: int = knob(1000, "numbers of noise from which the generator makes an image", least=1)
    generator_steps: int = knob(100, "steps of the generator's training after each task", least=1)
    generator_batch: int = knob(128, "images in such a step", least=2)
    generator_lr: float = knob(1e-3, "learning rate of the generator's Adam, new after each task", above=0)
    sure: float = knob(1.0, "weight of being classified surely, in the generator's training", least=0)
    sure_temperature: float = knob(1000.0, "temperature of that; so high a one makes it almost flat", above=0)
    even: float = knob(1.0, "weight of classes being even: the information entropy", least=0)
    statistics: float = knob(50.0, "weight of batch normalisation's statistics; 0 for networks without", least=0)
    smooth: float = knob(1e-3, "weight of smoothness", least=0)


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights
    old_weights: Weights  # the global model after the last task; empty in the first
    generator: Weights
    new: Tensor  # classes of this task, as a mask
    old: Tensor  # classes of earlier tasks


@record
class Given:
    """What the loss needs of the message."""

    new: Tensor  # classes of the task that the client is at
    old: Tensor


class Server:
    """Averages what the clients train, and trains the generator against it when a task ends."""

    def __init__(self, config: Config, setting: Setting):
        if config.statistics:
            needs_batch_norm(setting.norm, "mfcl", "statistics=0 to do without")
        self.config, self.setting, self.device = config, setting, torch.device(setting.device)
        self.net, self.blur = setting.classifier(), blur(setting.shape[-1])
        weights, nothing = weights_of(self.net), mask((), setting.capacity)
        self.generator = generator_for(config, setting, self.net)
        self.state = Model(weights, {}, weights_of(self.generator), nothing, nothing)
        self.net.requires_grad_(False)

    def broadcast(self) -> Model:
        return self.state if self.state.old_weights else replace(self.state, generator={})

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        if clients.once("keep the old model"):
            self.state.old_weights = self.state.weights if task.old else {}
            self.state.new, self.state.old = (mask(own, self.setting.capacity) for own in (task.new, task.old))
        yield from fedavg(self, clients, Client.train)
        self.state.generator = self.taught(seed_of(self.setting.seed, "generator", task.index))

    def taught(self, seed: int) -> Weights:
        """Return the weights of the generator after some more training, against the global model."""
        c, generator = self.config, self.ready().train()
        draws = torch.Generator(self.device).manual_seed(seed)
        optimizer = torch.optim.Adam(generator.parameters(), c.generator_lr)
        for _ in range(c.generator_steps):
            loss = self.generator_loss(generator(normal((c.generator_batch, c.latent), draws)))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return weights_of(generator)

    def generator_loss(self, images: Tensor) -> Tensor:
        """Score images by what the global model makes of them, with the weights last loaded."""
        c, seen = self.config, (self.state.new | self.state.old).to(images.device)
        logits, layers = with_moments(self.net, images)
        return (
            c.sure * indecision(logits, seen, c.sure_temperature)
            + c.even * unevenness(logits, seen)
            + c.statistics * batch_norm_divergence(layers)
            + c.smooth * roughness(self.net.normalise(images), self.blur.to(images))
        )

    def ready(self) -> nn.Module:
        """Return the generator with its weights, and load the global model."""
        loaded(self.net.to(self.device), self.state.weights)
        return loaded(self.generator.to(self.device), self.state.generator)

    def measured(self) -> dict[str, float | None]:
        """Say the share of the classes seen that the global model takes any of the generator's images for."""
        seen = int((self.state.new | self.state.old).sum())
        found = self.best(seed_of(self.setting.seed, "made", seen)) if seen else {}
        return {"classes_made": len(found) / seen if seen else None}

    def look(self) -> ByClass:
        """Show of each class the image that the global model is most sure of."""
        return {j: as_bytes(image).cpu() for j, image in self.best(seed_of("look")).items()}

    @torch.no_grad()
    def best(self, seed: int) -> ByClass:
        """Draw images, and return of each class that any is taken for the one that the global model is most sure of."""
        generator, draws = self.ready(), torch.Generator(self.device).manual_seed(seed)
        images = torch.cat([generator(normal((64, self.config.latent), draws)) for _ in range(SHOWN // 64)])
        seen = (self.state.new | self.state.old).to(self.device)
        return {j: images[i] for j, i in most_certain(self.net(images), seen).items()}


class Client:
    """Trains on the images of the current task, and on what the generator makes of old classes."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.net, self.old = config, setting.classifier(), setting.classifier()
        self.generator, self.shape = generator_for(config, setting, self.net), setting.shape

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old, "generator": self.generator}

    @remote
    def train(self, memory: Nothing, data: LocalData, message: Model) -> Training[Update]:
        load = {"net": message.weights}
        if message.old_weights:
            load |= {"old": message.old_weights, "generator": message.generator}
        new = mask(data.own_classes(), len(message.new)).to(message.new.device)
        trained = yield Fit(
            self.loss, load, ("net",), Pool(data.images, data.labels), self.config.lr,
            Given(new, message.old), momentum=0.0, weight_decay=self.config.decay,
        )  # fmt: skip
        return Update(trained.weights, trained.count)

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        if "old" not in nets:
            return cross_entropy(nets["net"](batch.images), batch.labels, given.new)
        net, old, c = nets["net"], nets["old"], self.config
        with torch.no_grad():
            made = nets["generator"](normal((c.synthetic, c.latent), batch.generator).to(batch.images.dtype))
            images = torch.cat([batch.images, made])
            old_features = old.features(images)
            said = masked(old.head(old_features[len(batch.labels) :]), given.old).argmax(1)
        features, labels = net.features(images), torch.cat([batch.labels, said])
        learned = cross_entropy(net.head(features[: len(batch.labels)]), batch.labels, given.new)  # plasticity
        headed = cross_entropy(net.head(features.detach()), labels, given.new | given.old)
        kept = head_distance(old.head, features, old_features, given.old)  # stability
        return learned + c.head * headed + c.distill * kept

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return masked(loaded(self.net, message.weights)(images), message.new | message.old)

    @torch.no_grad()
    def invented(self, message: Model, number: int, generator: torch.Generator) -> Tensor:
        if not message.generator:
            return torch.zeros(0, *self.shape, dtype=torch.uint8)
        made = loaded(self.generator, message.generator)
        return in_parts(lambda noise: as_bytes(made(noise)), normal((number, self.config.latent), generator), 64)

    def look(self, memory: Nothing, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        return Pictures({j: data.of(j)[0] for j in classes if j in data.classes()}, {}, {})


def generator_for(config: Config, setting: Setting, net: nn.Module) -> Generator:
    """Return a generator as wide as the network begins."""
    return Generator(config.latent, setting.shape, net.body.begins, bounded=False, eps=EPS)  # type: ignore[union-attr, arg-type]


def head_distance(head: nn.Module, features: Tensor, old_features: Tensor, classes: Tensor) -> Tensor:
    """Mean squared difference of what the old head says of new and of old features, over `classes`."""
    off: Tensor = (head(features) - head(old_features)).square() * classes
    return (off.sum(1) / classes.sum().clamp_min(1)).mean()


METHOD = Method(Config, Server, Client, Nothing)
