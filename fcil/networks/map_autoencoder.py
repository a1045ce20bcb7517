"""An autoencoder of feature maps: a quarter of the channels, half the side; a classifier looks at what is between."""

from torch import Tensor, nn

from fcil.networks.enlarging import enlarged
from fcil.networks.heads import Linear, pooled
from fcil.networks.norm import activated, normalisation


class MapAutoEncoder(nn.Module):
    """Two convolutions to the bottleneck, two mirrored ones back, and a linear classifier of the bottleneck."""

    def __init__(self, shape: tuple[int, int, int], bottleneck: int, classes: int, norm: str = "batch"):
        super().__init__()
        channels, self.height, self.width = shape
        self.narrow = nn.Conv2d(channels, bottleneck, 1, bias=False)
        self.norms = nn.ModuleList(normalisation(norm, bottleneck) for _ in range(2))
        self.shrink = nn.Conv2d(bottleneck, bottleneck, 3, 2, 1)
        self.spread = nn.Conv2d(bottleneck, bottleneck, 3, 1, 1, bias=False)
        self.widen = nn.Conv2d(bottleneck, channels, 1)
        self.head = Linear(bottleneck, classes)
        self.bottleneck = bottleneck, -(-self.height // 2), -(-self.width // 2)

    def encode(self, maps: Tensor) -> Tensor:
        """Return the bottleneck of maps."""
        code: Tensor = self.shrink(activated(self.norms[0], self.narrow(maps)))  # type: ignore[arg-type]
        return code

    def decode(self, codes: Tensor) -> Tensor:
        """Return the maps of a bottleneck."""
        large = enlarged(codes, 2)[..., : self.height, : self.width]
        maps: Tensor = self.widen(activated(self.norms[1], self.spread(large)))  # type: ignore[arg-type]
        return maps

    def classify(self, codes: Tensor) -> Tensor:
        """Score the classes of a bottleneck."""
        logits: Tensor = self.head(pooled([codes]))
        return logits
