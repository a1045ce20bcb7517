"""Pooled outputs distillation: how far the maps and features of two networks are apart, once they are summed up.

Douillard et al., "PODNet: Pooled Outputs Distillation for Small-Tasks Incremental Learning", ECCV 2020.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.losses import norm_error


def spatial(maps: Sequence[Tensor], old: Sequence[Tensor]) -> Tensor:
    """Distance of the two networks' pooled squares, each of length 1, averaged over images and stages."""
    stages = [norm_error(strips(one), strips(other)).mean() for one, other in zip(maps, old, strict=True)]
    return torch.stack(stages).mean()


def strips(maps: Tensor) -> Tensor:
    """Sum up squares over the width and over the height, side by side, brought to length 1: (batch, c (h + w))."""
    squares = (maps.float() if maps.dtype == torch.bfloat16 else maps).square()
    return F.normalize(torch.cat([squares.sum(3).flatten(1), squares.sum(2).flatten(1)], 1))


def flat(features: Tensor, old: Tensor) -> Tensor:
    """One minus the cosine of the two networks' features, averaged over images."""
    return (1 - F.cosine_similarity(features, old)).mean()
