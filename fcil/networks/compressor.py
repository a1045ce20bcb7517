"""A small autoencoder that keeps an image as a grid of numbers of four bits: the learned codec.

Two strided convolutions down to a quarter of the side, two residual blocks, and the same way back; no normalisation,
so that an image's code does not depend on others. While it learns, rounding passes gradients on as if it were not.
"""

from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.networks.heads import Normalise

BITS = 4  # of each number
WIDTH = 64  # channels, unless another is asked for


class Compressor(nn.Module):
    """Encoder and decoder; `size` is the bytes of a code, of which each holds two numbers."""

    def __init__(self, shape: tuple[int, int, int], size: int, width: int = WIDTH):
        super().__init__()
        channels, height, across = shape
        self.shape, self.grid, self.kept = shape, (ceil(height / 4), ceil(across / 4)), size * 8 // BITS
        self.maps = ceil(self.kept / (self.grid[0] * self.grid[1]))
        self.normalise = Normalise(channels)
        self.encoder = nn.Sequential(
            nn.PixelUnshuffle(2), nn.Conv2d(4 * channels, width, 3, padding=1), nn.GELU(),
            nn.PixelUnshuffle(2), nn.Conv2d(4 * width, width, 3, padding=1), Residual(width), Residual(width),
            nn.Conv2d(width, self.maps, 3, padding=1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(self.maps, width, 3, padding=1), Residual(width), Residual(width),
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.GELU(),
            nn.Conv2d(width, 4 * channels, 3, padding=1), nn.PixelShuffle(2),
        )  # fmt: skip

    def encode(self, images: Tensor) -> Tensor:
        """Return the numbers of images in 0..1, between -1 and 1: (N, kept)."""
        if not len(images):  # on a CPU, torch unshuffles no images into the wrong shape (its pull request 192816)
            return images.new_zeros(0, self.kept)
        down, across = (4 * side - have for side, have in zip(self.grid, self.shape[1:], strict=True))
        x = F.pad(self.normalise(images), (0, across, 0, down), mode="replicate")
        numbers: Tensor = torch.tanh(self.encoder(x)).flatten(1)[:, : self.kept]
        return numbers

    def decode(self, numbers: Tensor) -> Tensor:
        """Return images in 0..1; what a code has no room for is 0."""
        whole = F.pad(numbers, (0, self.maps * self.grid[0] * self.grid[1] - self.kept))
        x: Tensor = self.decoder(whole.view(-1, self.maps, *self.grid))[..., : self.shape[1], : self.shape[2]]
        return x.to(numbers) + 0.5

    def forward(self, images: Tensor) -> Tensor:
        numbers = self.encode(images)
        return self.decode(numbers + (self.number(self.level(numbers)) - numbers).detach())

    @staticmethod
    def level(numbers: Tensor) -> Tensor:
        """Return the nearest of 2^BITS levels from -1 to 1, by its place."""
        return torch.round((numbers.clamp(-1, 1) + 1) / 2 * (2**BITS - 1))

    @staticmethod
    def number(level: Tensor) -> Tensor:
        """Return the number that a level stands for."""
        return torch.sub(level.to(torch.get_default_dtype()) / (2**BITS - 1) * 2, 1)


class Residual(nn.Module):
    """x + conv(gelu(conv(x)))."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y
