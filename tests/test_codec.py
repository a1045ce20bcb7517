"""The codecs of hr: sizes, sums that are exact, known answers, a plain reference, and pictures as good as promised.

Codes are the same to the bit for the same images in the same batch. In another batch a matrix product may round
differently, and a number that lies between two levels may fall to the other one: of a thousand bytes at most one.
"""

import io
import math
import os
from collections.abc import Iterator
from functools import cache, reduce
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features
from sklearn.datasets import load_sample_image
from torch import Tensor

from fcil.blocks import levels as books
from fcil.blocks import transform_codec as transforms
from fcil.blocks import trellis
from fcil.blocks.codec import KINDS, Codec, LearnedCodec, TransformCodec, build, tenth
from fcil.blocks.levels import allotted, levels
from fcil.blocks.training import weights_of
from fcil.blocks.transform_codec import GAIN_BITS, GAINS
from fcil.errors import UserError
from fcil.federation.engine import threads
from fcil.networks.compressor import BITS, Compressor
from fcil.records import Weights
from fcil.scenario.datasets import load

EACH = ("klt", "dct")  # each number is rounded by itself
TRANSFORMS = (*EACH, "trellis")
NUMBERED = (*TRANSFORMS, "autoencoder")  # codes of numbers; WebP's are files
DIGIT, CIFAR = (1, 8, 8), (3, 32, 32)
SHAPES = [DIGIT, CIFAR, (3, 64, 64), (3, 84, 84)]
Shape = tuple[int, int, int]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.fixture
def few_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotate 8 by 8 frequencies only: large images are fitted at once, and have frequencies beyond."""
    monkeypatch.setattr(transforms, "LOW", 8)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images to fit, and others to code."""
    data = load("digits")
    return data.train_images, data.test_images


@cache
def photos(side: int) -> tuple[Tensor, Tensor]:
    """The squares of one photograph to fit, and those of another to code."""
    return tuple(squares(load_sample_image(name), side) for name in ("china.jpg", "flower.jpg"))


def squares(photo: np.ndarray, side: int) -> Tensor:
    pixels = torch.from_numpy(photo.copy()).permute(2, 0, 1)
    return pixels.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4).flatten(0, 1).contiguous()


