"""Numbers rounded together: the best of all paths, bits that come back, and less lost than each by itself."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fcil.blocks import levels as books
from fcil.blocks import trellis


def draws(count: int, exponent: float = 1.3, seed: int = 5) -> Tensor:
    """Return rows of numbers of variance 1 with the density exp(-|x|^exponent), by NumPy."""
    random = np.random.default_rng(seed)
    size = random.gamma(1 / exponent, size=(count, trellis.STEPS)) ** (1 / exponent)
    x = torch.from_numpy(size * random.choice([-1.0, 1.0], size.shape)).float()
    return x / x.std()


def back(numbers: Tensor, bits: Tensor) -> Tensor:
    return trellis.read(trellis.written(numbers, bits, torch.ones(len(bits))), bits)


def lost_on(steps: tuple[int, ...], lost: Tensor) -> float:
    """Return what numbers lose on a path, by hand: an odd or even sum of two pairs of steps names the hand."""
    total, last = 0.0, (0, 0, 0)
    for step, each in zip(steps, lost.tolist(), strict=True):
        one, two, three, four = (step, *last)  # the present step, and those before it
        total += each[(two + three) % 2 + 2 * ((one + two + four) % 2)]
        last = (one, two, three)
    return total


def test_no_path_loses_less() -> None:
    lost = torch.rand(9, 20, 4, generator=torch.Generator().manual_seed(0))
    found = trellis.path(lost)
    for row in range(20):
        least = min(lost_on(steps, lost[:, row]) for steps in itertools.product((0, 1), repeat=9))
        assert lost_on(tuple(found[:, row].tolist()), lost[:, row]) == pytest.approx(least)


def test_from_everywhere_two_hands_are_in_reach_that_lie_far_apart() -> None:
    reached = trellis._hands().view(-1, 2).sort(1).values.tolist()
    assert sorted(map(tuple, reached)) == [(0, 2)] * 4 + [(1, 3)] * 4


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_twice_as_many_and_lie_alike_on_both_sides(bits: int) -> None:
    found = trellis.levels(bits)
    assert len(found) == 2 ** (bits + 1) and (found.diff() > 0).all()
    assert torch.allclose(found, -found.flip(0), atol=1e-5)


@pytest.mark.parametrize("bits", range(1, 9))
def test_errors_are_what_bits_leave_and_less_than_each_number_by_itself(bits: int) -> None:
    x = draws(1000)
    together = (back(x, torch.full((trellis.STEPS,), bits)) - x).square().mean()
    assert trellis.ERRORS[0] == 1 and float(together) == pytest.approx(trellis.ERRORS[bits], rel=0.05)
    alone = (books.levels(bits)[books.level(x, bits)] - x).square().mean()
    assert 10 * torch.log10(alone / together) > (0.9 if bits == 1 else 1.4)  # decibels


def test_each_bit_removes_less_error_than_the_one_before() -> None:
    removed = [before - after for before, after in itertools.pairwise(trellis.ERRORS)]
    assert len(removed) == books.MOST_BITS and removed == sorted(removed, reverse=True) and removed[-1] > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=200), st.integers(0, 3), st.integers(0, 2**31))
def test_bits_come_back(bits: list[int], rows: int, seed: int) -> None:
    allotted = torch.tensor(bits, dtype=torch.uint8)
    row = torch.randint(2, (rows, sum(bits)), generator=torch.Generator().manual_seed(seed))
    numbers = trellis.read(row, allotted)
    assert numbers.shape == (rows, len(bits))
    for place, count in enumerate(bits):
        assert torch.isin(numbers[:, place], trellis.levels(count)).all()
    again = trellis.written(numbers, allotted, torch.ones(len(bits)))
    assert torch.equal(again, row)  # what lies on levels lies on one path alone, and loses nothing there


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=150), st.integers(0, 2**31))
def test_a_row_is_rounded_alike_alone_and_among_others(bits: list[int], seed: int) -> None:
    allotted = torch.tensor(bits)
    numbers = torch.randn(4, len(bits), generator=torch.Generator().manual_seed(seed))
    rows = trellis.written(numbers, allotted, torch.ones(len(bits)))
    assert rows.shape == (4, sum(bits)) and ((rows == 0) | (rows == 1)).all()
    for number, row in zip(numbers, rows, strict=True):
        assert torch.equal(trellis.written(number[None], allotted, torch.ones(len(bits)))[0], row)


def test_what_weighs_more_loses_less() -> None:
    x, bits = draws(200), torch.full((trellis.STEPS,), 2)
    alike = torch.ones(trellis.STEPS)
    weights = torch.where(torch.arange(trellis.STEPS) % 2 == 0, 20.0, 1.0)
    even, odd = ((trellis.read(trellis.written(x, bits, w), bits) - x).square() for w in (alike, weights))
    assert odd[:, ::2].mean() < 0.9 * even[:, ::2].mean() and odd[:, 1::2].mean() > 1.1 * even[:, 1::2].mean()


@pytest.mark.parametrize("numbers", [1, 63, 64, 65, 95, 96, 97, 1000])
def test_long_codes_have_several_paths_side_by_side(numbers: int) -> None:
    rows = torch.arange(3 * numbers).view(3, numbers)
    along = trellis._in_paths(rows)
    assert len(along) <= 1.5 * trellis.STEPS and along.shape[1] % 3 == 0
    assert torch.equal(trellis._side_by_side(along, 3, numbers), rows)
