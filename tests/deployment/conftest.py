"""Folders of digits as three nodes would have them."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

NAMES = ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun")
SHARES = {"anna": (0, 1, 2, 3), "berta": (1, 2, 3, 0), "carla": (2, 3, 0, 1)}


def digits_into(folder: Path, classes: tuple[int, ...], first: int, each: int = 12) -> Path:
    """Write some digits as PNG files into class folders."""
    data = load_digits()
    for j in classes:
        (folder / NAMES[j]).mkdir(parents=True, exist_ok=True)
        for i in np.flatnonzero(data.target == j)[first : first + each]:
            pixels = np.round(data.images[i] * (255 / 16)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / NAMES[j] / f"{i}.png")
    return folder


def digits_of_three(folder: Path) -> list[Path]:
    """Give three nodes their own images of four digits."""
    return [digits_into(folder / name, have, 12 * n) for n, (name, have) in enumerate(sorted(SHARES.items()))]


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Three nodes with their own images of four digits."""
    return digits_of_three(tmp_path / "data")