def noise(count: int, shape: Shape, seed: int = 0) -> Tensor:
    return torch.randint(256, (count, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def transform(kind: str, shape: Shape, size: int = 0) -> TransformCodec:
    codec = build(kind, shape, size)
    assert isinstance(codec, TransformCodec)
    return codec


def learned(shape: Shape, size: int = 0) -> LearnedCodec:
    torch.manual_seed(0)
    codec = build("autoencoder", shape, size)
    assert isinstance(codec, LearnedCodec)
    return codec


def ready(kind: str, shape: Shape, size: int = 0, images: Tensor | None = None) -> tuple[Codec, Weights]:
    """Return a codec that is fitted to images, or to images in general; a learned one as it begins."""
    if kind == "autoencoder":
        net = learned(shape, size)
        return net, weights_of(net.net)
    codec = transform(kind, shape, size)
    return codec, codec.fitted(None if images is None else codec.statistics(images))


def coded(codec: Codec, fitted: Weights, images: Tensor) -> Tensor:
    return codec.decode(fitted, codec.encode(fitted, images))


def psnr(images: Tensor, others: Tensor) -> float:
    error = (images.double() - others.double()).square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf


def alike(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def at(codec: TransformCodec, row: Tensor) -> Tensor:
    """Return the coefficients that the codec has in its order as (channels, height, width)."""
    return torch.zeros_like(row).scatter(0, codec.order, row).view(codec.shape)


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_rotated")
@pytest.mark.parametrize("kind", NUMBERED)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_code_has_the_bytes_it_was_given_and_an_image_its_shape(shape: Shape, kind: str) -> None:
    images = noise(3, shape)
    for size in sorted({1, 7, tenth(shape), math.prod(shape) // 3, math.prod(shape)}):
        codec, fitted = ready(kind, shape, size, images)
        for some in (images, images[:1], images[:0]):
            codes = codec.encode(fitted, some)
            assert codes.dtype == torch.uint8 and codes.shape == (len(some), size)
            back = codec.decode(fitted, codes)
            assert back.dtype == torch.uint8 and back.shape == some.shape


@pytest.mark.parametrize("kind", NUMBERED)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 8), (3, 5, 1), (2, 8, 6), (4, 7, 9)])
def test_odd_shapes_are_coded_too(shape: Shape, kind: str) -> None:
    images = noise(4, shape)
    for to_fit, least in ((images, 37 if kind == "trellis" else 40), (None, 30)):
        codec, fitted = ready(kind, shape, math.prod(shape), to_fit)
        back = coded(codec, fitted, images)
        assert back.shape == images.shape
        if kind in TRANSFORMS:
            assert psnr(images, back) > least


@pytest.mark.parametrize(("shape", "size"), [(DIGIT, 6), (CIFAR, 307), ((3, 84, 84), 2117), ((1, 2, 2), 1)])
def test_a_code_takes_a_tenth_of_an_image_unless_told(shape: Shape, size: int) -> None:
    assert tenth(shape) == size
    assert all(build(kind, shape).size == size for kind in ("dct", "autoencoder"))


def test_beyond_the_32_lowest_frequencies_each_stands_for_itself() -> None:
    shape = (3, 64, 64)
    to_fit, images = photos(64)
    codec, fitted = ready("klt", shape, 0, to_fit)
    kept = at(codec, torch.zeros(math.prod(shape)).scatter(0, fitted["alone"].long(), 1.0))
    assert kept.sum() == len(fitted["alone"]) > 0 and kept[:, :32, :32].sum() == 0
    assert fitted["even"].shape[1] == fitted["odd"].shape[1] == 3 * 32 * 16
    assert len(fitted["even"]) + len(fitted["odd"]) + len(fitted["alone"]) == len(fitted["bits"])
    assert psnr(images, coded(codec, fitted, images)) > 30  # 30.5


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NUMBERED)
@pytest.mark.parametrize("size", [-1, 3073])
def test_a_code_takes_at_least_a_byte_and_at_most_the_image(kind: str, size: int) -> None:
    text = f"code_bytes={size} is not allowed; a code of an image of 3 channels and 32x32 pixels takes 1 to 3072 bytes"
    with pytest.raises(UserError, match=f"^{text}$"):
        build(kind, CIFAR, size)


def test_a_codec_that_is_none_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(
        UserError, match="there is no codec 'kl'; did you mean 'klt'[?] allowed: klt, trellis, dct, autoencoder"
    ):
        build("kl", CIFAR)


@pytest.mark.parametrize("kind", NUMBERED)
@pytest.mark.parametrize(
    ("shape", "named"), [((3, 8, 8), "3 channels and 8x8 pixels"), ((1, 8, 9), "1 channel and 8x9 pixels")]
)
def test_images_of_another_shape_are_an_error_that_names_both(kind: str, shape: Shape, named: str) -> None:
    codec, fitted = ready(kind, DIGIT)
    text = f"^this codec is for images of 1 channel and 8x8 pixels, not of {named}$"
    for asked in (codec.encode, codec.numbers):
        with pytest.raises(UserError, match=text):
            asked(fitted, noise(2, shape))
    if isinstance(codec, TransformCodec):
        with pytest.raises(UserError, match=text):
            codec.statistics(noise(2, shape))


# -- the same every time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NUMBERED)
def test_coding_is_the_same_every_time_and_alone_or_among_others(kind: str) -> None:
    to_fit, images = photos(16)
    images = images[::13]
    codec, fitted = ready(kind, (3, 16, 16), 0, to_fit)
    codes = codec.encode(fitted, images)
    assert torch.equal(codes, codec.encode(fitted, images))
    back = codec.decode(fitted, codes)
    assert torch.equal(back, codec.decode(fitted, codes))
    alone = torch.cat([codec.encode(fitted, image[None]) for image in images])
    assert (alone != codes).float().mean() <= 1e-3
    one_by_one = torch.cat([codec.decode(fitted, code[None]) for code in codes])
    assert (one_by_one.int() - back.int()).abs().max() <= 1 and (one_by_one != back).float().mean() <= 1e-3


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_parts_do_not_show(kind: str) -> None:
    to_fit, images = photos(16)
    codec, parts = transform(kind, (3, 16, 16)), transform(kind, (3, 16, 16))
    parts.at_once = 7
    assert alike(codec.statistics(to_fit), parts.statistics(to_fit))
    fitted = codec.fitted(codec.statistics(to_fit))
    codes = codec.encode(fitted, images)
    assert (parts.encode(fitted, images) != codes).float().mean() <= 1e-3
    assert (parts.decode(fitted, codes) != codec.decode(fitted, codes)).float().mean() <= 1e-3


@pytest.mark.parametrize("kind", EACH)
def test_coding_what_was_coded_loses_next_to_nothing(kind: str) -> None:
    for to_fit, images in (digits(), photos(16)):
        codec, fitted = ready(kind, tuple(images.shape[1:]), 0, to_fit)
        once = coded(codec, fitted, images)
        twice = coded(codec, fitted, once)
        assert psnr(images, twice) > psnr(images, once) - 0.5
        assert psnr(once, twice) > psnr(images, once) + 12


@pytest.mark.parametrize("kind", NUMBERED)
def test_pictures_of_numbers_are_what_codes_give_back(kind: str) -> None:
    to_fit, images = digits()
    codec, fitted = ready(kind, DIGIT, 12, to_fit)
    numbers = codec.numbers(fitted, images)
    assert numbers.shape == (len(images), len(fitted["bits"]) if kind in TRANSFORMS else 24)
    assert torch.equal(codec.pictures(fitted, numbers), coded(codec, fitted, images))
    assert codec.pictures(fitted, numbers[:0]).shape == (0, *DIGIT)


@pytest.mark.parametrize("kind", EACH)
def test_numbers_come_back_from_pictures_that_nothing_clips(kind: str) -> None:
    images = 96 + photos(8)[0] // 4
    codec, fitted = ready(kind, (3, 8, 8), 24, images)
    drawn = torch.randn(200, len(fitted["bits"]), generator=torch.Generator().manual_seed(0)).clamp(-1.5, 1.5)
    rounded = torch.empty(len(GAINS), *drawn.shape)
    for g, gain in enumerate(GAINS):
        for i, bits in enumerate(fitted["bits"].tolist()):
            book = gain * levels(bits)
            rounded[g, :, i] = book[(drawn[:, i, None] - book).abs().argmin(1)]
    least = ((rounded - drawn) * fitted["deviation"]).square().sum(2).argmin(0)
    rounded = rounded[least, torch.arange(len(drawn))]
    pictures = codec.pictures(fitted, drawn)
    assert pictures.min() > 0 and pictures.max() < 255
    error = (codec.numbers(fitted, pictures) - rounded) * fitted["deviation"]
    assert error.square().mean().sqrt() < 0.35  # rounding to whole pixel values alone makes 0.29


@pytest.mark.usefixtures("in_double")
@pytest.mark.parametrize("kind", NUMBERED)
def test_codecs_work_where_networks_compute_in_double(kind: str) -> None:
    to_fit, images = digits()[0], digits()[1][:50]
    codec, fitted = ready(kind, DIGIT, 12, to_fit)
    numbers = codec.numbers(fitted, images)
    assert torch.equal(codec.pictures(fitted, numbers), coded(codec, fitted, images))
    if kind in TRANSFORMS:
        torch.set_default_dtype(torch.float32)
        codec, same = ready(kind, DIGIT, 12, to_fit)
        assert alike(fitted, same) and torch.equal(numbers, codec.numbers(same, images))


# -- sums --------------------------------------------------------------------------------------------------------------


def added(one: Weights, other: Weights) -> Weights:
    return {name: one[name] + other[name] for name in one}


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("shape", [DIGIT, (3, 8, 8)])
@settings(max_examples=25)
@given(data=st.data())
def test_however_images_lie_with_clients_the_codec_is_the_same_to_the_bit(
    shape: Shape, kind: str, data: st.DataObject
) -> None:
    to_fit = (digits() if shape == DIGIT else photos(8))[0]
    images = to_fit[data.draw(st.lists(st.integers(0, len(to_fit) - 1), min_size=1, max_size=40))]
    clients = data.draw(st.integers(1, 8))
    holder = torch.tensor(data.draw(st.lists(st.integers(0, clients - 1), min_size=len(images), max_size=len(images))))
    codec = transform(kind, shape)
    pooled = codec.statistics(images)
    parts = [codec.statistics(images[holder == client]) for client in data.draw(st.permutations(range(clients)))]
    together = reduce(added, parts)
    assert alike(together, pooled) and pooled["count"] == len(images)
    fitted = codec.fitted(together)
    assert alike(fitted, codec.fitted(pooled))
    assert torch.equal(codec.encode(fitted, to_fit[:50]), codec.encode(codec.fitted(pooled), to_fit[:50]))


def test_sums_of_large_images_are_whole_numbers_and_exact() -> None:
    images = photos(32)[0]
    codec = transform("klt", CIFAR)
    pooled = codec.statistics(images)
    assert all(torch.equal(total, total.round()) and total.abs().max() < 2**53 for total in pooled.values())
    parts = [codec.statistics(images[i::3]) for i in (2, 0, 1)]
    assert alike(reduce(added, parts), pooled)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_client_without_images_adds_nothing(kind: str) -> None:
    codec = transform(kind, DIGIT)
    nothing = codec.statistics(digits()[0][:0])
    assert all((total == 0).all() for total in nothing.values())
    some = codec.statistics(digits()[0])
    assert alike(added(some, nothing), some)


# -- known answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [*SHAPES, (1, 7, 9), (2, 1, 3)])
def test_all_axes_are_orthonormal(shape: Shape) -> None:
    for axes, side in zip(transforms._axes(shape), (shape[1], shape[2], shape[0]), strict=True):
        assert torch.allclose(axes @ axes.T, torch.eye(side, dtype=torch.float64), atol=1e-12)


def test_the_axes_of_colour_are_brightness_red_to_blue_and_green_to_purple() -> None:
    expected = torch.tensor([[1, 1, 1], [1, 0, -1], [1, -2, 1]]).double()
    expected = expected / torch.tensor([3, 2, 6]).double().sqrt()[:, None]
    assert torch.allclose(transforms._axes(CIFAR)[2], expected, atol=1e-12)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_grey_image_has_one_coefficient_and_a_red_one_three(kind: str) -> None:
    codec = transform(kind, (3, 8, 16))
    grey = at(codec, codec.statistics(torch.full((1, 3, 8, 16), 100, dtype=torch.uint8))["sum"])
    assert grey[0, 0, 0] == round(100 * math.sqrt(3 * 8 * 16)) and (grey != 0).sum() == 1
    red = torch.zeros(1, 3, 8, 16, dtype=torch.uint8)
    red[:, 0] = 200
    sums = at(codec, codec.statistics(red)["sum"])
    assert sums[:, 0, 0].tolist() == [round(200 * math.sqrt(8 * 16 / n)) for n in (3, 2, 6)]
    assert (sums != 0).sum() == 3


def test_a_wave_has_the_coefficient_of_its_frequency() -> None:
    codec = transform("klt", (1, 8, 16))
    down, across = (torch.arange(8) + 0.5) * math.pi / 8, (torch.arange(16) + 0.5) * math.pi / 16
    wave = (128 + 100 * torch.cos(2 * down)[:, None] * torch.cos(3 * across)).round().to(torch.uint8)
    sums = at(codec, codec.statistics(wave[None, None])["sum"])[0]
    assert sums[0, 0] == round(128 * math.sqrt(8 * 16)) and abs(sums[2, 3] - 100 * math.sqrt(8 * 16) / 2) <= 2
    sums[0, 0] = sums[2, 3] = 0
    assert sums.abs().max() <= 2  # of whole pixel values, not of the wave


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_coefficients_have_the_energy_of_the_pixels(kind: str) -> None:
    images = photos(16)[0]
    squares = transform(kind, (3, 16, 16)).statistics(images)["square"].sum()
    assert squares.item() == pytest.approx(images.double().square().sum().item(), rel=1e-5)


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("shape", [DIGIT, (3, 16, 16)])
def test_mirror_images_make_the_same_codec_to_the_bit(shape: Shape, kind: str) -> None:
    images = (digits() if shape == DIGIT else photos(16))[0]
    codec = transform(kind, shape)
    sums, mirrored = codec.statistics(images), codec.statistics(images.flip(3))
    fitted = codec.fitted(sums)
    assert alike(fitted, codec.fitted(mirrored)) and alike(fitted, codec.fitted(added(sums, mirrored)))
    mean = at(codec, fitted["mean"])
    assert (mean[..., 1::2] == 0).all() and (mean[..., 0::2] != 0).any(1).all()
    turned = at(codec, sums["sum"]) * torch.tensor([1, -1]).repeat(shape[2] // 2)
    assert torch.equal(turned, at(codec, mirrored["sum"]))


# -- a reference that imports nothing from fcil ------------------------------------------------------------------------


def naive_transform(shape: Shape) -> np.ndarray:
    def waves(side: int) -> np.ndarray:
        rows = [[math.cos(math.pi * (2 * n + 1) * k / (2 * side)) for n in range(side)] for k in range(side)]
        return np.array([np.array(row) / np.linalg.norm(row) for row in rows])

    colours = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]]) / np.sqrt([[3], [2], [6]]) if shape[0] == 3 else np.eye(1)
    return np.kron(colours, np.kron(waves(shape[1]), waves(shape[2])))


