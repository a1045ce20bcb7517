"""Replay of feature maps: which of their codes a client keeps, and how the maps are varied before they are learned.

Hayes et al., "REMIND Your Neural Network to Prevent Catastrophic Forgetting", ECCV 2020.
"""

import math
from collections.abc import Callable
from dataclasses import field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.exemplars import labels_of, room_for_one, shares, sources
from fcil.blocks.inversion import inverted
from fcil.blocks.losses import masked
from fcil.errors import UserError
from fcil.records import ByClass, record
from fcil.scenario.tasks import LocalData, Task

STREAM_REPLAYS = 50  # beside a single new image, as in the paper
PLACE_BYTES = 4  # of what a client notes of a stream
RATIOS = (3 / 4, 4 / 3)  # of a crop's sides
TRIES = 16  # pairs of draws of which the first good one counts


@record
class Memory:
    """Codes by class, and how many images of a stream have been learned from."""

    codes: ByClass = field(default_factory=dict)
    place: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))


def room_for(unit: int, streams: bool, room: int) -> None:
    """Refuse a memory of `room` bytes in which there is no place for a code of `unit`, or for that of a stream."""
    room_for_one(unit + PLACE_BYTES * streams, room, "more channels to a part")
    if room < PLACE_BYTES * streams:
        raise UserError(f"single_pass notes {PLACE_BYTES} bytes of a client's stream; set a larger memory")


