"""A classifier in two parts: the lower one makes maps of images, the upper one scores classes from maps."""

import torch
from torch import Tensor, nn

from fcil.errors import UserError
from fcil.networks.heads import Classifier, pooled
from fcil.networks.norm import activated
from fcil.networks.resnet import ResNet


class Activated(nn.Module):
    """A convolution, its normalisation, and a ReLU."""

    def __init__(self, layer: nn.Sequential):
        super().__init__()
        self.conv, self.norm = layer

    def forward(self, x: Tensor) -> Tensor:
        return activated(self.norm, self.conv(x))  # type: ignore[arg-type]


def pieces(body: nn.Module) -> list[nn.Module]:
    """Return what a body is made of, one after the other: a residual network's stem and blocks, or convolutions."""
    if isinstance(body, ResNet):
        return [Activated(body.stem), *(block for layer in body.layers for block in layer)]  # type: ignore[attr-defined]
    return [Activated(layer) for layer in body.layers]  # type: ignore[union-attr]


class Upper(nn.Module):
    """The last pieces of a body, and the head."""

    def __init__(self, body: list[nn.Module], head: nn.Module):
        super().__init__()
        self.body, self.head = nn.Sequential(*body), head

    def forward(self, maps: Tensor) -> Tensor:
        logits: Tensor = self.head(pooled([self.body(maps)]))
        return logits


class SplitClassifier(nn.Module):
    """A classifier whose last `pieces` are its upper part, with the head; all others are its lower part."""

    def __init__(self, net: Classifier, above: int):
        super().__init__()
        parts = pieces(net.body)
        if not 0 < above < len(parts):
            raise UserError(f"of the network's {len(parts)} pieces, 1 to {len(parts) - 1} can be plastic, not {above}")
        self.lower = nn.Sequential(net.normalise, *parts[:-above])
        self.upper = Upper(parts[-above:], net.head)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.upper(self.lower(images))
        return logits

    @torch.no_grad()
    def maps_of(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the shape of the maps that images of this shape have between the parts."""
        channels, height, width = self.lower.eval()(torch.zeros(1, *shape))[0].shape
        return channels, height, width
