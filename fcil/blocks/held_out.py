"""Exemplars of which some are held out, so that a client has images to judge by that it never trained on.

A memory keeps the two kinds apart, and so remembers which is which without a byte more. An image may pass from what is
held out to what is trained on, when fewer are to be held out, but never back: what is held out in a task is part of
what was held out before, or new.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean

import torch
from torch import Tensor

from fcil.records import ByClass
from fcil.scenario.tasks import LocalData
from fcil.seeds import seed_of


def rows_in_order(data: LocalData) -> ByClass:
    """Return which images are of each class, shuffled, but alike in every task in which the client has them."""

    def draw(_: torch.Generator) -> ByClass:
        own, device = {j: (data.labels == j).nonzero()[:, 0] for j in data.classes()}, data.labels.device
        draws = {j: torch.Generator(device).manual_seed(seed_of(data.own_seed, "held out", j)) for j in own}
        return {j: rows[torch.randperm(len(rows), generator=draws[j], device=device)] for j, rows in own.items()}

    return data.cached("in order", draw)


def whole(held_out: ByClass, exemplars: ByClass) -> ByClass:
    """Return lists of both kinds, the held-out ones at the head, class after class."""
    classes = sorted({*held_out, *exemplars})
    return {j: torch.cat([kind[j] for kind in (held_out, exemplars) if j in kind]) for j in classes}


def to_hold_out(held: Mapping[int, int], data: LocalData, keep: Mapping[int, int], share: float) -> dict[int, int]:
    """Say how many images at hand of each class to hold out; `held` is of how many kept ones that is so.

    Of a new class they are as many as of a kept one on average; where nothing is kept yet, as many as will be of the
    `keep` images of a class. If one has stayed from earlier tasks, as many as then, or one: no class had fewer, unless
    that was its only image.
    """
    known: list[float] = [*held.values()] or [share * number for number in keep.values()] or [0]
    each = max(1, round(mean(known)))
    sizes = Counter(data.labels.tolist())
    return {j: min(held.get(j, each if j in data.task.new else 1), n - 1) for j, n in sizes.items()}


def divided(lists: ByClass, held: Mapping[int, int], share: float) -> tuple[ByClass, ByClass]:
    """Return the heads of lists, a share of all in them that stays held out, and the rest, on which to train from now.

    Of a class there are at most as many as were held out so far, `held`; else as many of one class as of another. Where
    that leaves some places over, those classes have them whose first image draws the lowest numbers. It draws the same
    number in every task, so that classes which come later take places over as if all had been drawn anew.
    """
    number = math.ceil(share * sum(len(own) for own in lists.values()) - 1e-9)
    draw = {j: seed_of("held out", *own[0].flatten().tolist()) for j, own in lists.items()}
    places = sorted((place, draw[j], j) for j, own in lists.items() for place in range(min(held[j], len(own))))
    first = Counter(j for *_, j in places[:number])
    held_out = {j: own[: first[j]] for j, own in lists.items() if first[j]}
    return held_out, {j: own[first[j] :] for j, own in lists.items() if first[j] < len(own)}


def balanced(labels: Tensor, new: Tensor, held: Sequence[int]) -> Tensor:
    """Weigh images so that a new class counts as much as an old one on average, of which so many are held out each."""
    counts = torch.bincount(labels, minlength=len(new))[labels]
    return torch.where(new[labels], sum(held) / max(1, len(held)) / counts, 1.0)