def due(memory: Memory, data: LocalData, streams: bool, round: int, rounds: int) -> Tensor:
    """Return which images to learn from: all, or of a stream those that came since its client last learned.

    The images of a stream come evenly over the rounds, in random order.
    """
    if not streams:
        return torch.arange(len(data.labels), device=data.labels.device)
    stream = data.cached("stream", lambda draws: torch.randperm(len(data.labels), generator=draws, device=draws.device))
    return stream[int(memory.place.sum()) : len(stream) * (round + 1) // rounds]


def portions(streams: bool, new: int, old: int, replay: int, task: Task, batch_size: int) -> tuple[int, int, int]:
    """Return how many new images a step has, how many steps there are (0: the protocol's), and how many are replayed.

    As in the paper, which draws from all it has seen, an old class comes as often as a new one, unless `replay` says
    how many. In a stream each new image has a step to itself; while nothing can be replayed, all have one together.
    """
    if not streams:
        return 0, 0, replay or round(batch_size * min(STREAM_REPLAYS, len(task.old) / len(task.new)))
    size, steps = (1, new) if old else (max(2, new), 1)
    return size, steps, replay or STREAM_REPLAYS


def keep(memory: Memory, data: LocalData, codes: Tensor, rows: Tensor, streams: bool, room: int, ends: bool) -> None:
    """Add the codes of these images to a memory of `room` bytes; while a stream has not ended, note its place."""
    place = int(memory.place.sum()) + len(rows)
    memory.codes = kept(memory.codes, codes[rows], data.labels[rows], room - PLACE_BYTES * streams, data.generator)
    memory.place = torch.tensor([] if ends else [place], dtype=torch.int32, device=codes.device)


def kept(codes: ByClass, new: Tensor, labels: Tensor, room: int, generator: torch.Generator) -> ByClass:
    """Add codes to those kept, and drop codes drawn from whichever class has most until all fit into `room` bytes.

    That leaves to each class the same number, as far as it has so many. A code that is there already is not added.
    """
    of = {j: new[labels == j] for j in sorted(set(labels.tolist()))}
    held = {j: _distinct([part[j] for part in (codes, of) if j in part]) for j in sorted(codes | of)}
    numbers = shares({j: len(own) for j, own in held.items()}, room, new.shape[1], 0, generator)
    drawn = {j: torch.randperm(len(own), generator=generator, device=own.device) for j, own in held.items()}
    return {j: own[drawn[j][: numbers[j]]] for j, own in held.items() if numbers[j]}


def _distinct(parts: list[Tensor]) -> Tensor:
    found: Tensor = torch.unique(torch.cat(parts), dim=0)
    return found


def recalled(codes: ByClass, data: LocalData) -> tuple[Tensor, Tensor]:
    """Return all codes that are kept, and their labels."""
    none = data.labels.new_zeros(0, 0, dtype=torch.uint8)
    return torch.cat(list(codes.values()) or [none]), labels_of(codes).to(data.labels)


def cropped(maps: Tensor, least: float, generator: torch.Generator) -> Tensor:
    """Cut a piece out of each map, at least `least` of its area, and stretch it to the whole, bilinearly."""
    count, _, rows, columns = maps.shape
    u = torch.rand(4, count, generator=generator, device=maps.device)
    area = least + (1 - least) * u[0]
    ratio = (math.log(RATIOS[0]) + math.log(RATIOS[1] / RATIOS[0]) * u[1]).exp()
    ratio = torch.minimum(torch.maximum(ratio, area), 1 / area)  # or it would not fit in
    width, height = ((area * r).sqrt().clamp_max(1.0) for r in (ratio, 1 / ratio))
    across, down = (
        (2 * where - 1)[:, None] * (1 - size)[:, None] + size[:, None] * _places(number, u)
        for where, size, number in ((u[2], width, columns), (u[3], height, rows))
    )
    grid = torch.stack([across[:, None].expand(-1, rows, -1), down[:, :, None].expand(-1, -1, columns)], 3)
    return F.grid_sample(maps.to(u), grid, padding_mode="border", align_corners=False)


def _places(number: int, like: Tensor) -> Tensor:
    """Return the middles of so many pixels side by side, from -1 to 1."""
    return (2 * torch.arange(number, device=like.device).to(like) + 1) / number - 1


def beta(alpha: float, generator: torch.Generator) -> Tensor:
    """Draw a share from Beta(alpha, alpha), 0 < alpha <= 1, with no branch on values.

    Jöhnk's way: u^(1/alpha) / (u^(1/alpha) + v^(1/alpha)) of the first of several pairs for which that sum is at most
    1. For alpha = 0.1, 99 of 100 pairs are good.
    """
    draws = torch.rand(TRIES, 2, generator=generator, device=generator.device, dtype=torch.float64) ** (1 / alpha)
    sums = draws.sum(1)
    first = (sums <= 1).to(torch.int8).argmax()
    return (draws[:, 0] / sums.clamp_min(1e-300)).gather(0, first[None])[0]


def replay_loss(
    upper: Callable[[Tensor], Tensor], maps: Tensor, labels: Tensor, new: int, classes: Tensor, alpha: float,
    least: float, generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Mean cross-entropy of maps, all of them cropped; those after the first `new` are mixed by twos.

    The first half of those is mixed with the second, all by the same share, and so are their losses.
    """
    half = (len(maps) - new) // 2
    maps = cropped(maps, least, generator) if least else maps
    share = beta(alpha, generator).to(maps) if alpha and half else torch.ones_like(maps[0, 0, 0, 0])
    one, other = slice(new, new + half), slice(new + half, new + 2 * half)
    said = upper(torch.cat([maps[:new], share * maps[one] + (1 - share) * maps[other]]))
    weight = torch.cat([torch.ones_like(said[:new, 0]), share.to(said).expand(half)])
    right, wrong = (torch.cat([labels[:new], labels[which]]) for which in (one, other))
    return mixed_cross_entropy(said, right, wrong, weight, classes)


def mixed_cross_entropy(logits: Tensor, labels: Tensor, others: Tensor, share: Tensor, classes: Tensor) -> Tensor:
    """Mean cross-entropy over `classes`, of `labels` by `share` of each row and of `others` by the rest."""
    said = masked(logits, classes).log_softmax(1)
    own, other = (said.gather(1, which[:, None])[:, 0] for which in (labels, others))
    return -(share * own + (1 - share) * other).mean()


def looked_up(
    memory: Memory, data: LocalData, codes: Tensor, lower: nn.Sequential, shape: tuple[int, int, int],
    maps: Callable[[Tensor], Tensor],
) -> tuple[ByClass, ByClass]:  # fmt: skip
    """Return by class the images that codes in memory came from, and images that have the maps which codes give back.

    `codes` are those of all of the client's images; images are found as nearly as a search through `lower` finds them.
    """
    held = {j: memory.codes[j] for j in data.classes() if j in memory.codes}
    if not held:
        return {}, {}
    rows = {j: (data.labels == j).nonzero()[:, 0] for j in held}
    real = {j: data.images[rows[j][sources(own, codes[rows[j]])]] for j, own in held.items()}
    wanted, normalise = maps(torch.cat(list(held.values()))), lower[0]
    found = inverted(lower, wanted, normalise, shape)  # type: ignore[arg-type]
    return real, dict(zip(held, torch.split(found, [len(own) for own in held.values()]), strict=True))
