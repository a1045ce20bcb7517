"""Exemplars: which images, how many of which class fit into a memory of so many bytes, and how they are given back.

They may pass a codec. Then new images pass it, too, or the network would learn what was decoded in place of what is
shown.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.codec import Codec
from fcil.blocks.losses import squared_error
from fcil.blocks.training import by_class
from fcil.errors import UserError
from fcil.records import ByClass, Weights
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


def new_images(data: LocalData) -> ByClass:
    """Return the images of each class that comes with the task; one that stayed behind has others at hand, too."""
    return {j: data.of(j) for j in data.classes() if j in data.task.new}


def labels_of(rows: ByClass) -> Tensor:
    """Return a label for each row, class after class."""
    return torch.tensor([j for j, own in rows.items() for _ in range(len(own))], dtype=torch.int64)


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


def room_for_one(size: int, room: int, knob: str) -> None:
    """Refuse a memory that is there but holds not a single exemplar of `size` bytes; none at all is an experiment."""
    if 0 < room < size:
        raise UserError(f"a client may keep {room} bytes and an exemplar takes {size}; set a larger memory, or {knob}")


def holdings(kept: ByClass, data: LocalData) -> dict[int, int]:
    """Count what could be kept of each class: its images if it is at hand, for these are taken anew; else what is."""
    held = {j: len(codes) for j, codes in kept.items()} | {j: len(data.of(j)) for j in data.classes()}
    return {j: held[j] for j in sorted(held)}


def quotas(codec: Codec, kept: ByClass, data: LocalData, room: int) -> dict[int, int]:
    """Say how many exemplars of each class, kept or at hand, to keep from now on."""
    some = shares(holdings(kept, data), room, codec.size, 0, data.generator)
    return {j: number for j, number in some.items() if number}


def herded(features: ByClass, numbers: Mapping[int, int]) -> ByClass:
    """Return which rows of each class come first, so many: those that keep the mean of the chosen near the class's.

    Features are brought to length 1 first, and no row is chosen twice (Rebuffi et al., CVPR 2017, Algorithm 4). The
    classes take their steps together: a GPU would spend its time on starting.
    """
    wanted = {j: min(numbers.get(j, 0), len(rows)) for j, rows in features.items()}
    classes = [j for j in features if wanted[j]]
    if not classes:
        return {}
    longest = max(len(features[j]) for j in classes)
    unit = torch.stack([F.pad(F.normalize(features[j]), (0, 0, 0, longest - len(features[j]))) for j in classes])
    sizes = torch.tensor([len(features[j]) for j in classes], device=unit.device)
    free = torch.arange(longest, device=unit.device) < sizes[:, None]
    middle, chosen, order = unit.sum(1) / sizes[:, None], torch.zeros_like(unit[:, 0]), []
    for step in range(1, max(wanted.values()) + 1):
        off = (middle[:, None] - (chosen[:, None] + unit) / step).square().sum(2)
        best = off.masked_fill(~free, torch.inf).argmin(1)
        order.append(best)
        chosen = chosen + unit[torch.arange(len(classes), device=unit.device), best]
        free = free.scatter(1, best[:, None], False)
    rows = torch.stack(order, 1)
    return {j: rows[i, : wanted[j]] for i, j in enumerate(classes)}


def coded(codec: Codec, fitted: Weights, data: LocalData) -> Tensor:
    """Return the codes of the task's images, in their order."""
    return data.cached("coded", lambda _: codec.encode(fitted, data.images))


def passed(codec: Codec, fitted: Weights, data: LocalData) -> Tensor:
    """Return the task's images as the codec gives them back."""
    return data.cached("passed", lambda _: codec.decode(fitted, coded(codec, fitted, data)))


def recalled(codec: Codec, fitted: Weights, kept: ByClass) -> ByClass:
    """Return kept exemplars as images, class after class."""
    return by_class(partial(codec.decode, fitted), {j: kept[j] for j in sorted(kept)})


def updated(
    codec: Codec, fitted: Weights, kept: ByClass, data: LocalData, chosen: ByClass, keep: Mapping[int, int]
) -> ByClass:
    """Return what to keep from now on: `chosen` rows of images at hand, best first, and the heads of older lists."""
    every = coded(codec, fitted, data)
    new = {j: every[rows] for j, rows in chosen.items()}
    return {j: (kept | new)[j][:number].clone() for j, number in keep.items() if j in kept or j in new}


def replayed(codec: Codec, fitted: Weights, kept: ByClass, data: LocalData) -> tuple[Tensor, Tensor]:
    """Return kept exemplars as images, with labels."""
    replay = recalled(codec, fitted, kept)
    return torch.cat([data.images[:0], *replay.values()]), labels_of(replay).to(data.labels)


def with_replay(
    codec: Codec, fitted: Weights, kept: ByClass, data: LocalData, rows: ByClass | None = None
) -> tuple[Tensor, Tensor]:
    """Return the task's images, and after them the exemplars of classes that are not among theirs, with labels.

    With `rows` they are only these of the task's images, class after class.
    """
    at_hand, images, labels = data.classes(), passed(codec, fitted, data), data.labels
    if rows is not None:
        images, labels = images[torch.cat([labels[:0], *rows.values()])], labels_of(rows).to(labels)
    replay = replayed(codec, fitted, {j: codes for j, codes in kept.items() if j not in at_hand}, data)
    return torch.cat([images, replay[0]]), torch.cat([labels, replay[1]])


def rehearsed(
    codec: Codec, fitted: Weights, kept: ByClass, data: LocalData, features: Callable[[Tensor], Tensor], room: int
) -> ByClass:
    """Return what to keep from now on in `room` bytes: of classes at hand the best by herding on `features`."""
    images, keep = passed(codec, fitted, data), quotas(codec, kept, data, room)
    found = by_class(features, {j: images[data.labels == j] for j in data.classes()})
    rows = {j: (data.labels == j).nonzero()[:, 0][own] for j, own in herded(found, keep).items()}
    return updated(codec, fitted, kept, data, rows, keep)


def paired(codec: Codec, fitted: Weights, kept: ByClass, data: LocalData) -> tuple[ByClass, ByClass]:
    """Return of each class at hand the images that its exemplars came from, and these as images, row by row.

    The source of an exemplar is the image with its code, or with the one that differs from it in the fewest bytes.
    """
    codes, held = coded(codec, fitted, data).flatten(1), {j: kept[j] for j in data.classes() if j in kept}
    rows = {j: (data.labels == j).nonzero()[:, 0] for j in held}
    found = {j: rows[j][sources(own.flatten(1), codes[rows[j]])] for j, own in held.items()}
    return {j: data.images[own] for j, own in found.items()}, recalled(codec, fitted, held)


def sources(codes: Tensor, among: Tensor) -> Tensor:
    """Return which row of `among` each code is, or is most like."""
    return torch.stack([(among != code).sum(1).argmin() for code in codes])


def pictured(
    codec: Codec, fitted: Weights, kept: ByClass, data: LocalData, classes: Sequence[int]
) -> tuple[ByClass, ByClass]:
    """Return of each class the image at hand that an exemplar came from, or is most like, and the exemplar itself."""
    first = recalled(codec, fitted, {j: kept[j][:1] for j in classes if j in kept})
    exemplars = {j: own[0] for j, own in first.items()}
    at_hand = {j: data.of(j) for j in classes if j in data.classes()}
    off = {j: squared_error(own.float(), exemplars.get(j, own[0]).float()) for j, own in at_hand.items()}
    return {j: own[off[j].argmin()] for j, own in at_hand.items()}, exemplars
