"""Images made up from a name such as `synthetic-200x2000`: 200 classes of 2,000 training images, nothing to download.

A class is a pattern of four by four grey levels, drawn once, and each of its images that pattern with noise. They are
whole numbers drawn class by class, so they are the same everywhere, and a class does not depend on how many others
there are.
"""

import re

import numpy as np
from numpy.typing import NDArray

from fcil.errors import UserError
from fcil.seeds import seed_of

CLASSES, TRAIN, TEST = 200, 2000, 10  # of plain `synthetic`; test images a class are always so many
SIDE, GRID, NOISE = 8, 4, 48
MOST_BYTES = 2**32

Pixels = NDArray[np.uint8]


def size(name: str) -> tuple[int, int] | None:
    """Return the classes and the training images a class that a name asks for; None if it is not a name of these."""
    if not re.match("synthetic(-|$)", name):
        return None
    found = re.fullmatch(r"synthetic-([1-9]\d{0,9})x([1-9]\d{0,9})", name)
    if found is None and name != "synthetic":
        raise UserError(
            f"dataset={name} is not allowed; write synthetic-CLASSESxIMAGES with whole numbers from 1, such as "
            f"synthetic-{CLASSES}x{TRAIN}: {CLASSES} classes of {TRAIN:,} training images"
        )
    return (int(found[1]), int(found[2])) if found else (CLASSES, TRAIN)


def images(name: str, classes: int, train: int, side: int = 0) -> tuple[Pixels, Pixels]:
    """Make the training and the test images, (classes, images of each, 1, side, side)."""
    side = side or SIDE
    if (weight := classes * (train + TEST) * side**2) > MOST_BYTES:
        raise UserError(
            f"{name} at {side}x{side} pixels would take {weight / 2**30:,.1f} GiB; at most {MOST_BYTES // 2**30} are "
            "allowed, so ask for fewer or smaller images"
        )
    halves = [np.empty((classes, count, 1, side, side), np.uint8) for count in (train, TEST)]
    place = np.arange(side) * GRID // side
    for j in range(classes):
        levels = _draws(j, "pattern").integers(NOISE, 256 - NOISE, (GRID, GRID), np.int16)
        pattern = levels[np.ix_(place, place)]
        for half, which in zip(halves, ("train", "test"), strict=True):
            half[j, :, 0] = pattern + _draws(j, which).integers(-NOISE, NOISE + 1, half[j, :, 0].shape, np.int16)
    return halves[0], halves[1]


def _draws(label: int, what: str) -> np.random.Generator:
    return np.random.default_rng(seed_of("synthetic", label, what))
