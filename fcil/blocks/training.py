"""Weights into and out of a network."""

from collections.abc import Mapping

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
