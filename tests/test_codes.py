"""Codes as they are kept: what comes back, how many bytes they take, and the paper's memory arithmetic."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fcil.blocks.codes import BITS, code_bytes, packed, renewed, scale_bytes, unpacked
from fcil.method import Setting
from fcil.methods.hr_literal import Config, latent_size
from fcil.networks.autoencoder import Decoder
from fcil.scenario.benchmarks import BENCHMARKS, PROTOCOLS
from fcil.scenario.memory import budget

WIDTHS = {32: 1228, 16: 614, 8: 307, 6: 231, 4: 154}  # bytes of 307 numbers
FEW = [bits for bits in WIDTHS if bits < 16]


def some_codes(count: int, width: int, spread: float, seed: int) -> Tensor:
    return spread * torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def size(stored: Tensor) -> int:
    return stored.numel() * stored.element_size()


def packed_one(codes: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    stored, scales = packed({7: codes}, bits)
    return stored[7], scales[7]


def unpacked_one(stored: Tensor, scale: Tensor, bits: int, width: int) -> Tensor:
    return unpacked({7: stored}, {7: scale}, bits, width)[7]


def restored(codes: Tensor, bits: int) -> Tensor:
    return unpacked_one(*packed_one(codes, bits), bits, codes.shape[1])


def of_any_size(test: Callable[..., None]) -> Callable[..., None]:
    """Try counts, widths (odd ones, too) and spreads."""
    sizes = given(
        st.integers(1, 6), st.sampled_from([1, 2, 3, 5, 6, 7, 8, 13, 64, 307]), st.sampled_from([1e-6, 0.07, 1.0, 1e4]),
        st.integers(0, 99),
    )  # fmt: skip
    for width in (1, 6, 307):
        test = example(3, width, 0.07, 0)(test)
    return pytest.mark.parametrize("bits", WIDTHS)(settings(max_examples=50)(sizes(test)))


def test_the_bits_to_choose_from_are_those_tested_here() -> None:
    assert tuple(map(str, WIDTHS)) == BITS


@of_any_size
def test_codes_come_back_within_half_a_level(bits: int, count: int, width: int, spread: float, seed: int) -> None:
    codes = some_codes(count, width, spread, seed)
    back = restored(codes, bits)
    assert back.shape == codes.shape and back.dtype == torch.float32
    error, largest = (back - codes).abs(), codes.abs().max()
    if bits == 32:
        assert torch.equal(back, codes)
    elif bits == 16:
        assert (error <= codes.abs() / 2**11 + 2**-25).all()
    else:
        assert (error <= largest / (2**bits - 1) + 4e-7 * largest).all()


@of_any_size
def test_codes_take_the_bytes_that_are_charged(bits: int, count: int, width: int, spread: float, seed: int) -> None:
    stored, scale = packed_one(some_codes(count, width, spread, seed), bits)
    assert len(stored) == count and size(stored) == count * code_bytes(width, bits)
    assert size(scale) == scale_bytes(bits) and scale.dtype == torch.float32


@of_any_size
def test_packing_again_changes_nothing(bits: int, count: int, width: int, spread: float, seed: int) -> None:
    stored, scale = packed_one(some_codes(count, width, spread, seed), bits)
    again, same = packed_one(unpacked_one(stored, scale, bits, width), bits)
    assert torch.equal(again, stored) and torch.equal(same, scale)


@pytest.mark.parametrize("bits", WIDTHS)
def test_some_of_the_codes_can_be_kept_and_the_others_dropped(bits: int) -> None:
    codes = some_codes(5, 307, 1.0, 0)
    stored, scale = packed_one(codes, bits)
    assert torch.equal(unpacked_one(stored[1:3], scale, bits, 307), restored(codes, bits)[1:3])


@pytest.mark.parametrize("bits", FEW)
def test_the_largest_code_comes_back_exactly_and_the_levels_are_evenly_spaced(bits: int) -> None:
    levels = torch.linspace(-3.0, 3.0, 2**bits).view(1, -1)
    back = restored(levels, bits)
    assert back[0, 0].item() == -3.0 and back[0, -1].item() == 3.0
    assert torch.allclose(back, levels, atol=1e-6)  # as many levels as that many bits can tell apart
    assert len(packed_one(levels.view(-1, 1), bits)[0].unique()) == 2**bits


@pytest.mark.parametrize("bits", FEW)
def test_codes_packed_together_share_one_scale(bits: int) -> None:
    codes = torch.tensor([[0.01, -0.01], [2.0, 1.0]])
    _, scale = packed_one(codes, bits)
    assert scale.tolist() == [2.0]
    assert packed_one(-codes, bits)[1].tolist() == [2.0]
    assert (restored(codes, bits)[0].abs() <= 2.0 / (2**bits - 1) + 1e-6).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_codes_that_are_all_zero_come_back_as_good_as_zero(bits: int) -> None:
    stored, scale = packed_one(torch.zeros(2, 7), bits)
    assert (scale > 0).all()  # it divides
    assert unpacked_one(stored, scale, bits, 7).abs().max() <= 1e-12


@pytest.mark.parametrize("bits", [32, *FEW])
@pytest.mark.parametrize("most", [1e-30, 1e-6, 3e38])
def test_codes_as_large_or_small_as_floats_can_be_come_back(bits: int, most: float) -> None:
    codes = most * torch.tensor([[1.0, -1.0, 0.3, 0.0]])
    error = (restored(codes, bits) - codes).abs()
    assert error.isfinite().all()
    assert error.max() <= (0 if bits == 32 else 1.001 * max(most, 1e-12) / (2**bits - 1))


@pytest.mark.parametrize("bits", [32, 16, 8, 6, 4])
def test_a_memory_may_hold_the_codes_of_no_image_at_all(bits: int) -> None:
    assert restored(torch.zeros(0, 7), bits).shape == (0, 7)


# -- memory arithmetic (methods.md 2.9 and 11) -------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "expected"), WIDTHS.items())
def test_the_bytes_of_a_code_of_307_numbers(bits: int, expected: int) -> None:
    assert code_bytes(307, bits) == expected


@pytest.mark.parametrize(("width", "expected"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 4)])
def test_the_last_byte_of_a_code_need_not_be_full(width: int, expected: int) -> None:
    assert code_bytes(width, 6) == expected


def test_only_codes_of_few_bits_have_a_scale() -> None:
    assert [scale_bytes(bits) for bits in WIDTHS] == [0, 0, 4, 4, 4]


CIFAR, MINI = (3, 32, 32), (3, 84, 84)
TWENTY_IMAGES_A_CLASS = replace(BENCHMARKS["cifar100-10x10"], memory_scope="client")  # of a hundred classes


def setting(shape: tuple[int, int, int]) -> Setting:
    return Setting(100, shape, PROTOCOLS["short"], budget(TWENTY_IMAGES_A_CLASS, prod(shape)))


def test_a_code_has_a_tenth_of_an_images_numbers() -> None:
    assert latent_size(Config(), setting(CIFAR)) == round(3072 / 10) == 307
    assert latent_size(Config(), setting(MINI)) == 2117
    assert latent_size(Config(), setting((1, 8, 8))) == 6
    assert latent_size(Config(), setting((1, 2, 2))) == 1  # never none
    assert latent_size(Config(latent=64), setting(CIFAR)) == 64


def test_the_papers_memories_hold_as_many_numbers_as_it_says() -> None:
    latent = latent_size(Config(), setting(CIFAR))
    assert setting(CIFAR).budget.per_client == 20 * 100 * prod(CIFAR) == 6_144_000
    assert setting(MINI).budget.per_client == 20 * 100 * prod(MINI) == 42_336_000
    assert 150 * 100 * code_bytes(latent, 8) == 4_605_000
    assert 200 * 100 * code_bytes(latent, 8) == 6_140_000 <= setting(CIFAR).budget.per_client  # Table 2
    decoder = sum(p.numel() for p in Decoder(latent, CIFAR).parameters())
    assert 4_605_000 + decoder == 6_016_459 <= setting(CIFAR).budget.per_client  # Table 3 charges the decoder, too


def test_15000_codes_take_less_than_2000_images_at_8_bits_and_thrice_that_as_floats() -> None:
    codes, images = torch.zeros(150, 307), torch.zeros(20, *CIFAR, dtype=torch.uint8)
    assert 100 * size(images) == 6_144_000
    assert 100 * size(packed_one(codes, 8)[0]) == 4_605_000
    assert 100 * size(packed_one(codes, 32)[0]) == 15_000 * code_bytes(307, 32) == 18_420_000


@pytest.mark.parametrize("bits", WIDTHS)
def test_classes_packed_together_are_packed_as_if_alone(bits: int) -> None:
    rows = {j: some_codes(count, 13, 10.0**-j, seed=j) for j, count in ((4, 3), (0, 1), (2, 6))}
    stored, scales = packed(rows, bits)
    assert list(stored) == list(scales) == [4, 0, 2]
    for j, codes in rows.items():
        alone, scale = packed_one(codes, bits)
        assert torch.equal(stored[j], alone) and torch.equal(scales[j], scale)
        assert torch.equal(unpacked(stored, scales, bits, 13)[j], restored(codes, bits))
    assert packed({}, bits) == ({}, {}) and unpacked({}, {}, bits, 13) == {}


@pytest.mark.parametrize("bits", [8, 32])
def test_what_is_kept_anew_is_packed_and_all_else_stays_to_the_bit_so_many_of_each(bits: int) -> None:
    before, after = ({j: some_codes(6, 5, 1.0, seed + j) for j in (1, 2, 3)} for seed in (0, 10))
    stored, scales = packed(before, bits)
    anew = {j: after[j] for j in (2, 3)}
    codes, own = renewed(stored, scales, anew, {3: 4, 1: 2}, bits)
    fresh, fresh_scales = packed({3: after[3][:4]}, bits)
    assert list(codes) == list(own) == [3, 1], "nothing is left of class 2"
    assert torch.equal(codes[3], fresh[3]) and torch.equal(own[3], fresh_scales[3])
    assert torch.equal(codes[1], stored[1][:2]) and torch.equal(own[1], scales[1])
    assert codes[1].untyped_storage().nbytes() < stored[1].untyped_storage().nbytes(), "the rest is let go of"
