"""Weights into and out of a network, images through it, noise to draw."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fcil.records import ByClass, Weights

ON_A_GPU = 4  # times as many rows at a time as on a CPU


def weights_of(net: nn.Module) -> Weights:
    """Return a copy of all parameters and buffers that travel."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def loaded(net: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return `net` in evaluation mode with `weights` copied into it."""
    if not torch.compiler.is_exporting():  # an export reads the weights that are in the network already
        copy(net, net.state_dict(keep_vars=True), weights)
    return net.eval()


def copy(net: nn.Module, state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the tensors of a network's `state`, those of a kind at once."""
    if state.keys() != weights.keys() or any(state[name].shape != w.shape for name, w in weights.items()):
        net.load_state_dict(weights)  # says what does not fit
    with torch.no_grad():
        for counts in (False, True):
            names = [name for name, tensor in state.items() if tensor.is_floating_point() != counts]
            if names:
                torch._foreach_copy_([state[name] for name in names], [weights[name] for name in names])


def in_parts(function: Callable[[Tensor], Tensor], rows: Tensor, size: int) -> Tensor:
    """Return `function(rows)`, which treats every row alike, computed on `size` rows at a time.

    A GPU takes more of them, and the last part filled up: libraries plan anew for every shape they meet.
    """
    count = len(rows)
    if rows.is_cuda:
        size *= ON_A_GPU
        rows = torch.cat([rows, rows.new_zeros(-count % size, *rows.shape[1:])])
    return torch.cat([function(part) for part in torch.split(rows, size)])[:count]


def features_of(net: nn.Module, images: Tensor) -> Tensor:
    """Return the features of any number of images, with the weights that are in the network."""
    size = max(1, 2**17 // images[0].numel()) if len(images) else 1
    return in_parts(net.features, images, size)  # type: ignore[arg-type]


def outputs_of(net: nn.Module, images: Tensor) -> Tensor:
    """Return what the network says of any number of images, with the weights that are in it."""
    return in_parts(net, images, max(1, 2**17 // images[0].numel()) if len(images) else 1)


def by_class(function: Callable[[Tensor], Tensor], rows: ByClass) -> ByClass:
    """Return `function` of the rows of every class, computed on all of them at once."""
    if not rows:
        return {}
    done = function(torch.cat(list(rows.values())))
    return dict(zip(rows, torch.split(done, [len(own) for own in rows.values()]), strict=True))


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw from the standard normal distribution, on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device)


def as_bytes(images: Tensor) -> Tensor:
    """Return images in 0..1 as uint8, the form in which all images are kept."""
    return (images * 255).round().clamp(0, 255).to(torch.uint8)
