"""TARGET: the server dreams up images of all old classes from the global model; clients distil the old model on them.

Zhang, Chen, Zhuang and Lyu, "TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation", ICCV 2023.
When a task ends, a generator that learns to learn (Fang et al., "Up to 100x Faster Data-Free Knowledge Distillation",
AAAI 2022) makes one batch after the other: images that have the statistics which batch normalisation keeps, that the
global model takes for the classes wished for, and on which a student of it still errs. The images of the task before
are thrown away. In the next task new classes are learned among themselves on real images, and the old model is
distilled on made ones. Clients keep nothing, so each message brings them the images, which the paper sends once a task.
A client that is behind (`lag`) has the classes of its own task for new ones.

Where this differs from the release: that makes too few batches for its student ever to learn (`released_config`); here
32 are made, and the student takes fewer steps after each than are set there, 100 in place of 400 (`student_steps`).
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.losses import cross_entropy, masked
from fcil.blocks.meta_generator import Recipe, Synthesis
from fcil.blocks.synthesis import most_certain, needs_batch_norm
from fcil.blocks.training import in_parts, loaded, weights_of
from fcil.federation.rounds import fedavg
from fcil.knobs import knob
from fcil.method import Batch, Clients, Fit, Method, Nets, Pictures, Pool, Setting, Training, remote
from fcil.networks.generator import Generator
from fcil.records import ByClass, Nothing, Update, Weights, record
from fcil.scenario.tasks import LocalData, Task, mask
from fcil.seeds import seed_of

RELEASED_BATCHES = 10
SMALL = 16  # pixels: images with a shorter side are made in smaller batches


@dataclass(frozen=True)
class Config:
    """The knobs."""

    lr: float = knob(0.01, "learning rate of the clients' SGD", above=0)
    distill: float = knob(25.0, "weight of the distillation on made images", least=0)
    temperature: float = knob(2.0, "its temperature", above=0)
    synthetic: int = knob(0, "made images in a client's step; 0: four to each real one", least=0)
    batches: int = knob(32, "batches of images that the server makes after each task", least=1)
    batch_made: int = knob(0, "images in such a batch; 0: 256, or 32 of less than 16 pixels a side", least=0)
    released_config: bool = knob(
        False, "make ten batches only, as the released configuration does: too few for the student ever to come in"
    )
    latent: int = knob(256, "numbers of noise from which the generator makes an image", least=1)
    generator_steps: int = knob(10, "steps that generator and noise take for a batch", least=1)
    generator_lr: float = knob(
        2e-3, "learning rate of the generator's Adam, and so many times it between batches", above=0
    )
    noise_lr: float = knob(0.01, "learning rate of the noise", above=0)
    meta: str = knob("fomaml", "how the generator learns from batch to batch", choices=("fomaml", "reptile"))
    statistics: float = knob(10.0, "weight of batch normalisation's statistics; 0 for networks without", least=0)
    statistics_momentum: float = knob(0.9, "share of earlier batches in a batch's statistics", least=0, most=0.999)
    one_hot: float = knob(0.5, "weight of the classes wished for", least=0)
    adversarial: float = knob(1.0, "weight of the student's errors where it agrees with the global model", least=0)
    warm_up: int = knob(20, "batches before the student comes in", least=0)
    student_steps: int = knob(
        0, "steps that the student learns after each batch; 0: 100, or 25 on such small images; the paper's code: 400",
        least=0,
    )  # fmt: skip
    student_lr: float = knob(0.2, "learning rate of the student's SGD at its beginning, falling as a cosine", above=0)
    student_temperature: float = knob(20.0, "temperature of the student's distillation", above=0)


@record
class Model:
    """The server's state, and what it broadcasts."""

    weights: Weights
    old_weights: Weights  # the global model after the last task; empty in the first
    images: Tensor  # made from it, of all old classes: uint8
    new: Tensor  # classes of this task, as a mask
    old: Tensor  # classes of earlier tasks


@record
class Given:
    """What the loss needs of the message."""

    new: Tensor  # classes of the task that the client is at
    old: Tensor