def shrunk(covariance: np.ndarray) -> np.ndarray:
    return 0.7 * covariance + 0.3 * np.diag(np.diag(covariance))


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("shape", [DIGIT, (3, 8, 8)])
def test_the_spread_is_that_of_a_plain_reference(shape: Shape, kind: str) -> None:
    images = (digits() if shape == DIGIT else photos(8))[0]
    codec, fitted = ready(kind, shape, math.prod(shape), images)  # every number is kept
    own = np.sort(fitted["deviation"].double().numpy() ** 2)

    pixels = np.concatenate([images.numpy(), images.numpy()[..., ::-1]]).reshape(2 * len(images), -1).astype(float)
    basis = naive_transform(shape)
    covariance = shrunk(basis @ np.cov(pixels.T, bias=True) @ basis.T)
    coefficients = pixels @ basis.T
    whole = np.sign(coefficients) * np.floor(np.abs(coefficients) + 0.5 + 1e-6)
    exactly = shrunk(np.cov(whole.T, bias=True))
    for expected, relative, more in ((covariance, 3e-3, 0.2), (exactly, 1e-6, 0)):  # rounding adds a twelfth or so
        spread = np.diag(expected) if kind == "dct" else np.linalg.eigvalsh(expected)
        assert np.allclose(own, np.sort(spread), rtol=relative, atol=more)
    mean = at(codec, fitted["mean"]).flatten()
    assert np.allclose(mean.numpy(), whole.mean(0), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("shape", [DIGIT, (3, 8, 8)])
def test_rotated_numbers_are_uncorrelated_as_far_as_shrinking_allows(shape: Shape) -> None:
    """The basis turns the reference's covariance into a diagonal one."""
    images = (digits() if shape == DIGIT else photos(8))[0]
    codec, fitted = ready("klt", shape, math.prod(shape), images)
    pixels = np.concatenate([images.numpy(), images.numpy()[..., ::-1]]).reshape(2 * len(images), -1).astype(float)
    basis = naive_transform(shape)[codec.order.numpy()]
    covariance = shrunk(basis @ np.cov(pixels.T, bias=True) @ basis.T)
    rotation = torch.block_diag(fitted["even"].double(), fitted["odd"].double()).numpy()
    assert np.allclose(rotation @ rotation.T, np.eye(len(rotation)), atol=2e-3)  # kept in half precision
    turned = rotation @ covariance @ rotation.T
    deviation = np.sqrt(np.diag(turned))
    assert np.abs(turned - np.diag(np.diag(turned))).max() < 2e-3 * np.diag(turned).max()
    assert np.allclose(deviation, fitted["deviation"].numpy(), rtol=0.02, atol=0.5)


def laplace(book: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the centroids of the cells of levels, and their squared error, by summing over the positive half."""
    step = 2e-5
    x = np.arange(step / 2, 25, step)
    weight = math.sqrt(2) * np.exp(-math.sqrt(2) * x) * step
    book = book[len(book) // 2 :]
    cell = np.searchsorted((book[1:] + book[:-1]) / 2, x)
    mass = np.bincount(cell, weight, len(book))
    return np.bincount(cell, weight * x, len(book)) / mass, float((weight * (x - book[cell]) ** 2).sum())


@pytest.mark.parametrize(
    ("bits", "positive", "error"),
    [(1, [math.sqrt(0.5)], 0.5), (2, [0.4198, 1.8340], 0.1762), (3, [0.2334, 0.8330, 1.6725, 3.0867], 0.0545)],
)
def test_levels_are_those_of_lloyd_and_max_for_a_laplace_density(
    bits: int, positive: list[float], error: float
) -> None:
    book = levels(bits).double().numpy()
    assert np.allclose(book[len(book) // 2 :], positive, atol=5e-4) and np.allclose(book, -book[::-1], atol=1e-6)
    assert laplace(book)[1] == pytest.approx(error, abs=6e-5)  # tables in print say 0.1765 and 0.0548
    assert np.allclose(laplace(np.array([-x for x in positive[::-1]] + positive))[0], positive, atol=2e-4)


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_lose_as_little_as_can_be(bits: int) -> None:
    book = levels(bits).double().numpy()
    assert len(book) == 2**bits and (np.diff(book) > 0).all()
    centroids, error = laplace(book)
    common = len(centroids) - max(0, bits - 4)  # beyond lie a few of ten thousand numbers
    assert np.allclose(centroids[:common], book[len(book) // 2 :][:common], rtol=0.01)
    assert error == pytest.approx(books.book(bits)[1], rel=0.03)
    if bits >= 5:
        assert error == pytest.approx(4.5 * 4.0**-bits, rel=0.08)  # Panter and Dite: many levels
    assert error < (1.0 if bits == 1 else laplace(levels(bits - 1).double().numpy())[1] / 2)


@given(
    st.lists(st.one_of(st.just(0.0), st.sampled_from([1.0, 4.0]), st.floats(0, 1e8)), min_size=1, max_size=30),
    st.integers(0, 260),
)
def test_bits_go_one_by_one_where_they_remove_most_error(variances: list[float], bits: int) -> None:
    errors = [1.0, *(books.book(count)[1] for count in range(1, 9))]
    expected = [0] * len(variances)
    heap = [(-variance * (errors[0] - errors[1]), i) for i, variance in enumerate(variances)]
    heapify(heap)
    for _ in range(bits):
        if heap:
            _, i = heappop(heap)
            expected[i] += 1
            if expected[i] < 8:
                heappush(heap, (-variances[i] * (errors[expected[i]] - errors[expected[i] + 1]), i))
    found = allotted(torch.tensor(variances, dtype=torch.float64), bits)
    assert found.tolist() == expected
    assert found.sum() == min(bits, 8 * len(variances)) and found.max() <= 8


def test_larger_spread_never_has_fewer_bits() -> None:
    found = allotted(torch.logspace(8, -2, 300), 900)
    assert (found.diff() <= 0).all() and found[0] == 8 and found.sum() == 900


# -- bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("size", [1, 6, 23, 64])
def test_all_bits_of_a_code_are_used(kind: str, size: int) -> None:
    _, fitted = ready(kind, DIGIT, size, digits()[0])
    assert fitted["bits"].sum() == 8 * size - GAIN_BITS and fitted["bits"].min() >= 1 and fitted["bits"].max() <= 8
    assert len(fitted["deviation"]) == len(fitted["bits"])


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("size", [1, 6, 12])
def test_each_bit_stands_for_something_in_the_image(kind: str, size: int) -> None:
    to_fit, images = digits()
    codec = transform(kind, DIGIT, size)
    fitted = codec.fitted(codec.statistics(to_fit))
    codes = codec.encode(fitted, images[:20])
    back, numbers = codec.decode(fitted, codes), codec._unpacked(fitted, codes)
    for byte in range(size):
        for bit in range(8):
            flipped = codes.clone()
            flipped[:, byte] ^= 1 << bit
            one_of_all = len(numbers[0]) if 8 * byte + bit < GAIN_BITS else 1  # a gain is every number's
            assert ((codec._unpacked(fitted, flipped) != numbers).sum(1) == one_of_all).all()
            assert (codec.decode(fitted, flipped) != back).flatten(1).any(1).any()


@pytest.mark.parametrize("kind", NUMBERED)
@pytest.mark.parametrize(("shape", "size"), [(DIGIT, 1), (DIGIT, 11), (DIGIT, 64), ((3, 8, 8), 40)])
def test_packing_and_unpacking_are_inverse(shape: Shape, size: int, kind: str) -> None:
    codes = torch.cat(
        [noise(300, (size, 1, 1)).flatten(1), torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, size)]
    )
    if kind == "autoencoder":
        net = learned(shape, size)
        assert torch.equal(net._packed(net._unpacked(codes)), codes)
        return
    codec = transform(kind, shape, size)
    fitted = codec.fitted(codec.statistics((digits() if shape == DIGIT else photos(8))[0]))
    numbers = codec._unpacked(fitted, codes)
    if kind != "trellis":  # which chooses a gain as if numbers were rounded by themselves
        again = codec._unpacked(fitted, codec._packed(fitted, numbers))  # two gains may have the same levels
        assert torch.allclose(again, numbers, rtol=1e-5)
    gains = torch.tensor(GAINS)[codes[:, 0].long() & 7]
    book = trellis.levels if kind == "trellis" else levels
    for i, bits in enumerate(fitted["bits"].tolist()):
        assert ((numbers[:, i] / gains)[:, None] - book(bits)).abs().amin(1).max() < 1e-5


# -- how good pictures are ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_more_bytes_are_never_worse(kind: str) -> None:
    to_fit, images = digits()
    sizes = (1, 2, 3, 6, 12, 16, 24, 32, 48, 64)
    found = [psnr(images, coded(*ready(kind, DIGIT, size, to_fit), images)) for size in sizes]
    assert found == sorted(found)
    by_size = dict(zip(sizes, found, strict=True))
    assert by_size[1] > 12 and by_size[64] > 50
    assert all(by_size[more] > by_size[less] + 3 for less, more in ((1, 6), (6, 24), (12, 32), (24, 64)))


def test_rotating_pays() -> None:
    for to_fit, images in (digits(), photos(16)):
        rotated, plain = (
            psnr(images, coded(*ready(kind, tuple(images.shape[1:]), 0, to_fit), images)) for kind in EACH
        )
        assert rotated > plain + 1  # 18.8 and 16.2; 31.1 and 30.0


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_without_statistics_it_is_a_codec_of_images_in_general(kind: str) -> None:
    codec = transform(kind, DIGIT, 32)
    general, images = codec.fitted(None), digits()[1]
    assert all(value.isfinite().all() for value in general.values())
    assert alike(general, codec.fitted(codec.statistics(images[:0])))
    assert general["mean"][0] == 128 * 8 and (general["mean"][1:] == 0).all()  # grey
    assert psnr(images, coded(codec, general, images)) > 27  # 27.3
    photo = photos(16)[1]
    assert psnr(photo, coded(*ready(kind, (3, 16, 16)), photo)) > 22.5  # 23.0
    assert psnr(photo, coded(*ready(kind, (3, 16, 16), 300), photo)) > 32  # 32.7


@pytest.mark.parametrize("kind", TRANSFORMS)
@pytest.mark.parametrize("shape", [DIGIT, (3, 16, 16)])
@pytest.mark.parametrize("greys", [[0], [255], [97], [0] * 5, [255] * 5, [0, 60, 120, 180, 240]])
def test_images_of_one_grey_come_back(shape: Shape, kind: str, greys: list[int]) -> None:
    images = torch.tensor(greys, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, *shape)
    for size in (2, tenth(shape), math.prod(shape)):
        codec, fitted = ready(kind, shape, size, images)
        assert all(value.isfinite().all() for value in (*fitted.values(), codec.numbers(fitted, images)))
        assert (coded(codec, fitted, images).int() - images.int()).abs().max() <= 1


@pytest.mark.parametrize(("kind", "least"), [("klt", 28), ("dct", 20)])
def test_one_image_is_enough_to_fit(kind: str, least: float) -> None:
    for image in digits()[1][:20].split(1):
        codec, fitted = ready(kind, DIGIT, 6, image)
        assert all(value.isfinite().all() for value in fitted.values())
        assert psnr(image, coded(codec, fitted, image)) > least


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_what_is_far_from_all_that_was_fitted_is_still_an_image(kind: str) -> None:
    codec, fitted = ready(kind, DIGIT, 32, digits()[0])
    black, white = (torch.full((1, *DIGIT), value, dtype=torch.uint8) for value in (0, 255))
    assert codec.numbers(fitted, torch.cat([black, white])).isfinite().all()
    assert coded(codec, fitted, black).float().mean() < 50 < 100 < coded(codec, fitted, white).float().mean()


# -- real images -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cifar() -> tuple[Tensor, Tensor]:
    """The training images of ten classes, and a thousand test images of others."""
    if "FCIL_DATA" not in os.environ:
        pytest.skip("FCIL_DATA names no folder of datasets")
    folder = Path(os.environ["FCIL_DATA"]) / "cifar100"
    return read(folder, "train*.parquet", range(10), 5000), read(folder, "test*.parquet", range(10, 100), 1000)


def read(folder: Path, files: str, classes: range, most: int) -> Tensor:
    found: list[np.ndarray] = []
    for file in sorted(folder.glob(files)):
        table = pq.read_table(file, columns=["img", "fine_label"])
        rows = np.flatnonzero(np.isin(table["fine_label"].to_numpy(), classes))[: most - len(found)]
        found += [np.asarray(Image.open(io.BytesIO(x["bytes"]))) for x in table["img"].take(rows).to_pylist()]
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def klt_of_cifar(cifar: tuple[Tensor, Tensor]) -> float:
    return psnr(cifar[1], coded(*ready("klt", CIFAR, 307, cifar[0]), cifar[1]))


@pytest.mark.data
def test_klt_keeps_natural_images_of_other_classes(klt_of_cifar: float) -> None:
    assert klt_of_cifar > 30.5  # 30.95


@pytest.mark.data
def test_numbers_rounded_together_keep_more_of_natural_images(
    cifar: tuple[Tensor, Tensor], klt_of_cifar: float
) -> None:
    together = psnr(cifar[1], coded(*ready("trellis", CIFAR, 307, cifar[0]), cifar[1]))
    assert together > klt_of_cifar + 0.8  # 31.9


@pytest.mark.parametrize("size", [2, 6, 12, 32])
def test_numbers_rounded_together_keep_more_of_digits(size: int) -> None:
    to_fit, images = digits()
    alone, together = (psnr(images, coded(*ready(kind, DIGIT, size, to_fit), images)) for kind in ("klt", "trellis"))
    assert together > alone + (0.05 if size == 2 else 0.25)


@pytest.mark.data
def test_dct_keeps_natural_images_of_other_classes(cifar: tuple[Tensor, Tensor]) -> None:
    to_fit, images = cifar
    assert psnr(images, coded(*ready("dct", CIFAR, 307, to_fit), images)) > 29.5  # 30.47


@pytest.mark.data
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_a_codec_of_images_in_general_keeps_natural_images(kind: str, cifar: tuple[Tensor, Tensor]) -> None:
    assert psnr(cifar[1], coded(*ready(kind, CIFAR, 307), cifar[1])) > 24  # 26.5


@pytest.mark.data
@pytest.mark.skipif(not features.check("webp"), reason="this Pillow has no WebP")
def test_webp_of_as_many_bytes_is_worse_than_klt(cifar: tuple[Tensor, Tensor], klt_of_cifar: float) -> None:
    images, size, quality = cifar[1], 0.0, 60
    while size < 300:  # of which a file's header takes some
        quality += 5
        files = [io.BytesIO() for _ in images]
        for image, file in zip(images, files, strict=True):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "WEBP", quality=quality, method=6)
        size = sum(file.tell() for file in files) / len(files)
    back = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    assert 300 <= size < 330
    assert psnr(images, torch.from_numpy(back).permute(0, 3, 1, 2)) < klt_of_cifar - 0.5  # 30.2 at 307 bytes


# -- the learned code --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [DIGIT, (3, 32, 32), (1, 7, 9)])
@pytest.mark.parametrize("size", [1, 6])
def test_gradients_reach_all_weights_through_the_rounding(shape: Shape, size: int) -> None:
    net = learned(shape, size).net
    images = noise(4, shape).float() / 255
    (net(images) - images).square().mean().backward()
    for name, weight in net.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all() and (weight.grad != 0).any(), name


def test_a_learned_code_is_rounded_while_it_learns_as_when_it_is_kept() -> None:
    codec, images = learned(DIGIT, 12), digits()[1][:50]
    fitted = weights_of(codec.net)
    drawn = codec.net(images.float() / 255)
    kept = coded(codec, fitted, images)
    assert torch.equal((drawn.detach() * 255).round().clamp(0, 255).to(torch.uint8), kept)
    assert not torch.allclose(drawn, codec.net.decode(codec.net.encode(images.float() / 255)))  # rounding shows


def test_some_steps_make_a_learned_code_better() -> None:
    codec = learned(DIGIT, 12)
    to_fit, images = digits()
    before = psnr(images, coded(codec, weights_of(codec.net), images))
    optimizer = torch.optim.SGD(codec.net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in (to_fit[:960].float() / 255).split(32):
        loss = (codec.net(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.75 * sum(losses[:3])
    after = weights_of(codec.net)
    assert codec.encode(after, images).shape == (len(images), 12)
    assert psnr(images, coded(codec, after, images)) > before + 1


def test_learned_numbers_lie_between_minus_1_and_1_and_need_no_gradient() -> None:
    codec, fitted = ready("autoencoder", CIFAR, 307)
    images = photos(32)[1][:9]
    numbers = codec.numbers(fitted, images)
    assert numbers.shape == (9, 614) and numbers.abs().max() <= 1 and not numbers.requires_grad
    drawn = 3 * torch.randn(5, 614, generator=torch.Generator().manual_seed(0))
    assert torch.equal(codec.pictures(fitted, drawn), codec.pictures(fitted, drawn.clamp(-1, 1)))


def test_an_image_whose_side_is_no_multiple_of_4_is_coded_as_if_its_edge_went_on() -> None:
    cut, whole = learned((1, 7, 9), 6), learned((1, 8, 12), 6)
    fitted, images = weights_of(cut.net), noise(3, (1, 7, 9))
    more = images[:, :, [*range(7), 6]][..., [*range(9), 8, 8, 8]]
    codes = cut.encode(fitted, images)
    assert torch.equal(codes, whole.encode(fitted, more))
    assert torch.equal(cut.decode(fitted, codes), whole.decode(fitted, codes)[..., :7, :9])


def test_levels_of_learned_numbers_are_evenly_spaced_and_the_nearest_is_taken() -> None:
    places = torch.arange(2**BITS)
    numbers = Compressor.number(places)
    assert torch.allclose(numbers, torch.linspace(-1, 1, 2**BITS))
    for off in (-0.06, 0.0, 0.06):
        assert torch.equal(Compressor.level(numbers + off).long(), places)


def test_a_codec_codes_with_the_weights_it_is_handed() -> None:
    codec, images = learned(DIGIT, 12), digits()[1][:20]
    first = weights_of(codec.net)
    second = {name: value + 0.1 for name, value in first.items()}
    once = codec.encode(first, images)
    assert not torch.equal(codec.encode(second, images), once)
    assert torch.equal(codec.encode(first, images), once)


# -- gains and WebP ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EACH)
def test_each_image_has_the_gain_with_which_it_loses_least(kind: str) -> None:
    codec = transform(kind, DIGIT, 12)
    fitted, images = codec.fitted(codec.statistics(digits()[0])), digits()[1][:100]
    numbers = codec.numbers(fitted, images)
    codes = codec._packed(fitted, numbers)
    lost = ((codec._unpacked(fitted, codes) - numbers) * fitted["deviation"]).square().sum(1)
    for gain in GAINS:
        fixed = torch.zeros_like(numbers)
        for bits in range(1, 9):
            own, book = fitted["bits"] == bits, gain * levels(bits)
            fixed[:, own] = book[(numbers[:, own, None] - book).abs().argmin(2)]
        assert (lost <= ((fixed - numbers) * fitted["deviation"]).square().sum(1) * (1 + 1e-5)).all()
    assert len((codes[:, 0] & 7).unique()) > 2, "images differ in contrast"


def test_fewer_contrasts_lose_more(monkeypatch: pytest.MonkeyPatch) -> None:
    to_fit, images = digits()
    codec, fitted = ready("klt", DIGIT, 12, to_fit)
    eight = psnr(images, coded(codec, fitted, images))
    monkeypatch.setattr(transforms, "GAINS", (1.0,) * 8)
    assert psnr(images, coded(codec, fitted, images)) < eight - 0.2


@pytest.mark.parametrize(
    ("shape", "size"), [((3, 32, 32), 307), ((3, 32, 32), 64), ((1, 28, 28), 100), ((3, 64, 64), 1228)]
)
def test_webp_files_fit_and_come_back(shape: Shape, size: int) -> None:
    codec, images = build("webp", shape, size), photos(shape[1])[1][:12, : shape[0]]
    codes = codec.encode({}, images)
    assert codes.dtype == torch.uint8 and codes.shape == (12, size)
    assert all(bytes(code[:4].tolist()) == b"RIFF" for code in codes)
    back = codec.decode({}, codes)
    assert back.dtype == torch.uint8 and back.shape == images.shape
    assert psnr(images, back) > psnr(images, images.float().mean((2, 3), keepdim=True).expand_as(images)) + 3
    assert torch.equal(codec.encode({}, images[3:4]), codes[3:4]) and len(codec.decode({}, codes[:0])) == 0


def test_noise_of_which_no_file_fits_is_made_smaller_first() -> None:
    codec, images = build("webp", (3, 32, 32), 64), noise(3, (3, 32, 32))
    assert codec.decode({}, codec.encode({}, images)).shape == images.shape


def test_webp_needs_room_for_its_header() -> None:
    with pytest.raises(UserError, match="code_bytes=63 is not allowed with webp; a file takes at least 64"):
        build("webp", (3, 32, 32), 63)
    with pytest.raises(UserError, match="this codec is for images of 3 channels and 32x32 pixels"):
        build("webp", (3, 32, 32), 307).encode({}, torch.zeros(1, 1, 8, 8, dtype=torch.uint8))


def test_every_codec_is_tested_here() -> None:
    assert set(KINDS) == {*NUMBERED, "webp"}
