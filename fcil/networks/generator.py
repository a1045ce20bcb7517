"""A generator without data: noise to images, unconditional.

The network of MFCL and TARGET (Babakniya et al., NeurIPS 2023; Zhang et al., ICCV 2023): a linear layer makes a small
grid of maps, which is doubled until it is as large as an image, with a convolution after each doubling. For noise of
1,000 numbers at 32x32 it has 8.4 million parameters. TARGET's convolutions that are normalised have no biases.
"""

from torch import Tensor, nn

from fcil.networks.enlarging import convolved_large
from fcil.networks.heads import Normalise
from fcil.networks.norm import activated

LARGEST_GRID = 11  # side of the maps that the linear layer makes
SLOPE = 0.2


class Generator(nn.Module):
    """Noise (N, latent) to images.

    What it makes is either bounded, by 0..1, or normalised over the batch as a classifier has its images, and may lie
    outside. Where a classifier's constants are not the data's own, as for grey images, scale and shift are learned.
    """

    def __init__(
        self, latent: int, shape: tuple[int, int, int], width: int = 64, bounded: bool = True, eps: float = 1e-5,
        biases: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.channels, height, self.side = shape
        if height != self.side:
            raise ValueError(f"images are square here, not {height}x{self.side}")
        self.latent, self.maps, (self.grid, doublings) = latent, 2 * width, grid_for(self.side)
        depths = [self.maps] * doublings + [width]
        self.linear = nn.Linear(latent, self.maps * self.grid**2)
        self.first = nn.BatchNorm2d(self.maps)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(i, o, 3, padding=1, bias=biases) for i, o in zip(depths[:-1], depths[1:], strict=True)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(depth, eps) for depth in depths[1:])
        self.last = nn.Conv2d(width, self.channels, 3, padding=1)
        self.normalise = None if bounded else Normalise(self.channels)
        self.whiten = None if bounded else nn.BatchNorm2d(self.channels, affine=self.channels != 3)

    def forward(self, noise: Tensor) -> Tensor:
        x = activated(self.first, self.linear(noise).view(-1, self.maps, self.grid, self.grid), slope=1.0)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = activated(norm, convolved_large(convolution, x, 2), slope=SLOPE)  # type: ignore[arg-type]
        margin = (x.shape[-1] - self.side) // 2
        x = x[..., margin : margin + self.side, margin : margin + self.side]
        x = self.last(x).to(noise.dtype)
        if self.whiten is None or self.normalise is None:
            bounded: Tensor = x.sigmoid()
            return bounded
        images: Tensor = self.normalise.pixels(self.whiten(x.tanh()))
        return images


def grid_for(side: int) -> tuple[int, int]:
    """Return a grid, and how often it is doubled to reach `side` or just beyond it: twice, unless it were too large."""
    doublings = 2
    while -(-side // 2**doublings) > LARGEST_GRID:
        doublings += 1
    return -(-side // 2**doublings), doublings
