"""Exemplars: which images, and how many of which class fit into a memory of so many bytes."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fcil.records import ByClass
from fcil.scenario.tasks import LocalData


def shuffled_rows(data: LocalData) -> ByClass:
    """Return which images are of each class, in random order, the same whenever it is asked for in a task."""

    def draw(generator: torch.Generator) -> ByClass:
        own = {j: (data.labels == j).nonzero()[:, 0] for j in data.classes()}
        return {j: rows[torch.randperm(len(rows), generator=generator, device=rows.device)] for j, rows in own.items()}

    return data.cached("shuffled", draw)


def shuffled(data: LocalData) -> ByClass:
    """Return the images of each class in that order."""
    return {j: data.images[rows] for j, rows in shuffled_rows(data).items()}


def labels_of(rows: ByClass) -> Tensor:
    """Return a label for each row, class after class."""
    return torch.tensor([j for j, own in rows.items() for _ in own], dtype=torch.int64)


def shares(held: Mapping[int, int], room: int, unit: int, each: int, generator: torch.Generator) -> dict[int, int]:
    """Share `room` bytes fairly: as many exemplars of one class as of another, as far as a class has any.

    This is iCaRL's rule of a fixed memory, with what small classes leave over given to the others. An exemplar takes
    `unit` bytes, a class with at least one `each` bytes more. What is left below one more for every class goes to
    classes drawn at random.
    """

    def cost(level: int) -> int:
        return sum(unit * min(n, level) + each * (min(n, level) > 0) for n in held.values())

    level = 0
    while level < max(held.values(), default=0) and cost(level + 1) <= room:
        level += 1
    kept = {j: min(n, level) for j, n in held.items()}
    left = room - cost(level)
    hungry = [j for j, n in held.items() if n > level]
    for i in torch.randperm(len(hungry), generator=generator, device=generator.device).tolist():
        price = unit + (0 if level else each)
        if price <= left:
            kept[hungry[i]] += 1
            left -= price
    return kept
