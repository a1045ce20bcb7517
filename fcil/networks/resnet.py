"""Residual networks with a 3x3 stem, for small images.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. ResNet-18 is in the form that MFCL, GLFC and
TARGET use: stride 1 and no pooling in the stem, 11,168,832 parameters without a head. ResNet-8 is what He et al. have
for CIFAR-10, with n = 1 and projections as shortcuts: 77,392 parameters, for natural images on a CPU.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from fcil.networks.norm import activated, normalisation


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = normalisation(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = normalisation(norm, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, normalisation(norm, outputs))

    def forward(self, x: Tensor, slope: float = 0.0) -> Tensor:
        y = activated(self.norm1, self.conv1(x))
        beside = activated(self.shortcut[1], self.shortcut[0](x), slope=1.0) if len(self.shortcut) else x  # type: ignore[arg-type]
        return activated(self.norm2, self.conv2(y), beside, slope)


class ResNet(nn.Module):
    """The body: a stem and stages of blocks, each stage but the first halving the side."""

    widths: tuple[int, ...]  # channels of each stage
    begins: int  # channels of the first
    width: int  # channels of the last
    blocks: int  # in a stage

    def __init_subclass__(cls) -> None:
        cls.begins, cls.width = cls.widths[0], cls.widths[-1]

    def __init__(self, channels: int = 3, norm: str = "batch"):
        super().__init__()
        self.channels, inputs = channels, self.begins
        self.stem = nn.Sequential(nn.Conv2d(channels, inputs, 3, 1, 1, bias=False), normalisation(norm, inputs))
        self.layers = nn.ModuleList()
        for width in self.widths:
            first = Block(inputs, width, 2 if self.layers else 1, norm)
            self.layers.append(nn.Sequential(first, *(Block(width, width, 1, norm) for _ in range(1, self.blocks))))
            inputs = width

    def stages(self, x: Tensor, raw: bool = False) -> list[Tensor]:
        """Return the maps after each stage; `raw` ones are before the activation that ends it."""
        x, maps = activated(self.stem[1], self.stem[0](x)), []  # type: ignore[arg-type]
        for layer in self.layers:
            if raw:
                maps.append(layer[-1](layer[:-1](x), slope=1.0))  # type: ignore[index]
                x = F.relu(maps[-1])
            else:
                maps.append(x := layer(x))
        return maps


class ResNet18(ResNet):
    """Four stages of two blocks."""

    widths, blocks = (64, 128, 256, 512), 2


class ResNet8(ResNet):
    """Three stages of one block."""

    widths, blocks = (16, 32, 64), 1
