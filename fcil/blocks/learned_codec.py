"""The codec `autoencoder`: what a small convolutional network keeps of an image, in a few bits a number."""

import torch
from torch import Tensor

from fcil.blocks.image_shape import Shape, check_shape
from fcil.blocks.training import as_bytes, in_parts, loaded
from fcil.networks.compressor import BITS, WIDTH, Compressor
from fcil.records import Weights


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
        check_shape(images, self.shape)
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
