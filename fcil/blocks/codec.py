"""An image as a few bytes: transform codes that are fitted by sums, one that a small autoencoder learns, and WebP.

`klt` and `dct`: images become cosine coefficients, a rotation gathers their spread into few numbers (the
Karhunen-Loeve transform; `dct` does without), and each number gets the bits it deserves, with the levels that are best
for a Laplace density. What has to be known are the mean and the covariance of the coefficients: count, sum, sum of
products. They are sums of whole numbers, so adding them up over clients is exact: whoever holds the images, the same
codec to the bit, with nothing to train, to tune or to drift.

Mirror images count, too: mirroring turns the sign of all coefficients of odd horizontal frequency, so their products
with even ones cancel and the covariance falls into two halves. Only the lowest 32 by 32 frequencies are rotated; of
those beyond, which larger images have, each stands for itself.

Images differ in contrast, so each chooses the gain, of eight, with which it loses least.
"""

import io
import math
from functools import cache
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fcil.blocks.training import as_bytes, in_parts, loaded
from fcil.errors import UserError, unknown
from fcil.networks.compressor import BITS, WIDTH, Compressor
from fcil.records import Weights, record

KINDS = ("klt", "dct", "autoencoder", "webp")
LOW = 32  # frequencies in each direction that are rotated
SHRINK = 0.3  # of covariances towards 0: some thousand images do not tell a million of them from chance
MOST_BITS = 8
GAIN_BITS = 3
GAINS = tuple(2**power for power in (-1.2, -0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9))
TIE = 1e-6  # what lies halfway between two whole numbers goes away from 0, on every machine and in mirror images
AT_ONCE = 2**19  # pixel values that are coded at a time
Shape = tuple[int, int, int]  # channels, height, width


class Codec(Protocol):
    """What turns images of one shape into codes of `size` bytes and back; what was fitted comes as `Weights`.

    Those that code numbers have `numbers`, what a code keeps of each image before it is rounded, and `pictures`, the
    images of such numbers, rounded as codes are.
    """

    shape: Shape
    size: int

    def encode(self, fitted: Weights, images: Tensor) -> Tensor:
        """Return the codes of uint8 images: (N, size) bytes."""

    def decode(self, fitted: Weights, codes: Tensor) -> Tensor:
        """Return the images of codes, as uint8."""


@record
class Statistics:
    """What a codec has to know of one client's images; sums add up over clients."""

    sums: Weights


@record
class Fitted:
    """A codec as it was fitted, for clients that have to know nothing else."""

    weights: Weights


def build(kind: str, shape: Shape, size: int = 0, width: int = WIDTH) -> "TransformCodec | LearnedCodec | WebpCodec":
    """Return a codec for images of `shape` by its name; `size` 0 is a tenth of an image's bytes.

    `width` is the channels of a learned one's networks.
    """
    size = size or tenth(shape)
    if not 1 <= size <= math.prod(shape):
        raise UserError(
            f"code_bytes={size} is not allowed; "
            f"a code of an image of {_named(shape)} takes 1 to {math.prod(shape)} bytes"
        )
    if kind not in KINDS:
        raise unknown("codec", kind, list(KINDS))
    if kind == "webp":
        return WebpCodec(shape, size)
    if kind == "autoencoder":
        return LearnedCodec(shape, size, width)
    return TransformCodec(shape, size, rotates=kind == "klt")


def named(spec: str, shape: Shape) -> "TransformCodec | LearnedCodec | WebpCodec | RawCodec":
    """Return what keeps exemplars as a setting says: `raw`, or a codec and its bytes such as `webp:300`."""
    kind, _, size = spec.partition(":")
    if spec == "raw":
        return RawCodec(shape)
    if kind not in ("klt", "dct", "webp") or not size.isdecimal() or int(size) == 0:
        raise UserError(
            f"exemplar_codec={spec} is not allowed; "
            "write raw, or klt, dct or webp with the bytes of a code, such as webp:300"
        )
    try:
        return build(kind, shape, int(size))
    except UserError as error:
        raise UserError(str(error).replace("code_bytes=", f"exemplar_codec={kind}:")) from None


def tenth(shape: Shape) -> int:
    """Return a tenth of an image's bytes, as the paper's codes have."""
    return max(1, round(math.prod(shape) / 10))


# -- transform codes --------------------------------------------------------------------------------------------------


