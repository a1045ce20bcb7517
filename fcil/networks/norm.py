"""Normalisation of two kinds, and what follows it as one thing: over a batch, a GPU has kernels for that."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = nn.BatchNorm2d | nn.GroupNorm
IN_A_GROUP = 8  # channels, or a few more


def normalisation(kind: str, channels: int) -> Norm:
    """Return a layer that normalises over the batch, or over groups of channels of each image by itself.

    Groups (Wu and He, "Group Normalization", ECCV 2018) keep no statistics of the data, so there are none that clients
    of different classes could disagree on. Of 8 channels each, the narrowest layer, of 16, has more than one, and the
    small network's last maps, of 2x2, still have 32 numbers in each. Where 8 does not divide the channels, as in some
    decoders, groups are the next larger ones that do.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(
            next(n for n in range(max(1, channels // IN_A_GROUP), 0, -1) if channels % n == 0), channels
        )
    raise ValueError(f"there is normalisation by batch and by group, not by {kind}")


def activated(norm: Norm, x: Tensor, residual: Tensor | None = None, slope: float = 0.0) -> Tensor:
    """Return act(norm(x) + residual), where act multiplies what is negative by `slope`: 0 is ReLU, 1 is nothing."""
    if x.is_cuda and x.dtype == torch.bfloat16 and isinstance(norm, nn.BatchNorm2d) and _fusible(norm, x):
        from fcil.networks.fused import norm_act

        return norm_act(norm, x, residual, slope)
    y: Tensor = norm(x)
    if residual is not None:
        y = y.add_(residual)
    if slope == 1.0:
        return y
    return F.leaky_relu(y, slope, inplace=True) if slope else F.relu(y, inplace=True)


def _fusible(norm: nn.BatchNorm2d, x: Tensor) -> bool:
    """Tell whether there are kernels for it: they go back through the statistics of a batch, not through fixed ones."""
    learns = torch.is_grad_enabled() and (x.requires_grad or norm.weight.requires_grad)
    return kernels_work() and (norm.training or not learns)


@cache
def kernels_work() -> bool:
    """Try the kernels against PyTorch's own, once: a machine on which they fail does without them."""
    if find_spec("triton") is None or not torch.cuda.is_available():
        return False
    try:
        from fcil.networks.fused import agree

        return agree("cuda")
    except Exception:  # whatever a compiler raises
        return False
