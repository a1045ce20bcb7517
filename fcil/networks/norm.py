"""Normalisation and what follows it, as one thing: a GPU has kernels for that."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def activated(norm: nn.BatchNorm2d, x: Tensor, residual: Tensor | None = None, slope: float = 0.0) -> Tensor:
    """Return act(norm(x) + residual), where act multiplies what is negative by `slope`: 0 is ReLU, 1 is nothing."""
    if x.is_cuda and x.dtype == torch.bfloat16 and _fusible(norm, x):
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
