"""Numbers in few bits each: how many a number deserves, the levels that stand for it, and bits laid side by side."""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

MOST_BITS = 8


def allotted(variances: Tensor, bits: int, errors: Sequence[float] = ()) -> Tensor:
    """Share bits among numbers of these variances, one after the other where it removes most error; at most 8 each.

    `errors` are what 0, 1, ... bits leave of a variance of 1: those of `levels` if not said.
    """
    left = torch.tensor(errors or [1.0, *(book(count)[1] for count in range(1, MOST_BITS + 1))], dtype=torch.float64)
    gains = variances.double()[:, None] * (left[:-1] - left[1:])  # each falls from bit to bit
    best = gains.flatten().argsort(descending=True, stable=True)[:bits]
    return torch.bincount(best // MOST_BITS, minlength=len(variances))


def levels(bits: int) -> Tensor:
    """Return the 2^bits levels that lose least of a Laplace density of variance 1 (Lloyd and Max)."""
    return book(bits)[0]


@cache
def book(bits: int) -> tuple[Tensor, float]:
    """Return the levels, and the mean squared error that they leave."""
    points = 100_000
    p = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    x = torch.where(p < 0.5, (2 * p).log(), -(2 * (1 - p)).log()) / math.sqrt(2)
    u = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits * 2 - 1
    found = -3 / math.sqrt(2) * u.sign() * torch.log1p(-u.abs())  # where fine levels would lie
    sums = torch.cat([x.new_zeros(1), x.cumsum(0)])
    for _ in range(200):
        inner = torch.searchsorted(x, (found[1:] + found[:-1]) / 2)
        edges = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), points)])
        counts = edges.diff()
        found = torch.where(counts > 0, sums[edges].diff() / counts.clamp_min(1), found)
    error = (x - found[torch.bucketize(x, (found[1:] + found[:-1]) / 2)]).square().mean()
    return found.float(), float(error)


def by_bits(bits: Tensor) -> list[tuple[int, Tensor]]:
    """Return the places of the numbers that have so many bits, the most first."""
    return [(count, (bits == count).nonzero()[:, 0]) for count in range(MOST_BITS, 0, -1)]


def written(numbers: Tensor, bits: Tensor) -> Tensor:
    """Return rows of numbers as bits, each number rounded by itself."""
    return torch.cat([bits_of(level(numbers[:, own], count), count) for count, own in by_bits(bits)], 1)


def read(row: Tensor, bits: Tensor) -> Tensor:
    """Invert `written`: return the numbers that rows of bits stand for."""
    numbers, start = torch.zeros(len(row), len(bits), dtype=torch.float32, device=row.device), 0
    for count, own in by_bits(bits):
        end = start + count * len(own)
        numbers[:, own] = levels(count).to(numbers)[number_of(row[:, start:end], count)]
        start = end
    return numbers


def rounded(numbers: Tensor, groups: list[tuple[int, Tensor]]) -> Tensor:
    """Return the level that stands for each number."""
    result = torch.empty_like(numbers)
    for bits, own in groups:
        result[:, own] = levels(bits).to(numbers)[level(numbers[:, own], bits)]
    return result


def level(numbers: Tensor, bits: int) -> Tensor:
    """Return which level stands for each number."""
    book = levels(bits).to(numbers)
    return torch.bucketize(numbers.contiguous(), (book[1:] + book[:-1]) / 2)


def bits_of(whole: Tensor, bits: int) -> Tensor:
    """Return whole numbers (N, many) as their bits, (N, many times bits)."""
    return ((whole[..., None] >> torch.arange(bits, device=whole.device)) & 1).flatten(1)


def number_of(row: Tensor, bits: int) -> Tensor:
    """Invert `bits_of`."""
    each = row.long().view(len(row), row.shape[1] // bits, bits)
    return (each << torch.arange(bits, device=row.device)).sum(2, dtype=torch.int64)