class TransformCodec:
    """The codecs `klt`, which rotates the coefficients, and `dct`, which does not."""

    def __init__(self, shape: Shape, size: int, rotates: bool = True):
        self.shape, self.size, self.at_once = shape, size, max(1, AT_ONCE // math.prod(shape))
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
        mean, square = (sums[name] / sums["count"] for name in ("sum", "square"))
        mean = torch.where(self._turned(), 0.0, mean)
        variances, bases = [], {}
        for name, rows in self.halves.items():
            products = _square(sums[name], rows.stop - rows.start) / sums["count"]
            covariance = products - torch.outer(mean[rows], mean[rows])
            covariance = (1 - SHRINK) * covariance + SHRINK * torch.diag(covariance.diagonal())
            own, vectors = torch.linalg.eigh(covariance)
            variances.append(own)
            bases[name] = vectors.T
        alone = slice(sum(map(len, variances)), None)
        variance = torch.cat([*variances, (square - mean.square())[alone]]).clamp_min(0)
        bits = allotted(variance, 8 * self.size - GAIN_BITS)
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
            name: _triangle(torch.diag(spread[rows]) + torch.outer(mean[rows], mean[rows]))
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
        return sums | {name: _triangle(x[:, rows].T @ x[:, rows]) for name, rows in self.halves.items()}

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
        groups, gains = _by_bits(fitted["bits"]), numbers.new_tensor(GAINS)
        lost = []
        for gain in gains:
            rounded = gain * _rounded(numbers / gain, groups)
            lost.append(((rounded - numbers) * fitted["deviation"]).square().sum(1))
        chosen = torch.stack(lost).argmin(0)
        numbers = numbers / gains[chosen, None]
        found = [_bits(_level(numbers[:, own], bits), bits) for bits, own in groups]
        return _number(torch.cat([_bits(chosen[:, None], GAIN_BITS), *found], 1), 8).to(torch.uint8)

    def _unpacked(self, fitted: Weights, codes: Tensor) -> Tensor:
        row = ((codes[..., None] >> torch.arange(8, device=codes.device)) & 1).flatten(1)
        numbers, start = fitted["deviation"].new_zeros(len(codes), len(fitted["bits"])), GAIN_BITS
        for bits, own in _by_bits(fitted["bits"]):
            end = start + bits * len(own)
            numbers[:, own] = levels(bits).to(numbers)[_number(row[:, start:end], bits)]
            start = end
        return numbers * numbers.new_tensor(GAINS)[_number(row[:, :GAIN_BITS], GAIN_BITS)]

    def _coefficients(self, images: Tensor, precision: torch.dtype) -> Tensor:
        _check(images, self.shape)
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


def allotted(variances: Tensor, bits: int) -> Tensor:
    """Share bits among numbers of these variances, one after the other where it removes most error; at most 8 each."""
    errors = torch.tensor([1.0, *(_book(count)[1] for count in range(1, MOST_BITS + 1))], dtype=torch.float64)
    gains = variances.double()[:, None] * (errors[:-1] - errors[1:])  # each falls from bit to bit
    best = gains.flatten().argsort(descending=True, stable=True)[:bits]
    return torch.bincount(best // MOST_BITS, minlength=len(variances))


def levels(bits: int) -> Tensor:
    """Return the 2^bits levels that lose least of a Laplace density of variance 1 (Lloyd and Max)."""
    return _book(bits)[0]


@cache
def _book(bits: int) -> tuple[Tensor, float]:
    """Return the levels, and the mean squared error that they leave."""
    points = 100_000
    p = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    x = torch.where(p < 0.5, (2 * p).log(), -(2 * (1 - p)).log()) / math.sqrt(2)
    u = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits * 2 - 1
    book = -3 / math.sqrt(2) * u.sign() * torch.log1p(-u.abs())  # where fine levels would lie
    sums = torch.cat([x.new_zeros(1), x.cumsum(0)])
    for _ in range(200):
        inner = torch.searchsorted(x, (book[1:] + book[:-1]) / 2)
        edges = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), points)])
        counts = edges.diff()
        book = torch.where(counts > 0, sums[edges].diff() / counts.clamp_min(1), book)
    error = (x - book[torch.bucketize(x, (book[1:] + book[:-1]) / 2)]).square().mean()
    return book.float(), float(error)


def _by_bits(bits: Tensor) -> list[tuple[int, Tensor]]:
    """Return the places of the numbers that have so many bits, the most first."""
    return [(count, (bits == count).nonzero()[:, 0]) for count in range(MOST_BITS, 0, -1)]


def _rounded(numbers: Tensor, groups: list[tuple[int, Tensor]]) -> Tensor:
    """Return the level that stands for each number."""
    result = torch.empty_like(numbers)
    for bits, own in groups:
        result[:, own] = levels(bits).to(numbers)[_level(numbers[:, own], bits)]
    return result


def _level(numbers: Tensor, bits: int) -> Tensor:
    book = levels(bits).to(numbers)
    return torch.bucketize(numbers.contiguous(), (book[1:] + book[:-1]) / 2)


def _bits(whole: Tensor, bits: int) -> Tensor:
    """Return whole numbers (N, many) as their bits, (N, many times bits)."""
    return ((whole[..., None] >> torch.arange(bits, device=whole.device)) & 1).flatten(1)


