"""The codecs that are fitted by sums: cosines, a rotation, and bits where they remove most error.

`klt`, `trellis` and `dct`: images become cosine coefficients, a rotation gathers their spread into few numbers (the
Karhunen-Loeve transform; `dct` does without), and each number gets the bits it deserves, with the levels that are best
for a Laplace density; `trellis` rounds all numbers together (blocks/trellis.py). What has to be known are the mean and
the covariance of the coefficients: count, sum, sum of products. They are sums of whole numbers, so adding them up over
clients is exact: whoever holds the images, the same codec to the bit, with nothing to train, to tune or to drift.

Mirror images count, too: mirroring turns the sign of all coefficients of odd horizontal frequency, so their products
with even ones cancel and the covariance falls into two halves. Only the lowest 32 by 32 frequencies are rotated; of
those beyond, which larger images have, each stands for itself.

Images differ in contrast, so each chooses the gain, of eight, with which it loses least if each number is rounded by
itself.
"""

import math
from functools import cache

import torch
from torch import Tensor

from fcil.blocks import levels, trellis
from fcil.blocks.image_shape import Shape, check_shape
from fcil.blocks.levels import allotted, bits_of, by_bits, number_of, rounded
from fcil.blocks.training import as_bytes, in_parts
from fcil.records import Weights

LOW = 32  # frequencies in each direction that are rotated
SHRINK = 0.3  # of covariances towards 0: some thousand images do not tell a million of them from chance
GAIN_BITS = 3
GAINS = tuple(2**power for power in (-1.2, -0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9))
TIE = 1e-6  # what lies halfway between two whole numbers goes away from 0, on every machine and in mirror images
AT_ONCE = 2**19  # pixel values that are coded at a time


