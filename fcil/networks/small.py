"""A network for 8x8 digits: three convolutions, 24 thousand parameters, a millisecond a step on one core."""

from torch import Tensor, nn
from torch.nn import functional as F

from fcil.networks.norm import activated, normalisation


class SmallNet(nn.Module):
    """The body: three stages, 16 to 64 channels, halving the side twice."""

    width = 64  # channels of the last stage
    begins = 16  # and of the first

    def __init__(self, channels: int = 1, norm: str = "batch"):
        super().__init__()
        self.channels = channels
        plan = [(channels, 16, 1), (16, 32, 2), (32, 64, 2)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), normalisation(norm, o)) for i, o, stride in plan
        )

    def stages(self, x: Tensor, raw: bool = False) -> list[Tensor]:
        """Return the maps after each of the three stages; `raw` ones are before the activation that ends it."""
        maps = []
        for layer in self.layers:
            if raw:
                maps.append(activated(layer[1], layer[0](x), slope=1.0))  # type: ignore[index]
                x = F.relu(maps[-1])
            else:
                maps.append(x := activated(layer[1], layer[0](x)))  # type: ignore[index]
        return maps