def _number(row: Tensor, bits: int) -> Tensor:
    """Invert `_bits`."""
    each = row.long().view(len(row), row.shape[1] // bits, bits)
    return (each << torch.arange(bits, device=row.device)).sum(2, dtype=torch.int64)


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


def _triangle(symmetric: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(*symmetric.shape, device=symmetric.device)
    return symmetric[rows, columns]


def _square(triangle: Tensor, side: int) -> Tensor:
    rows, columns = torch.triu_indices(side, side)
    full = triangle.new_zeros(side, side)
    full[rows, columns] = triangle
    full[columns, rows] = triangle
    return full


# -- the learned code -------------------------------------------------------------------------------------------------


class LearnedCodec:
    """The codec `autoencoder`: a small convolutional network whose numbers are rounded to a few bits each."""

    def __init__(self, shape: Shape, size: int, width: int = WIDTH):
        self.shape, self.size = shape, size
        self.net = Compressor(shape, size, width)

    def encode(self, fitted: Weights, images: Tensor) -> Tensor:
        return in_parts(self._packed, self.numbers(fitted, images), 4096)

    @torch.no_grad()
    def decode(self, fitted: Weights, codes: Tensor) -> Tensor:
        loaded(self.net, fitted)
        return in_parts(lambda part: as_bytes(self.net.decode(self._unpacked(part))), codes, 512)

    @torch.no_grad()
    def numbers(self, fitted: Weights, images: Tensor) -> Tensor:
        _check(images, self.shape)
        loaded(self.net, fitted)
        return in_parts(lambda part: self.net.encode(part.to(torch.get_default_dtype()) / 255), images, 512)

    def pictures(self, fitted: Weights, numbers: Tensor) -> Tensor:
        return self.decode(fitted, self._packed(numbers))

    def _packed(self, numbers: Tensor) -> Tensor:
        level = Compressor.level(numbers).long().view(len(numbers), self.size, 8 // BITS)
        return (level << (BITS * torch.arange(8 // BITS, device=level.device))).sum(2).to(torch.uint8)

    def _unpacked(self, codes: Tensor) -> Tensor:
        places = BITS * torch.arange(8 // BITS, device=codes.device)
        return Compressor.number((codes[..., None].long() >> places) & (2**BITS - 1)).flatten(1)


# -- WebP -------------------------------------------------------------------------------------------------------------


class WebpCodec:
    """WebP files, each of the best quality that fits into `size` bytes, headers and all; nothing is fitted.

    An image of which no file fits is made smaller first. It makes nothing up: it has no numbers to draw.
    """

    least = 64  # bytes, in which some picture always fits

    def __init__(self, shape: Shape, size: int):
        if shape[0] not in (1, 3):
            raise UserError(f"webp has images of 1 or 3 channels, not of {shape[0]}; choose klt or dct")
        if size < self.least:
            raise UserError(f"code_bytes={size} is not allowed with webp; a file takes at least {self.least}")
        self.shape, self.size = shape, size

    def encode(self, fitted: Weights, images: Tensor) -> Tensor:
        _check(images, self.shape)
        rows = torch.zeros(len(images), self.size, dtype=torch.uint8)
        for row, image in zip(rows, images.cpu(), strict=True):
            file = self._file(image.squeeze(0).numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())
            row[: len(file)] = torch.frombuffer(bytearray(file), dtype=torch.uint8)
        return rows.to(images.device)

    def decode(self, fitted: Weights, codes: Tensor) -> Tensor:
        images = torch.zeros(len(codes), *self.shape, dtype=torch.uint8)
        for image, code in zip(images, codes.cpu(), strict=True):
            picture = Image.open(io.BytesIO(code.numpy().tobytes())).convert("L" if self.shape[0] == 1 else "RGB")
            pixels = torch.from_numpy(np.array(picture.resize(self.shape[:0:-1], Image.Resampling.BICUBIC)))
            image.copy_(pixels if self.shape[0] == 1 else pixels.permute(2, 0, 1))
        return images.to(codes.device)

    def _file(self, pixels: "np.typing.NDArray[np.uint8]") -> bytes:
        picture = Image.fromarray(pixels)
        while True:
            low, high, best = 0, 100, b""
            while low <= high:
                quality = (low + high) // 2
                file = io.BytesIO()
                picture.save(file, "webp", quality=quality)
                if file.tell() <= self.size:
                    low, best = quality + 1, file.getvalue()
                else:
                    high = quality - 1
            if best:
                return best
            picture = picture.resize((max(1, picture.width // 2), max(1, picture.height // 2)))


# -- none at all ------------------------------------------------------------------------------------------------------


class RawCodec:
    """Images as they are."""

    def __init__(self, shape: Shape):
        self.shape, self.size = shape, math.prod(shape)

    def encode(self, fitted: Weights, images: Tensor) -> Tensor:
        _check(images, self.shape)
        return images

    def decode(self, fitted: Weights, codes: Tensor) -> Tensor:
        return codes


def _check(images: Tensor, shape: Shape) -> None:
    if tuple(images.shape[1:]) != shape:
        raise UserError(f"this codec is for images of {_named(shape)}, not of {_named(tuple(images.shape[1:]))}")


def _named(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} channel{'s' * (shape[0] != 1)} and {'x'.join(map(str, shape[1:]))} pixels"
