"""Fractals to pre-train on: classes without any data, drawn from a seed.

Kataoka et al., "Pre-training without Natural Images", ACCV 2020. A class is an iterated function system: a few affine
maps that contract. Its image shows where a point goes that takes one of the maps after the other, at random; further
images of a class come from systems a little beside its own. How strongly a system contracts is chosen as in Anderson
and Farrell, "Improving Fractal Pre-training", WACV 2022, so that the image is neither dust nor a blot.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.training import as_bytes, normal

MAPS = 4  # most maps of a system; the fewest are two
STRONGEST = 0.95  # largest singular value of a map
WALK, IN = 50, 10  # steps that a point takes, and of these the first, in which it gets to where the fractal is
POINTS = 10  # shown for each pixel
AT_ONCE = 2**22  # steps of all points that are computed together


@dataclass(frozen=True)
class Systems:
    """Iterated function systems: map k takes a point x to linear_k x + shift_k, and is chosen with its chance."""

    linear: Tensor  # (systems, MAPS, 2, 2)
    shift: Tensor  # (systems, MAPS, 2)
    chance: Tensor  # (systems, MAPS); 0 for a map that a system does not have

    def __len__(self) -> int:
        return len(self.chance)

    def __getitem__(self, rows: Tensor) -> "Systems":
        return Systems(self.linear[rows], self.shift[rows], self.chance[rows])


def systems(count: int, generator: torch.Generator) -> Systems:
    """Draw so many systems, of two to four maps each."""
    maps = torch.randint(2, MAPS + 1, (count, 1), generator=generator, device=generator.device)
    has = torch.arange(MAPS, device=generator.device) < maps
    sizes = _uniform((count, MAPS, 2), 0.2, 1.0, generator).sort(dim=2, descending=True).values * has[:, :, None]
    strength = (5 + maps + _uniform((count, 1), 0, 1, generator)) / 2  # of the larger sizes and twice the smaller ones
    sizes = sizes * (strength / (sizes @ sizes.new_tensor([1.0, 2.0])).sum(1, keepdim=True))[:, :, None]
    sizes = sizes.clamp_max(STRONGEST)
    mirror = torch.randint(0, 2, (count, MAPS, 2), generator=generator, device=generator.device) * 2 - 1
    turns = _uniform((2, count, MAPS), -math.pi, math.pi, generator)
    linear = _turn(turns[0]) @ torch.diag_embed(sizes * mirror) @ _turn(turns[1])
    area = (sizes.prod(2) + 0.01) * has
    return Systems(linear, _uniform((count, MAPS, 2), -1, 1, generator), area / area.sum(1, keepdim=True))


def beside(own: Systems, much: float, generator: torch.Generator) -> Systems:
    """Return systems a little beside others: each map contracts a little more, turns and shifts a little."""
    shape = own.chance.shape
    less = 1 - much * torch.rand(shape, generator=generator, device=generator.device)
    linear = _turn(much * normal(shape, generator)) @ own.linear * less[:, :, None, None]
    return Systems(linear, own.shift + much * normal((*shape, 2), generator), own.chance)


@torch.no_grad()
def rendered(own: Systems, shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Return an image of each system, uint8 (systems, *shape): log density, each map's part in a colour of its own."""
    points = max(1, POINTS * shape[1] * shape[2] // (WALK - IN))
    rows = torch.split(torch.arange(len(own), device=generator.device), max(1, AT_ONCE // (points * WALK)))
    return torch.cat([_rendered(own[part], shape, points, generator) for part in rows])


def _rendered(own: Systems, shape: tuple[int, int, int], points: int, generator: torch.Generator) -> Tensor:
    count, device, (channels, height, width) = len(own), generator.device, shape
    bounds, which = own.chance.cumsum(1)[:, None], torch.arange(count, device=device)[:, None]
    at, places, lasts = torch.zeros(count, points, 2, device=device), [], []
    for step in range(WALK):
        draws = torch.rand(count, points, 1, generator=generator, device=device)
        last = (draws >= bounds).sum(2).clamp_max(MAPS - 1)
        at = (own.linear[which, last] @ at[..., None])[..., 0] + own.shift[which, last]
        if step >= IN:
            places.append(at)
            lasts.append(last)
    place, taken = torch.cat(places, 1), torch.cat(lasts, 1)
    low, high = place.amin(1, keepdim=True), place.amax(1, keepdim=True)
    side = (high - low).amax(2, keepdim=True).clamp_min(1e-6)
    place = (place - (low + high) / 2) / side + 0.5  # within 0..1, its shape kept
    x, y = ((place[..., i] * size).long().clamp(0, size - 1) for i, size in enumerate((width, height)))
    cells = ((which * MAPS + taken) * height + y) * width + x
    hits = torch.bincount(cells.flatten(), minlength=count * MAPS * height * width)
    hits = hits.view(count, MAPS, height, width).to(at.dtype)
    density = hits.sum(1, keepdim=True).log1p()
    density = density / density.amax((2, 3), keepdim=True)
    paint = torch.rand(count, MAPS, channels, generator=generator, device=device) if channels > 1 else None
    if paint is not None:
        paint = paint / paint.amax(2, keepdim=True)
        density = density * torch.einsum("nkhw,nkc->nchw", hits, paint) / hits.sum(1, keepdim=True).clamp_min(1)
    return as_bytes(_flipped(density, generator))


def fractals(
    classes: int, each: int, shape: tuple[int, int, int], generator: torch.Generator, much: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Draw images of fractal classes, `each` of one class after those of the other, and their labels."""
    labels = torch.arange(classes, device=generator.device).repeat_interleave(each)
    own = beside(systems(classes, generator)[labels], much, generator)
    return rendered(own, shape, generator), labels


def pretrained(
    net: nn.Module, images: Tensor, labels: Tensor, steps: int, batch_size: int, lr: float, generator: torch.Generator
) -> tuple[float, float]:
    """Train the body of `net` to tell fractals apart, with a head of its own that is thrown away.

    Every eighth image is kept aside; returned is the loss on those, before and after.
    """
    aside = torch.arange(len(labels), device=labels.device) % 8 == 7
    classes, width = int(labels.max()) + 1, int(net.head.in_features)  # type: ignore[union-attr, arg-type]
    head = (normal((classes, width), generator) * width**-0.5).requires_grad_()
    optimizer = torch.optim.Adam([*net.body.parameters(), head], lr)  # type: ignore[union-attr]
    learned, known = images[~aside], labels[~aside]
    before = _loss(net, head, images[aside], labels[aside])
    net.train()
    for _ in range(steps):
        rows = torch.randint(0, len(known), (batch_size,), generator=generator, device=labels.device)
        optimizer.zero_grad()
        loss = F.cross_entropy(net.features(learned[rows]) @ head.T, known[rows])  # type: ignore[operator]
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return before, _loss(net, head, images[aside], labels[aside])


@torch.no_grad()
def _loss(net: nn.Module, head: Tensor, images: Tensor, labels: Tensor) -> float:
    net.eval()
    logits = torch.cat([net.features(part) @ head.T for part in torch.split(images, 256)])  # type: ignore[operator]
    return float(F.cross_entropy(logits, labels))


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator, device=generator.device)


def _turn(angle: Tensor) -> Tensor:
    """Return matrices that turn by these angles: (..., 2, 2)."""
    c, s = angle.cos(), angle.sin()
    return torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)


def _flipped(images: Tensor, generator: torch.Generator) -> Tensor:
    for dim in (2, 3):
        flip = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device) < 0.5
        images = torch.where(flip, images.flip(dim), images)
    return images
