"""Numbers in few bits each: how many a number deserves, the levels that stand for it, and bits laid side by side."""

import math
from functools import cache

import torch
from torch import Tensor

MOST_BITS = 8


def allotted(variances: Tensor, bits: int) -> Tensor:
    """Share bits among numbers of these variances, one after the other where it removes most error; at most 8 each."""
    errors = torch.tensor([1.0, *(book(count)[1] for count in range(1, MOST_BITS + 1))], dtype=torch.float64)
    gains = variances.double()[:, None] * (errors[:-1] - errors[1:])  # each falls from bit to bit
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
