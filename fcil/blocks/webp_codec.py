"""The codec `webp`: files that everyone can read."""

import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fcil.blocks.image_shape import Shape, check_shape
from fcil.errors import UserError
from fcil.records import Weights


class WebpCodec:
    """WebP files, each of the best quality that fits into `size` bytes, headers and all; nothing is fitted.

    An image of which no file fits is made smaller first. It makes nothing up: it has no numbers to draw.
    """

    least = 64  # bytes, in which some picture always fits

    def __init__(self, shape: Shape, size: int):
        if shape[0] not in (1, 3):
            raise UserError(f"webp has images of 1 or 3 channels, not of {shape[0]}; choose klt, trellis or dct")
        if size < self.least:
            raise UserError(f"code_bytes={size} is not allowed with webp; a file takes at least {self.least}")
        self.shape, self.size = shape, size

    def encode(self, fitted: Weights, images: Tensor) -> Tensor:
        check_shape(images, self.shape)
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
