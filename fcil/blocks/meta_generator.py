"""A generator that learns to learn: images made from a teacher alone, one batch after the other.

Fang et al., "Up to 100x Faster Data-Free Knowledge Distillation", AAAI 2022, as in TARGET (Zhang et al., ICCV 2023).
For each batch, a copy of the generator and the batch's noise take a few steps together; the generator itself learns
from those, so that the next copy begins better. After a warm-up a student learns from the teacher on what has been
made, and batches look for images on which it still errs.
"""

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.augment import augmented
from fcil.blocks.losses import cross_entropy, distillation, masked
from fcil.blocks.synthesis import Moments, Past, batch_norm_distance, gone_by, jittered, with_moments
from fcil.blocks.training import as_bytes, normal

BETAS, STUDENT_MOMENTUM, STUDENT_DECAY, STUDENT_CLIP = (0.5, 0.999), 0.9, 1e-4, 10.0


@dataclass(frozen=True)
class Recipe:
    """How images are made; the numbers are TARGET's knobs of the same names, which say what each means."""

    batches: int
    batch_made: int
    latent: int
    generator_steps: int
    generator_lr: float
    noise_lr: float
    meta: str
    statistics: float
    statistics_momentum: float
    one_hot: float
    adversarial: float
    warm_up: int
    student_steps: int
    student_lr: float
    student_temperature: float


class Synthesis:
    """Makes images from a teacher alone, batch after batch."""

    def __init__(
        self, recipe: Recipe, augment: str, teacher: nn.Module, student: nn.Module, generator: nn.Module,
        seen: Tensor, seed: int,
    ):  # fmt: skip
        self.recipe, self.augment, self.seen, c = recipe, augment, seen, recipe
        self.teacher, self.student, self.generator = teacher, student, generator.train()
        self.draws = torch.Generator(seen.device).manual_seed(seed)
        self.meta = torch.optim.Adam(generator.parameters(), c.generator_steps * c.generator_lr, BETAS)
        self.sgd = torch.optim.SGD(student.parameters(), c.student_lr, STUDENT_MOMENTUM, weight_decay=STUDENT_DECAY)
        self.past: Past = []

    def images(self) -> Tensor:
        """Return images of all classes seen, uint8."""
        made, warm_up, batches = list[Tensor](), self.recipe.warm_up, self.recipe.batches
        for i in range(batches):
            late = i >= warm_up
            made.append(as_bytes(self.batch(late)))
            if late:
                self.teach(torch.cat(made), (i - warm_up) / (batches - warm_up))
        return torch.cat(made)

    def batch(self, late: bool) -> Tensor:
        """Let a copy of the generator, and its noise, learn to make one batch; the generator learns from its steps."""
        c, classes = self.recipe, self.seen.nonzero()[:, 0]
        labels = classes[self.drawn(len(classes))]
        noise, copy = normal((c.batch_made, c.latent), self.draws).requires_grad_(), deepcopy(self.generator)
        learn = list(copy.parameters())
        groups: list[dict[str, Any]] = [{"params": learn}, {"params": [noise], "lr": c.noise_lr}]
        adam = torch.optim.Adam(groups, c.generator_lr, BETAS)
        best, least, slopes = torch.zeros(()), torch.tensor(math.inf), [torch.zeros_like(p) for p in learn]
        for step in range(c.generator_steps):
            images = copy(noise)
            loss, layers = self.loss(images, labels, late)
            better = (loss.detach() < least.to(loss)) | (step == 0)
            best = torch.where(better, images.detach(), best.to(images))
            least = torch.where(better, loss.detach(), least.to(loss))
            adam.zero_grad()
            loss.backward(inputs=[*learn, noise])  # type: ignore[no-untyped-call]
            slopes = [slope + p.grad for slope, p in zip(slopes, learn, strict=True)]  # type: ignore[operator]
            adam.step()
        for own, after, slope in zip(self.generator.parameters(), learn, slopes, strict=True):
            own.grad = slope if c.meta == "fomaml" else (own - after).detach()
        self.meta.step()
        self.past = gone_by(layers, self.past, c.statistics_momentum)
        return best

    def loss(self, images: Tensor, labels: Tensor, late: bool) -> tuple[Tensor, list[Moments]]:
        """Score a batch: the statistics it has, the classes it is taken for, and whether the student still errs."""
        c, views = self.recipe, jittered(images, self.augment, self.draws)
        logits, layers = with_moments(self.teacher, views)
        loss = c.one_hot * cross_entropy(logits, labels, self.seen)
        if c.statistics:
            loss = loss + c.statistics * batch_norm_distance(layers, self.past, c.statistics_momentum)
        if late:
            loss = loss - c.adversarial * disagreement(self.student.eval()(views), logits, self.seen)
        return loss, layers

    def teach(self, made: Tensor, progress: float) -> None:
        """Let the student learn on the images made so far what the teacher says of them."""
        c = self.recipe
        self.student.train()
        self.sgd.param_groups[0]["lr"] = c.student_lr * 0.5 * (1 + math.cos(math.pi * progress))
        for _ in range(c.student_steps):
            images = made[self.drawn(len(made))].to(torch.get_default_dtype()) / 255
            images = augmented(images, self.augment, self.draws)
            with torch.autocast(made.device.type, torch.bfloat16, enabled=made.is_cuda):
                with torch.no_grad():
                    target = self.teacher(images)
                loss = distillation(self.student(images), target, self.seen, c.student_temperature)
            self.sgd.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.student.parameters(), STUDENT_CLIP)
            self.sgd.step()

    def drawn(self, below: int) -> Tensor:
        """Draw a batch of whole numbers."""
        return torch.randint(below, (self.recipe.batch_made,), generator=self.draws, device=self.draws.device)


def disagreement(student: Tensor, teacher: Tensor, classes: Tensor) -> Tensor:
    """KL divergence from teacher to student of those images that both take for the same class, over all images."""
    same = masked(student, classes).argmax(1) == masked(teacher, classes).argmax(1)
    target, said = (F.log_softmax(masked(one, classes), 1).masked_fill(~classes, 0.0) for one in (teacher, student))
    return ((target.exp() * (target - said)).sum(1) * same).mean()