class TransformCodec:
    """The codecs `klt` and `trellis`, which rotate the coefficients, and `dct`, which does not."""

    def __init__(self, shape: Shape, size: int, rotates: bool = True, together: bool = False):
        self.shape, self.size, self.at_once = shape, size, max(1, AT_ONCE // math.prod(shape))
        self.together = together
        self.order, self.halves = _order(shape, LOW if rotates else 0)

    def statistics(self, images: Tensor) -> Weights:
        """Return what the codec has to know of these images, as sums."""
        first, *others = torch.split(images, 4 * self.at_once)
        sums = self._sums(first)
        for part in others:
            for name, more in self._sums(part).items():
                sums[name] += more
        return sums

    def fitted(self, sums: Weights | None) -> Weights:
        """Return the codec that these sums make; if there are none, that of images in general."""
        sums = {k: v.cpu() for k, v in (sums if sums and sums["count"] > 0 else self.in_general()).items()}
        mean, squares = (sums[name] / sums["count"] for name in ("sum", "square"))
        mean = torch.where(self._turned(), 0.0, mean)
        variances, bases = [], {}
        for name, rows in self.halves.items():
            products = square(sums[name], rows.stop - rows.start) / sums["count"]
            covariance = products - torch.outer(mean[rows], mean[rows])
            covariance = (1 - SHRINK) * covariance + SHRINK * torch.diag(covariance.diagonal())
            own, vectors = torch.linalg.eigh(covariance)
            variances.append(own)
            bases[name] = vectors.T
        alone = slice(sum(map(len, variances)), None)
        variance = torch.cat([*variances, (squares - mean.square())[alone]]).clamp_min(0)
        bits = allotted(variance, 8 * self.size - GAIN_BITS, trellis.ERRORS if self.together else ())
        kept = torch.split(bits > 0, [*map(len, variances), len(bits) - alone.start])
        return {
            "mean": mean.float(),
            "bits": bits[bits > 0].to(torch.uint8),
            "deviation": variance[bits > 0].sqrt().clamp_min(1e-3).float(),
            "alone": (alone.start + kept[-1].nonzero()[:, 0]).int(),
            **{name: basis[own].half().contiguous() for (name, basis), own in zip(bases.items(), kept, strict=False)},
        }

    def middle(self, sums: Weights) -> Tensor:
        """Return the mean image that these sums tell, uint8: whoever has them has it."""
        return as_bytes(self._inverse((sums["sum"] / sums["count"])[None]) / 255)[0]

    def in_general(self) -> Weights:
        """Return the sums of an image nobody has: grey on average, its spread falling with the square of frequency."""
        channels, height, width = self.shape
        down, across = torch.arange(height).double() ** 2, torch.arange(width).double() ** 2
        fall = 1 / (1 + down[:, None] + across)
        spread = torch.cat([share * fall.flatten() for share in (1.0, 0.1, *[0.05] * channels)[:channels]])
        spread = (60**2 * math.prod(self.shape) * spread / spread.sum()).round()
        mean = torch.zeros_like(spread)
        mean[0] = round(128 * math.sqrt(math.prod(self.shape)))
        spread, mean = spread[self.order], mean[self.order]
        sums = {"count": torch.tensor(1.0, dtype=torch.float64), "sum": mean, "square": spread + mean.square()}
        return sums | {
            name: triangle(torch.diag(spread[rows]) + torch.outer(mean[rows], mean[rows]))
            for name, rows in self.halves.items()
        }

    def encode(self, fitted: Weights, images: Tensor) -> Tensor:
        return in_parts(lambda part: self._packed(fitted, self.numbers(fitted, part)), images, self.at_once)

    def decode(self, fitted: Weights, codes: Tensor) -> Tensor:
        return in_parts(lambda part: self._pictures(fitted, self._unpacked(fitted, part)), codes, self.at_once)

    def numbers(self, fitted: Weights, images: Tensor) -> Tensor:
        """Return the coefficients that are kept, rotated, over their deviations."""
        x = self._coefficients(images, torch.float32) - fitted["mean"]
        rotated = [x[:, rows] @ fitted[name].float().T for name, rows in self.halves.items()]
        return torch.cat([*rotated, x[:, fitted["alone"].long()]], 1) / fitted["deviation"]

    def pictures(self, fitted: Weights, numbers: Tensor) -> Tensor:
        return self.decode(fitted, in_parts(lambda part: self._packed(fitted, part), numbers, self.at_once))

    def _sums(self, images: Tensor) -> Weights:
        x = self._coefficients(images, torch.float64)
        x = x.sign() * torch.floor(x.abs() + 0.5 + TIE)
        sums = {"count": x.new_tensor(len(x)), "sum": x.sum(0), "square": x.square().sum(0)}
        return sums | {name: triangle(x[:, rows].T @ x[:, rows]) for name, rows in self.halves.items()}

    def _pictures(self, fitted: Weights, numbers: Tensor) -> Tensor:
        numbers = numbers * fitted["deviation"]
        x, start = fitted["mean"].repeat(len(numbers), 1), 0
        for name, rows in self.halves.items():
            basis = fitted[name].float()
            x[:, rows] += numbers[:, start : start + len(basis)] @ basis
            start += len(basis)
        x[:, fitted["alone"].long()] += numbers[:, start:]
        return as_bytes(self._inverse(x) / 255)

    def _packed(self, fitted: Weights, numbers: Tensor) -> Tensor:
        bits, gains = fitted["bits"], numbers.new_tensor(GAINS)
        groups, lost = by_bits(bits), []
        for gain in gains:
            left = gain * rounded(numbers / gain, groups) - numbers
            lost.append((left * fitted["deviation"]).square().sum(1))
        chosen = torch.stack(lost).argmin(0)
        numbers = numbers / gains[chosen, None]
        if self.together:
            found = trellis.written(numbers, bits, fitted["deviation"].square())
        else:
            found = levels.written(numbers, bits)
        return number_of(torch.cat([bits_of(chosen[:, None], GAIN_BITS), found], 1), 8).to(torch.uint8)

    def _unpacked(self, fitted: Weights, codes: Tensor) -> Tensor:
        row = ((codes[..., None] >> torch.arange(8, device=codes.device)) & 1).flatten(1)
        read = trellis.read if self.together else levels.read
        numbers = read(row[:, GAIN_BITS:], fitted["bits"])
        return numbers * numbers.new_tensor(GAINS)[number_of(row[:, :GAIN_BITS], GAIN_BITS)]

    def _coefficients(self, images: Tensor, precision: torch.dtype) -> Tensor:
        check_shape(images, self.shape)
        down, across, colours = (m.to(images.device, precision) for m in _axes(self.shape))
        x = down @ images.to(precision) @ across.T
        return (colours @ x.flatten(2)).flatten(1)[:, self.order.to(images.device)]

    def _inverse(self, coefficients: Tensor) -> Tensor:
        down, across, colours = (m.to(coefficients) for m in _axes(self.shape))
        x = torch.empty_like(coefficients)
        x[:, self.order.to(x.device)] = coefficients
        x = colours.T @ x.view(-1, self.shape[0], self.shape[1] * self.shape[2])
        return down.T @ x.view(-1, *self.shape) @ across

    def _turned(self) -> Tensor:
        """Return which coefficients mirroring turns the sign of: their mean over mirrored pairs is 0."""
        return (self.order % self.shape[2]) % 2 == 1


@cache
def _axes(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cosine transforms of columns, rows and channels: brightness, red to blue, green to purple."""
    return _cosines(shape[1]), _cosines(shape[2]), _cosines(shape[0])


def _cosines(side: int) -> Tensor:
    k = torch.arange(side, dtype=torch.float64)
    waves = torch.cos(math.pi * (k + 0.5) * k[:, None] / side) * math.sqrt(2 / side)
    waves[0] /= math.sqrt(2)
    return waves


def _order(shape: Shape, low: int) -> tuple[Tensor, dict[str, slice]]:
    """Return the coefficients in order: low even horizontal frequencies, low odd ones, all others."""
    channels, height, width = shape
    index = torch.arange(math.prod(shape)).view(shape)
    rotated = torch.zeros(height, width, dtype=torch.bool)
    rotated[:low, :low] = True
    odd = torch.arange(width) % 2 == 1
    parts = [index[:, chosen].flatten() for chosen in (rotated & ~odd, rotated & odd, ~rotated)]
    ends = [0, len(parts[0]), len(parts[0]) + len(parts[1])]
    halves = {name: slice(*ends[i : i + 2]) for i, name in enumerate(("even", "odd")) if ends[i] < ends[i + 1]}
    return torch.cat(parts), halves


def triangle(symmetric: Tensor) -> Tensor:
    """Return the upper half of a symmetric matrix, row after row."""
    rows, columns = torch.triu_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, columns]


def square(triangle: Tensor, side: int) -> Tensor:
    """Invert `triangle`."""
    rows, columns = torch.triu_indices(side, side, device=triangle.device)
    full = triangle.new_zeros(side, side)
    full[rows, columns] = triangle
    full[columns, rows] = triangle
    return full
