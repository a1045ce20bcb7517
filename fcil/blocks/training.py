"""Weights into and out of a network."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fcil.records import Weights


def weights_of(net: nn.Module) -> Weights:
    """Return a copy of all parameters and buffers that travel."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def loaded(net: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return `net` in evaluation mode with `weights` copied into it."""
    if not torch.compiler.is_exporting():  # an export reads the weights that are in the network already
        net.load_state_dict(weights)
    return net.eval()


def in_parts(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """Return `function(rows)`, computed on `size` rows at a time."""
    return torch.cat([function(part) for part in torch.split(rows, size)])


def as_bytes(images: Tensor) -> Tensor:
    """Return images in 0..1 as uint8, the form in which all images are kept."""
    return (images * 255).round().clamp(0, 255).to(torch.uint8)
