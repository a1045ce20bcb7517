"""Images made without data: what a classifier tells of the images it was trained on.

Its batch normalisation holds the mean and variance of every channel of every layer over them; a batch that has the same
ones, spreads over all classes and is smooth looks to the classifier as its images did (Yin et al., "Dreaming to
Distill", CVPR 2020). The losses here are pure tensor functions.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.losses import cross_entropy, masked
from fcil.errors import UserError

LEAST = 1e-8  # variance that a dead channel is taken to have


class Moments(NamedTuple):
    """What one normalisation layer meets in a batch, and what it met in training: (channels,) each."""

    mean: Tensor
    var: Tensor
    usual_mean: Tensor
    usual_var: Tensor


Past = list[tuple[Tensor, Tensor]]  # means and variances of each layer, over the batches so far


def needs_batch_norm(norm: str, method: str, instead: str) -> None:
    """Refuse networks that keep no statistics."""
    if norm != "batch":
        raise UserError(
            f"{method} makes images from the statistics that batch normalisation keeps, and norm={norm} keeps none; "
            f"set norm=batch, or {instead}"
        )


def with_moments(net: nn.Module, images: Tensor) -> tuple[Tensor, list[Moments]]:
    """Return a network's output, and the moments of each normalisation layer in the order in which it meets them.

    In full precision: there the layers are PyTorch's own, also on a GPU, and not kernels that no hook sees.
    """
    found: list[Moments] = []

    def meet(layer: Any, inputs: tuple[Tensor]) -> None:
        (x,) = inputs
        found.append(Moments(x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), layer.running_mean, layer.running_var))

    hooks = [layer.register_forward_pre_hook(meet) for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    try:
        with torch.autocast(images.device.type, enabled=False):
            output: Tensor = net(images)
    finally:
        for hook in hooks:
            hook.remove()
    return output, found


def batch_norm_divergence(layers: Sequence[Moments]) -> Tensor:
    """KL divergence of the batch's Gaussians from those of training, averaged over channels and layers; 0 if none."""
    if not layers:
        return torch.zeros(())
    return torch.stack([_divergence(layer).mean() for layer in layers]).mean()


def _divergence(layer: Moments) -> Tensor:
    var, usual = layer.var + LEAST, layer.usual_var + LEAST
    return 0.5 * ((var / usual).log() + (usual + (layer.usual_mean - layer.mean).square()) / var - 1)


def batch_norm_distance(layers: Sequence[Moments], past: Past, momentum: float) -> Tensor:
    """Euclidean distance of means and of variances from those of training, summed over layers.

    The batch's own are mixed into those of the batches before, where there were any: none needs to have all classes.
    """
    distances = []
    for i, layer in enumerate(layers):
        mean, var = mixed((layer.mean, layer.var), past[i], momentum) if past else (layer.mean, layer.var)
        distances += [
            torch.linalg.vector_norm(layer.usual_mean - mean),
            torch.linalg.vector_norm(layer.usual_var - var),
        ]
    return torch.stack(distances).sum() if distances else torch.zeros(())


def mixed(now: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor], momentum: float) -> tuple[Tensor, Tensor]:
    """Return mean and variance with a share `momentum` from the past."""
    mean, var = (momentum * before + (1 - momentum) * here for here, before in zip(now, past, strict=True))
    return mean, var


def gone_by(layers: Sequence[Moments], past: Past, momentum: float) -> Past:
    """Return the past after one more batch."""
    own = [(layer.mean.detach(), layer.var.detach()) for layer in layers]
    return [mixed(now, before, momentum) for now, before in zip(own, past, strict=True)] if past else own


def indecision(logits: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of a tempered softmax over `classes` with the class that it has itself in mind."""
    return cross_entropy(logits / temperature, masked(logits, classes).argmax(1), classes)


def unevenness(logits: Tensor, classes: Tensor) -> Tensor:
    """One minus the information entropy of the batch's mean prediction over `classes`, which is 1 if they are even."""
    mean = masked(logits, classes).softmax(1).mean(0)
    entropy: Tensor = -torch.special.xlogy(mean, mean.clamp_min(1e-12)).sum()
    return 1 - entropy / classes.sum().clamp_min(2).log()


def blur(side: int, reach: int = 2, deviation: float = 1.0) -> Tensor:
    """Return the matrix that blurs a line of `side` pixels, mirrored at its ends; `blur @ image @ blur.T` is an image.

    The weight of a neighbour `m` pixels away is exp(-(m / 2 deviation)^2), as in MFCL's code, all of them summing to 1.
    """
    near = range(-reach, reach + 1)
    weights = [math.exp(-((m / (2 * deviation)) ** 2)) for m in near]
    matrix = torch.zeros(side, side)
    for i in range(side):
        for m, weight in zip(near, weights, strict=True):
            matrix[i, _mirrored(i + m, side)] += weight / sum(weights)
    return matrix


def _mirrored(i: int, side: int) -> int:
    i = abs(i)
    return i if i < side else 2 * (side - 1) - i


def roughness(x: Tensor, blur: Tensor) -> Tensor:
    """Mean squared difference between images and their blurred selves."""
    return F.mse_loss(x, blur @ x @ blur.T)


def jittered(images: Tensor, how: str, generator: torch.Generator) -> Tensor:
    """Augment as `augment.augmented` does with the same draws, in a form whose gradient is the same bits every time."""
    if how == "none":
        return images
    count, side, margin = len(images), images.shape[-1], images.shape[-1] // 8
    offsets = torch.randint(0, 2 * margin + 1, (2, count, 1), generator=generator, device=images.device) - margin
    places = (offsets + torch.arange(side, device=images.device)).abs()
    places = torch.where(places < side, places, 2 * (side - 1) - places)  # mirrored at the border
    rows, columns = (places[..., None] == torch.arange(side, device=images.device)).to(images)[:, :, None]
    if how == "crop-flip":
        flip = torch.rand(count, 1, 1, 1, generator=generator, device=images.device) < 0.5
        columns = torch.where(flip, columns.flip(2), columns)
    moved: Tensor = rows @ images @ columns.transpose(2, 3)
    return moved


def most_certain(logits: Tensor, classes: Tensor) -> dict[int, int]:
    """Return for each class that any row is taken for the row that is most certain of it."""
    chance, said = masked(logits, classes).softmax(1).max(1)
    found = {j: (said == j).nonzero()[:, 0] for j in sorted(set(said.tolist()))}
    return {j: int(rows[chance[rows].argmax()]) for j, rows in found.items()}
