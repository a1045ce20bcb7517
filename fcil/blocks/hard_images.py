"""Images made to be hard: a generator looks for what a model and its teachers disagree on, and the model learns it.

Zhang et al., "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning", CVPR
2022. On a class, a teacher's word counts by its share of the images that all teachers have of it. The losses are pure
tensor functions.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.recorded import Recorded, adam, restarted, sgd
from fcil.blocks.training import loaded
from fcil.records import Weights


class Teacher(NamedTuple):
    """A network to learn from."""

    net: nn.Module
    knows: Tensor  # its own classes, as a mask
    share: Tensor  # of the images that all teachers have of each class


@dataclass(frozen=True)
class Recipe:
    """How generator and model learn."""

    latent: int  # numbers in the generator's noise
    fakes: int  # images in a batch
    classify: float  # to the generator, weight of an image being of its class
    diversify: float  # and of images being different where their noise is
    code_quirk: bool  # average a batch's cross-entropy before weighing it
    student_steps: int  # of the model on each batch
    student_decay: float  # weight decay of these
    by_batch: bool  # whether the model's batch norm goes by made images in these


class Bench:
    """Where generator and model learn in turn, step by step, from what lies here; memory for it is taken once."""

    def __init__(
        self, recipe: Recipe, student: nn.Module, generator: nn.Module, shape: tuple[int, int, int], classes: int,
        device: torch.device,
    ):  # fmt: skip
        self.recipe, self.student, self.generator, self.device = recipe, student, generator, device
        self.adam, self.sgd = adam(generator), sgd(student, recipe.student_decay)
        self.scratch: list[Teacher] = []  # as many as there ever were at a time
        self.noise = torch.zeros(recipe.fakes, recipe.latent, device=device)
        self.labels = torch.zeros(recipe.fakes, dtype=torch.int64, device=device)
        self.images = torch.zeros(recipe.fakes, *shape, device=device)
        self.target = torch.zeros(recipe.fakes, classes, device=device)
        self.compared = torch.zeros(classes, classes, dtype=torch.bool, device=device)  # for images of each class
        self.outputs = torch.ones((), device=device)  # that belong to a class
        self.recorded: dict[tuple[str, int, int], Recorded] = {}

    def teachers(self, weights: list[Weights], knows: Tensor, share: Tensor) -> list[Teacher]:
        """Return teachers with these weights, classes and shares, a row each; they compare what any of them knows."""
        self.compared.copy_((share > 0).to(share).T @ knows.to(share) > 0)
        while len(self.scratch) < len(weights):
            net = deepcopy(self.student).requires_grad_(False)
            nothing = torch.zeros(len(self.compared), device=self.device)
            self.scratch.append(Teacher(net, nothing.bool(), nothing.to(share.dtype)))
        for teacher, *own in zip(self.scratch, weights, knows, share, strict=False):
            loaded(teacher.net, own[0])
            teacher.knows.copy_(own[1]), teacher.share.copy_(own[2])
        return self.scratch[: len(weights)]

    def begin(self, student: Weights, generator: Weights, seen: Tensor, student_lr: float, generator_lr: float) -> None:
        """Take up both networks at these weights, for these classes, with optimisers that know nothing yet."""
        loaded(self.student, student), loaded(self.generator, generator)
        self.outputs.copy_(seen.sum())
        restarted(self.adam, generator_lr), restarted(self.sgd, student_lr)

    def turn(self, noise: Tensor, labels: Tensor, teachers: list[Teacher]) -> None:
        """Let the generator please each teacher, and then the model hear what all of them say of its images."""
        self.noise.copy_(noise), self.labels.copy_(labels)
        count = len(teachers)
        for i, teacher in enumerate(teachers):
            self._do("please", i, count, partial(self.please, teacher, count))
        self._do("ask", 0, count, partial(self.ask, teachers))
        for _ in range(self.recipe.student_steps):
            self._do("learn", 0, 0, self.learn)

    def please(self, teacher: Teacher, count: int) -> None:
        """Take a step of the generator for one of so many teachers."""
        self.student.eval()
        self.generator.train()
        images = self.generator(self.noise, self.labels)
        same = self.recipe.diversify / count * sameness(self.noise, images)
        descend(self.ease(self.pixels(images), self.labels, teacher) + same, self.adam)

    @torch.no_grad()
    def ask(self, teachers: list[Teacher]) -> None:
        """Make images, and ask all teachers what they are."""
        self.images.copy_(self.pixels(self.generator.eval()(self.noise, self.labels)))
        self.target.copy_(ensemble([teacher.net(self.images) for teacher in teachers], self.labels, teachers))

    def learn(self) -> None:
        """Take a step of the model towards what they say."""
        self.student.train(self.recipe.by_batch)
        logits = self.student(self.images)
        descend(soft_cross_entropy(logits, self.target, self.compared[self.labels], self.outputs), self.sgd)

    def ease(self, images: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
        """Return what the generator lowers for one teacher: how far student and teacher agree, and err on the class."""
        said, weight = teacher.net(images), teacher.share[labels]
        wrong = classification(said, labels, teacher.knows, weight, self.recipe.code_quirk)
        return self.recipe.classify * wrong - disagreement(self.student(images), said, teacher.knows, weight)

    def pixels(self, made: Tensor) -> Tensor:
        """Return what the generator makes as images in 0..1."""
        student: Any = self.student
        images: Tensor = student.normalise.pixels(made)
        return images

    def _do(self, what: str, teacher: int, count: int, work: Callable[[], None]) -> None:
        key = what, teacher, count
        if key not in self.recorded:
            self.recorded[key] = Recorded(work, self.device)
        self.recorded[key]()


def shares(counts: Tensor) -> Tensor:
    """Return alpha: of the images that all teachers have of a class, the share of each; 0 where there are none."""
    return counts / counts.sum(0).clamp_min(1e-12)


def disagreement(student: Tensor, teacher: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
    """Mean difference of the logits of `classes`; every image counts by its weight."""
    return (weight * ((student - teacher).abs() * classes).sum(1) / classes.sum()).mean()


def classification(logits: Tensor, labels: Tensor, classes: Tensor, weight: Tensor, code_quirk: bool) -> Tensor:
    """Cross-entropy among `classes`; every image counts by its weight, which is 0 where the label is none of them."""
    each = F.cross_entropy(_low(logits, classes), labels, reduction="none")
    if code_quirk:
        known = classes[labels].to(each)
        each = (each * known).sum() / known.sum().clamp_min(1)
    return (weight * each).mean()


def sameness(noise: Tensor, images: Tensor) -> Tensor:
    """What falls as images differ where their noise does: e to the minus mean product of both distances of a pair."""
    apart = (noise[:, None] - noise).square().mean(2)
    return (-(apart * (images[:, None] - images).abs().flatten(2).mean(2)).mean()).exp()


def ensemble(said: list[Tensor], labels: Tensor, teachers: list[Teacher]) -> Tensor:
    """Return what all teachers together say of images that are made for these labels."""
    words = [t.share[labels, None] * F.softmax(_low(own, t.knows), 1) for own, t in zip(said, teachers, strict=True)]
    return torch.stack(words).sum(0)


def soft_cross_entropy(logits: Tensor, target: Tensor, classes: Tensor, outputs: Tensor) -> Tensor:
    """Cross-entropy among each image's `classes` with soft labels, averaged over images and so many outputs."""
    return -(target * F.log_softmax(_low(logits, classes), 1)).sum(1).mean() / outputs


def descend(value: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take one step down from `value`; only the gradients of what learns are computed."""
    optimizer.zero_grad()
    value.backward(inputs=optimizer.param_groups[0]["params"])  # type: ignore[no-untyped-call]
    optimizer.step()


def _low(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.masked_fill(~classes, -1e4)  # finite: what a weight of 0 multiplies must be a number
