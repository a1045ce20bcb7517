"""A class kept as a few directions of its features: found from moments, drawn from again, and compared with.

Tong et al., "Incremental Learning of Structured Memory via Closed-Loop Transcription", ICLR 2023. Moments add up over
clients, so that no feature needs to leave its own. Features have length 1; all here is a function of tensors.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.training import normal

NOISE = 1e-6  # variances below this, relative to the largest one, are none


def gaussians(mean: Tensor, second: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a class's main directions, and mean and deviation of its features' parts along each.

    `second` is the mean product of its features. A direction points to the side on which the class lies.
    """
    directions = torch.linalg.eigh(second)[1].T.flip(0)[:number]
    directions = torch.where(directions @ mean < 0, -1.0, 1.0)[:, None] * directions
    centres = directions @ mean
    variances = (directions @ second * directions).sum(1) - centres.square()
    return directions, centres, variances.clamp_min(0).sqrt()


def drawn(directions: Tensor, centres: Tensor, spreads: Tensor, samples: int, seed: int) -> Tensor:
    """Draw features of a class, `samples` for each direction in turn: of length 1, the same for everyone.

    Of all that are drawn for a direction, those that lie along it most are taken, one of as many as there are
    directions.
    """
    many = len(centres)
    noise = normal((many, many * samples, many), torch.Generator().manual_seed(seed)).to(centres)
    parts = F.normalize(centres + spreads * noise, dim=2)
    strength = parts.diagonal(dim1=0, dim2=2).abs()  # (drawn, directions): of what is drawn for a direction, along it
    rows = strength.topk(samples, 0).indices.T
    return parts.gather(1, rows[:, :, None].expand(-1, -1, many)).flatten(0, 1) @ directions


def subspace(mean: Tensor, second: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the mean of a class, and the directions in which its features vary most; 0 where they do not vary."""
    values, directions = torch.linalg.eigh(second - torch.outer(mean, mean))
    real = values > NOISE * values[-1:].clamp_min(NOISE)
    return mean, (directions * real).T.flip(0)[:number]


def distances(z: Tensor, means: Tensor, bases: Tensor | None) -> Tensor:
    """Squared distance of features from each class's mean, or with `bases` from its subspace: (features, classes)."""
    far = z.square().sum(1, keepdim=True) - 2 * z @ means.T + means.square().sum(1)
    if bases is None:
        return far
    inside = torch.einsum("nd,ckd->nck", z, bases) - torch.einsum("cd,ckd->ck", means, bases)
    return far - inside.square().sum(2)
