"""Prototypes: a mean feature that stands for each class, where no image of it may be kept.

Zhu et al., "Prototype Augmentation and Self-Supervision for Incremental Learning", CVPR 2021, and its federated form by
Shenaj et al., "Asynchronous Federated Continual Learning", CVPR Workshops 2023.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.training import normal
from fcil.records import ByClass


def followed(
    prototypes: Tensor, known: Tensor, sums: ByClass | None, counts: ByClass | None, pace: float
) -> tuple[Tensor, Tensor]:
    """Move prototypes, (classes, width), by `pace` towards new means; one that is not known yet is its first mean."""
    prototypes, known = prototypes.clone(), known.clone()
    for j, total in (sums or {}).items():
        mean = (total / (counts or {})[j]).to(prototypes)
        prototypes[j] = prototypes[j].lerp(mean, pace) if known[j] else mean
        known[j] = True
    return prototypes, known


def radius_of(features: ByClass) -> Tensor | None:
    """Return the deviation of features from their class's mean in one direction; None where no class has two."""
    spreads = [own.var(0).mean() for own in features.values() if len(own) > 1]
    return torch.stack(spreads).mean().sqrt() if spreads else None


def noisy(
    prototypes: Tensor, radius: Tensor, classes: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `count` of `classes`, a mask, and of each its prototype with noise; where there is none, class 0."""
    draws = torch.rand(count, 1, generator=generator, device=classes.device) * classes.sum()
    which = (draws >= classes.cumsum(0)).sum(1) * classes.any()
    rows = prototypes[which]
    return rows + normal(tuple(rows.shape), generator) * radius, which


def contrast(rows: Tensor, labels: Tensor, there: Tensor, classes: Tensor, with_self: bool = False) -> Tensor:
    """Pull rows of `classes` towards others of their class: -log of the share that these have among all others.

    Shares are a softmax of cosines. Of a row it is the mean over its class, then the sum over rows divided by how many
    there are. Rows that are not `there` do not count. `with_self` gives a row a place among the others, with cosine 0.
    """
    with torch.autocast(rows.device.type, enabled=False):
        directions = F.normalize(rows)
        cosines = directions @ directions.T
    itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    others = cosines.masked_fill(~there, -1e4).masked_fill(itself, 0.0 if with_self else -1e4)
    shares = cosines - others.logsumexp(1, keepdim=True)
    alike = (labels[:, None] == labels) & there & ~itself
    each = -(alike * shares).sum(1) / alike.sum(1).clamp_min(1)
    return (each * (there & classes[labels])).sum() / there.sum()
