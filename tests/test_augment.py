"""Augmentation: every output is a crop of the reflected input, mirrored or not, and nothing else."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.augment import augmented, mirrored, shifted


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int = 40, channels: int = 3, side: int = 8, width: int | None = None) -> Tensor:
    return torch.rand(count, channels, side, width or side, generator=generator(9))


def crops(image: Tensor, margin: int) -> list[Tensor]:
    """Every window of the reflect-padded image."""
    _, height, width = image.shape
    padded = F.pad(image[None], (margin,) * 4, mode="reflect")[0]
    places = product(range(2 * margin + 1), repeat=2)
    return [padded[:, y : y + height, x : x + width] for y, x in places]


def found_at(image: Tensor, windows: list[Tensor]) -> set[int]:
    return {k for k, window in enumerate(windows) if torch.equal(image, window)}


@pytest.mark.parametrize(("side", "width"), [(8, 8), (8, 12)])
def test_a_shift_is_a_crop_of_the_reflected_image(side: int, width: int) -> None:
    images = pictures(side=side, width=width)
    places = [
        found_at(out, crops(image, 2)) for image, out in zip(images, shifted(images, 2, generator()), strict=True)
    ]
    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) > 12  # of the 25, and not the same for all


def test_every_shift_comes_about_equally_often() -> None:
    image = pictures(1, 1)
    outs = shifted(image.expand(5000, -1, -1, -1), 1, generator())
    windows = crops(image[0], 1)
    counts = torch.tensor([(outs == window).flatten(1).all(1).sum() for window in windows])
    assert counts.sum() == 5000 and counts.min() > 450 and counts.max() < 670


def test_half_of_the_images_are_mirrored_whole() -> None:
    images = pictures(400)
    outs = mirrored(images, generator())
    flipped = torch.tensor([torch.equal(out, image.flip(2)) for image, out in zip(images, outs, strict=True)])
    kept = torch.tensor([torch.equal(out, image) for image, out in zip(images, outs, strict=True)])
    assert (flipped ^ kept).all() and 160 < flipped.sum() < 240


@pytest.mark.parametrize("side", [8, 16])
def test_crop_and_flip_go_together(side: int) -> None:
    images, margin = pictures(12, side=side), side // 8
    outs = augmented(images, "crop-flip", generator())
    for image, out in zip(images, outs, strict=True):
        windows = crops(image, margin)
        assert found_at(out, windows) or found_at(out.flip(2), windows)


def test_crop_alone_never_mirrors() -> None:
    images = pictures()
    outs = augmented(images, "crop", generator())
    assert all(found_at(out, crops(image, 1)) for image, out in zip(images, outs, strict=True))


def test_none_is_the_image_itself_and_draws_nothing() -> None:
    images, drawing = pictures(), generator()
    before = drawing.get_state()
    assert augmented(images, "none", drawing) is images and torch.equal(before, drawing.get_state())


@pytest.mark.parametrize("how", ["crop", "crop-flip"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 3])
def test_shape_and_dtype_stay_and_the_input_is_not_touched(how: str, dtype: torch.dtype, channels: int) -> None:
    images = pictures(5, channels).to(dtype)
    copy = images.clone()
    outs = augmented(images, how, generator())
    assert outs.shape == images.shape and outs.dtype == dtype and torch.equal(images, copy)


def test_the_generator_decides() -> None:
    images = pictures()
    one, again, other = (augmented(images, "crop-flip", generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)
    before = torch.get_rng_state()
    augmented(images, "crop-flip", generator())
    assert torch.equal(before, torch.get_rng_state())


def test_images_too_small_to_shift_are_only_mirrored() -> None:
    images = pictures(side=4)
    assert torch.equal(augmented(images, "crop", generator()), images)