class Server:
    """Averages what the clients train, and makes images from it when a task ends."""

    def __init__(self, config: Config, setting: Setting):
        if config.statistics:
            needs_batch_norm(setting.norm, "target", "statistics=0 to do without")
        self.config, self.setting = config, setting
        self.net, self.student = setting.classifier(), setting.classifier()
        self.generator = Generator(config.latent, setting.shape, self.net.body.begins, biases=False)  # type: ignore[arg-type]
        none, nothing = torch.zeros(0, *setting.shape, dtype=torch.uint8), mask((), setting.capacity)
        self.state = Model(weights_of(self.net), {}, none, nothing, nothing)
        self.net.requires_grad_(False)

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        if clients.once("keep the old model"):
            self.state.old_weights = self.state.weights if task.old else {}
            self.state.new, self.state.old = (mask(own, self.setting.capacity) for own in (task.new, task.old))
        yield from fedavg(self, clients, Client.train)
        self.state.images = self.synthesis(seed_of(self.setting.seed, "synthesis", task.index)).images()

    def synthesis(self, seed: int) -> Synthesis:
        """Return what makes images of all classes seen: with a generator and a student that know nothing yet."""
        s, device = self.state, torch.device(self.setting.device)
        teacher = loaded(self.net.to(device), s.weights)
        student, generator = deepcopy(self.student).to(device), deepcopy(self.generator).to(device)
        seen, recipe = (s.new | s.old).to(device), recipe_of(self.config, self.setting.shape[-1])
        return Synthesis(recipe, self.setting.augment, teacher, student, generator, seen, seed)

    @torch.no_grad()
    def look(self) -> ByClass:
        """Show of each class the image that the global model is most sure of."""
        s, images = self.state, self.state.images
        said = in_parts(loaded(self.net.to(images.device), s.weights), images, 64)
        return {j: images[i].cpu() for j, i in most_certain(said, (s.new | s.old).to(said.device)).items()}


class Client:
    """Trains on the images of the current task, and distils the old model on made ones."""

    def __init__(self, config: Config, setting: Setting):
        self.config, self.net, self.old = config, setting.classifier(), setting.classifier()
        self.synthetic = config.synthetic or 4 * setting.protocol.batch_size

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net, "old": self.old}

    @remote
    def train(self, memory: Nothing, data: LocalData, message: Model) -> Training[Update]:
        load = {"net": message.weights} | ({"old": message.old_weights} if message.old_weights else {})
        new = mask(data.own_classes(), len(message.new)).to(message.new.device)
        images = message.images
        unlabelled = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        trained = yield Fit(
            self.loss, load, ("net",), Pool(data.images, data.labels), self.config.lr,
            Given(new, message.old),
            beside={"synthetic": Pool(images, unlabelled, batch_size=self.synthetic)} if message.old_weights else {},
        )  # fmt: skip
        return Update(trained.weights, trained.count)

    def loss(self, nets: Nets, batch: Batch, given: Given) -> Tensor:
        learned = cross_entropy(nets["net"](batch.images), batch.labels, given.new)
        if "old" not in nets:
            return learned
        made, c = batch.beside["synthetic"].images, self.config
        with torch.no_grad():
            taught = nets["old"](made)
        return learned + c.distill * soft_cross_entropy(nets["net"](made), taught, given.old, c.temperature)

    def predict(self, message: Model, images: Tensor) -> Tensor:
        return masked(loaded(self.net, message.weights)(images), message.new | message.old)

    def invented(self, message: Model, number: int, generator: torch.Generator) -> Tensor:
        order = torch.randperm(len(message.images), generator=generator, device=generator.device)
        return message.images[order[:number]]

    def look(self, memory: Nothing, data: LocalData, message: Model, classes: tuple[int, ...]) -> Pictures:
        return Pictures({j: data.of(j)[0] for j in classes if j in data.classes()}, {}, {})


def recipe_of(config: Config, side: int) -> Recipe:
    """Return how images of so many pixels a side are made, what depends on their size filled in."""
    small, c = side < SMALL, config
    c = replace(
        c, batches=RELEASED_BATCHES if c.released_config else c.batches,
        batch_made=c.batch_made or (32 if small else 256), student_steps=c.student_steps or (25 if small else 100),
    )  # fmt: skip
    return Recipe(*(getattr(c, part.name) for part in fields(Recipe)))


def soft_cross_entropy(logits: Tensor, teacher: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of the student's tempered softmax over `classes` with the teacher's."""
    target = F.softmax(masked(teacher, classes) / temperature, 1)
    student = F.log_softmax(masked(logits, classes) / temperature, 1).masked_fill(~classes, 0.0)
    return -(target * student).sum(1).mean()


METHOD = Method(Config, Server, Client, Nothing)
