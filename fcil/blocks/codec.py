"""An image as a few bytes: transform codes that are fitted by sums, one that a small autoencoder learns, and WebP.

Whoever keeps exemplars asks here for a codec by its name; each is in a file of its own.
"""

import math
from typing import Protocol

from torch import Tensor

from fcil.blocks.image_shape import Shape, check_shape, in_words
from fcil.blocks.learned_codec import LearnedCodec
from fcil.blocks.transform_codec import TransformCodec
from fcil.blocks.webp_codec import WebpCodec
from fcil.errors import UserError, unknown
from fcil.networks.compressor import WIDTH
from fcil.records import Weights, record

__all__ = [
    "KINDS", "Codec", "Fitted", "LearnedCodec", "RawCodec", "Statistics", "TransformCodec", "WebpCodec", "build",
    "named", "tenth",
]  # fmt: skip

KINDS = ("klt", "trellis", "dct", "autoencoder", "webp")


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


class RawCodec:
    """Images as they are."""

    def __init__(self, shape: Shape):
        self.shape, self.size = shape, math.prod(shape)

    def encode(self, fitted: Weights, images: Tensor) -> Tensor:
        check_shape(images, self.shape)
        return images

    def decode(self, fitted: Weights, codes: Tensor) -> Tensor:
        return codes


def build(kind: str, shape: Shape, size: int = 0, width: int = WIDTH) -> TransformCodec | LearnedCodec | WebpCodec:
    """Return a codec for images of `shape` by its name; `size` 0 is a tenth of an image's bytes.

    `width` is the channels of a learned one's networks.
    """
    size = size or tenth(shape)
    if not 1 <= size <= math.prod(shape):
        raise UserError(
            f"code_bytes={size} is not allowed; "
            f"a code of an image of {in_words(shape)} takes 1 to {math.prod(shape)} bytes"
        )
    if kind not in KINDS:
        raise unknown("codec", kind, list(KINDS))
    if kind == "webp":
        return WebpCodec(shape, size)
    if kind == "autoencoder":
        return LearnedCodec(shape, size, width)
    return TransformCodec(shape, size, rotates=kind != "dct", together=kind == "trellis")


def named(spec: str, shape: Shape) -> TransformCodec | LearnedCodec | WebpCodec | RawCodec:
    """Return what keeps exemplars as a setting says: `raw`, or a codec and its bytes such as `webp:300`."""
    kind, _, size = spec.partition(":")
    if spec == "raw":
        return RawCodec(shape)
    if kind not in ("klt", "trellis", "dct", "webp") or not size.isdecimal() or int(size) == 0:
        raise UserError(
            f"exemplar_codec={spec} is not allowed; "
            "write raw, or klt, trellis, dct or webp with the bytes of a code, such as webp:300"
        )
    try:
        return build(kind, shape, int(size))
    except UserError as error:
        raise UserError(str(error).replace("code_bytes=", f"exemplar_codec={kind}:")) from None


def tenth(shape: Shape) -> int:
    """Return a tenth of an image's bytes, as the paper's codes have."""
    return max(1, round(math.prod(shape) / 10))
