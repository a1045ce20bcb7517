"""Effects of data on what a network says, brought back where data are gone, and taken out where momentum adds its own.

Hu et al., "Distilling Causal Effect of Data in Class-Incremental Learning", CVPR 2021. An image is classified together
with those that were near it in the old network's features. And what scores owe to the direction in which features
gather while they learn is subtracted.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.losses import masked


def nearest(features: Tensor, new: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the rows of so many new images nearest to each image, itself left out, and which of them there really are.

    Features are brought to length 1, and near is what has a small Euclidean distance. One new image is none.
    """
    unit, new = F.normalize(features.double()), new & (new.sum() > 1)
    likeness = (unit @ unit.T).masked_fill(~new, -torch.inf).fill_diagonal_(-torch.inf)
    short = number - min(number, len(unit))
    values, rows = likeness.topk(number - short, 1)
    return F.pad(rows, (0, short)), F.pad(values.isfinite(), (0, short))


def joint_cross_entropy(
    logits: Tensor, labels: Tensor, seen: Tensor, near: Tensor | None = None, real: Tensor | None = None
) -> Tensor:
    """Cross-entropy of the mean of each image's probabilities and its neighbours' mean ones, `near`.

    These are (images, neighbours, classes), and `real` says which of them there are; an image without any, and all
    where there is no table of neighbours, have what they say themselves.
    """
    own = masked(logits, seen).log_softmax(1).gather(1, labels[:, None])[:, 0]
    if near is None or real is None:
        return -own.mean()
    label = labels[:, None, None].expand(-1, real.shape[1], 1)
    among = (near.gather(2, label)[:, :, 0] * real).sum(1) / real.sum(1).clamp_min(1)
    joint = torch.logaddexp(own, among.clamp_min(1e-30).log()) - math.log(2)  # log((p + q) / 2), from log p
    return -torch.where(real.any(1), joint, own).mean()


def total_direct_effect(features: Tensor, head: nn.Linear, direction: Tensor, share: Tensor) -> Tensor:
    """Return the head's scores less a share of what they owe to the direction: |f| cos(f, e) times w . e, |e| = 1."""
    unit = F.normalize(direction, dim=0)
    scores: Tensor = head(features) - share * (features @ unit)[:, None] * (head.weight @ unit)
    return scores
