"""ResNet-18 with a 3x3 stem, for small images.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, in the form that MFCL, GLFC and TARGET use:
stride 1 and no pooling in the stem. 11,168,832 parameters without a head.
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


class ResNet18(nn.Module):
    """The body: a stem and four stages of two blocks, 64 to 512 channels."""

    width = 512  # channels of the last stage
    begins = 64  # and of the first

    def __init__(self, channels: int = 3, norm: str = "batch"):
        super().__init__()
        self.channels = channels
        self.stem = nn.Sequential(nn.Conv2d(channels, 64, 3, 1, 1, bias=False), normalisation(norm, 64))
        plan = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.layers = nn.ModuleList(
            nn.Sequential(Block(i, o, stride, norm), Block(o, o, 1, norm)) for i, o, stride in plan
        )

    def stages(self, x: Tensor, raw: bool = False) -> list[Tensor]:
        """Return the maps after each of the four stages; `raw` ones are before the activation that ends it."""
        x, maps = activated(self.stem[1], self.stem[0](x)), []  # type: ignore[arg-type]
        for layer in self.layers:
            if raw:
                maps.append(layer[1](layer[0](x), slope=1.0))  # type: ignore[index]
                x = F.relu(maps[-1])
            else:
                maps.append(x := layer(x))
        return maps
