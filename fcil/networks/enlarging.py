"""Larger maps: what decoders and generators do before a convolution."""

from math import ceil

from torch import Tensor, nn
from torch.nn import functional as F

LARGEST_GRID = 8  # side of the maps that a decoder's linear layer makes


def enlarged(x: Tensor, factor: int) -> Tensor:
    """Repeat every pixel `factor` times in both directions."""
    if not x.is_cuda:
        return F.interpolate(x, scale_factor=float(factor))
    count, channels, height, width = x.shape  # a copy with the channels last: three times as fast as interpolating
    pixels = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(count, height, factor, width, factor, channels)
    return pixels.reshape(count, height * factor, width * factor, channels).permute(0, 3, 1, 2)


def convolved_large(convolution: nn.Conv2d, x: Tensor, factor: int) -> Tensor:
    """Return what a 3x3 convolution makes of enlarged maps; a GPU never makes these: a twenty-fifth of a round less."""
    if x.is_cuda:
        return transposed(convolution, x, factor)
    result: Tensor = convolution(enlarged(x, factor))
    return result


def transposed(convolution: nn.Conv2d, x: Tensor, factor: int) -> Tensor:
    """Do both as one transposed convolution.

    Repeating pixels is a transposed convolution with ones, and two convolutions are one, whose kernel is theirs
    convolved. It multiplies (factor + 2)^2 numbers for factor^2 pixels, not 9 for each.
    """
    weight = F.pad(convolution.weight.flip(2, 3).transpose(0, 1), [factor - 1] * 4)
    kernel = F.avg_pool2d(weight, factor, stride=1, divisor_override=1)  # sums: what `factor` equal pixels meet
    return F.conv_transpose2d(x, kernel, convolution.bias, stride=factor, padding=1)


def enlargements(side: int) -> tuple[int, int, int]:
    """Return a grid and two factors, both at least 2, that enlarge it to `side` or just beyond it.

    The grid is of 5 to 8, or smaller where twice two is enough for a small image.
    """
    factors = range(2, max(3, ceil(side / LARGEST_GRID / 2) + 1))
    found = [
        (grid * first * second - side, first * second, second - first, (grid, first, second))
        for first in factors
        for second in factors[first - 2 :]
        if (grid := ceil(side / (first * second))) <= LARGEST_GRID and (2 * grid > LARGEST_GRID or second == 2)
    ]
    return min(found)[-1]  # the least beyond, then the largest grid, then the most even factors
