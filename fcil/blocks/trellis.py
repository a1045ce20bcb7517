"""Numbers in few bits each, rounded together along a path: about a decibel more than rounding each by itself.

Trellis-coded quantisation (Marcellin and Fischer, IEEE Transactions on Communications, 1990). A number of so many bits
has twice as many levels as they could tell apart, dealt in turn to four hands. Its first bit is a step on a path; this
step and the three before it say which hand its level is in, the other bits which level of that hand. Of all paths the
one is taken on which the numbers together lose least, which is found step by step (Viterbi). To read a path needs no
search: every number is read at once.
"""

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.levels import bits_of, book, by_bits, number_of

STEPS = 64  # of a path, about: a code has as many paths side by side as that takes
BACK = 3  # steps before the present one that count
TAPS = 0b0110, 0b1011  # of the last four steps, those whose sum is odd or even: one bit of the hand each
HANDS = 4

# The upper halves of the levels, for numbers with the density exp(-|x|^1.3) and variance 1, and the mean squared error
# that up to eight bits leave: `python benchmarks/trellis_levels.py`. With more bits than listed, levels are those that
# are best for one bit more when each number is rounded by itself.
UPPER: tuple[tuple[float, ...], ...] = (
    (0.2094, 1.2870),
    (0.1588, 0.5581, 1.1357, 2.2119),
    (0.0854, 0.2978, 0.5179, 0.7921, 1.1154, 1.5604, 2.1980, 3.2454),
    (
        0.0546, 0.1785, 0.3012, 0.4400, 0.5816, 0.7402, 0.9094, 1.0990,
        1.3099, 1.5498, 1.8274, 2.1489, 2.5295, 3.0003, 3.6166, 4.5820,
    ),
)  # fmt: skip
ERRORS = (1.0, 0.346, 0.103, 0.0289, 0.0083, 0.00258, 0.000646, 0.000162, 4.04e-05)


def levels(bits: int) -> Tensor:
    """Return the 2^(bits + 1) levels of a number with so many bits, from the least."""
    if bits > len(UPPER):
        return book(bits + 1)[0]
    upper = torch.tensor(UPPER[bits - 1], dtype=torch.float32)
    return torch.cat([-upper.flip(0), upper])


def written(numbers: Tensor, bits: Tensor, weights: Tensor) -> Tensor:
    """Return rows of numbers as bits: the steps of all, the most precise first, then what tells levels of a hand apart.

    What a number loses counts by its weight, the same in each row.
    """
    groups = [(count, own) for count, own in by_bits(bits) if len(own)]
    nearest = [_nearest(numbers[:, own], levels(count).to(numbers)) for count, own in groups]
    order = torch.cat([own for _, own in groups])
    lost = torch.cat([error for _, error in nearest], 1) * weights[order, None]
    steps = _side_by_side(path(_in_paths(lost)), len(numbers), len(order))
    hands, rest, start = hands_of(steps), [], 0
    for (count, own), (found, _) in zip(groups, nearest, strict=True):
        level = found.gather(2, hands[:, start : start + len(own), None])[..., 0]
        rest.append(bits_of(level, count - 1))
        start += len(own)
    return torch.cat([steps, *rest], 1)


def read(row: Tensor, bits: Tensor) -> Tensor:
    """Invert `written`: return the numbers that rows of bits stand for."""
    groups = [(count, own) for count, own in by_bits(bits) if len(own)]
    numbers = torch.zeros(len(row), len(bits), dtype=torch.float32, device=row.device)
    hands, first, start = hands_of(row[:, : len(bits)]), 0, len(bits)
    for count, own in groups:
        end = start + (count - 1) * len(own)
        level = number_of(row[:, start:end], count - 1) if count > 1 else torch.zeros_like(own)
        numbers[:, own] = levels(count).to(numbers)[HANDS * level + hands[:, first : first + len(own)]]
        first, start = first + len(own), end
    return numbers


def path(lost: Tensor) -> Tensor:
    """Return the steps, 0 or 1, that lose least, of what each hand loses: (steps, rows, hands)."""
    states, hands = 2**BACK, _hands().to(lost.device).view(2, -1)
    total = lost.new_full((lost.shape[1], states), math.inf)
    total[:, 0] = 0  # where all paths begin
    forgotten = []  # the step that leaves the state, for which the better of two ways is taken
    for each in lost:
        ways = total.view(-1, 2, states // 2).repeat_interleave(2, 2) + each[:, hands]
        total, way = ways.min(1)
        forgotten.append(way)
    state, steps = total.argmin(1, keepdim=True), []
    for way in reversed(forgotten):
        steps.append(state[:, 0] & 1)
        state = (state >> 1) | (way.gather(1, state) << (BACK - 1))
    return torch.stack(steps[::-1])


def hands_of(steps: Tensor) -> Tensor:
    """Return the hand of each number, of rows of steps as they lie in a code."""
    along = _in_paths(steps)
    before = F.pad(along, (0, 0, BACK, 0))
    window = sum(before[BACK - back : BACK - back + len(along)] << back for back in range(BACK + 1))
    assert isinstance(window, Tensor)
    return _side_by_side(_hands().to(steps.device)[window], *steps.shape)


@cache
def _hands() -> Tensor:
    """Return the hand that the last steps lead to, the present one in the lowest bit."""
    windows = range(2 ** (BACK + 1))
    return torch.tensor([sum((w & taps).bit_count() % 2 << place for place, taps in enumerate(TAPS)) for w in windows])


def _nearest(numbers: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return which level of each hand is nearest to each number, and how far in square: two of (N, numbers, hands)."""
    found, lost = [], []
    for hand in range(HANDS):
        own = levels[hand::HANDS]
        level = torch.bucketize(numbers.contiguous(), (own[1:] + own[:-1]) / 2)
        found.append(level)
        lost.append((numbers - own[level]).square())
    return torch.stack(found, 2), torch.stack(lost, 2)


def _paths(numbers: int) -> int:
    """Return how many paths a code of so many numbers has."""
    return max(1, round(numbers / STEPS))


def _in_paths(rows: Tensor) -> Tensor:
    """Return (N, numbers, ...) as (steps, N times paths, ...), what lacks at the end as zeros."""
    beside = _paths(rows.shape[1])
    steps = -(-rows.shape[1] // beside)
    gap = rows.new_zeros(len(rows), steps * beside - rows.shape[1], *rows.shape[2:])
    full = torch.cat([rows, gap], 1).view(len(rows), steps, beside, *rows.shape[2:])
    return full.transpose(0, 1).flatten(1, 2)


def _side_by_side(along: Tensor, many: int, numbers: int) -> Tensor:
    """Invert `_in_paths`, of which each number is one."""
    beside = _paths(numbers)
    return along.view(len(along), many, beside).transpose(0, 1).reshape(many, len(along) * beside)[:, :numbers]
