"""Pictures of training images that a finished run leaves: in memories, in messages, and made up from the broadcast.

A method says what they are (`Client.exposed`, `overheard`, `invented`); here they are gathered over clients and tasks.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcil.analysis.memory import exemplars_of
from fcil.analysis.privacy import nearest
from fcil.blocks.codec import TransformCodec
from fcil.errors import UserError
from fcil.federation.calls import Call
from fcil.federation.engine import seeded_data, threads
from fcil.method import Exposed
from fcil.parts import Parts
from fcil.scenario.tasks import LocalData, Task
from fcil.seeds import seed_of

MOST_MESSAGES = 50  # messages that are opened: to search for an image takes a while


class Pairs(NamedTuple):
    """Pictures, and of each the image that it came from: where several went into it, the one that it is most like."""

    pictures: Tensor
    sources: Tensor
    labels: Tensor
    sizes: Tensor  # how many images went into each

    def where(self, chosen: Tensor) -> "Pairs":
        """Return some of them."""
        return Pairs(*(part[chosen] for part in self))


def kept(parts: Parts, message: Any, most: int, device: str) -> Pairs:
    """Return about `most` exemplars beside the images that they came from, of clients and classes drawn at random.

    `device` is where the run was made.
    """
    client, memories = parts.engine.client, parts.transport.memories
    found: list[Exposed] = []
    for task, some in zip(parts.scenario.tasks, _chosen(parts, most), strict=True):
        parts.scenario.begin(task)
        for c, classes in some.items():
            memory, data = _restricted(memories[c], classes), _data(parts, c, task)
            with threads(1):  # as whatever a client computes
                found.append(client.exposed(memory, data, message))  # type: ignore[attr-defined]
    if any(one.drawn for one in found) and torch.device(device).type != parts.engine.device.type:
        raise UserError(f"the run was made on {device}, and which images its clients drew is found out there alone")
    rows = [(one.rebuilt[j], one.real[j], j, 1) for one in found for j in one.rebuilt]
    return _paired(parts, rows).where(torch.arange(min(most, sum(len(row[0]) for row in rows))))


def _chosen(parts: Parts, most: int) -> list[dict[int, list[int]]]:
    """Draw what to look at: for each task clients, and classes that they hold then for the last time."""
    memories, cells = parts.transport.memories, dict[tuple[int, int], int]()
    chosen: list[dict[int, list[int]]] = [{} for _ in parts.scenario.tasks]
    if not hasattr(parts.engine.client, "exposed"):
        return chosen
    for task in parts.scenario.tasks:
        held = parts.scenario.share(task)
        cells |= {(c, j): task.index for c, memory in memories.items() for j in exemplars_of(memory) if held[c, j]}
    order, number = torch.Generator().manual_seed(seed_of("kept")), 0
    for i in torch.randperm(len(cells), generator=order).tolist():
        (c, j), t = list(cells.items())[i]
        if number < most:
            chosen[t].setdefault(c, []).append(j)
            number += len(exemplars_of(memories[c])[j])
    return chosen


def sent(parts: Parts, message: Any) -> dict[str, Pairs]:
    """Open messages: those of the last task, and the sums of the first one's images that a codec was fitted with."""
    found = {"messages": list(_overheard(parts, message)), "sums for the codec": list(_summed(parts))}
    return {name: _paired(parts, rows) for name, rows in found.items() if rows}


Row = tuple[Tensor, Tensor, int, int]  # pictures, their sources, the class, how many images went into each


def _overheard(parts: Parts, message: Any) -> Iterator[Row]:
    client, last, number = parts.engine.client, parts.scenario.tasks[-1], 0
    parts.scenario.begin(last)
    for c in parts.scenario.present(last) if hasattr(client, "overheard") else ():
        data = _data(parts, c, last)
        if number < MOST_MESSAGES and len(data.labels):
            memory = parts.transport.memories.get(c) or parts.method.memory()
            with threads(1):
                one: Exposed = client.overheard(memory, data, message)  # type: ignore[attr-defined]
            for j in one.rebuilt.keys() & one.real.keys():
                yield one.rebuilt[j], _most_like(one.rebuilt[j], one.real[j]), j, len(one.real[j])
                number += 1


def _summed(parts: Parts) -> Iterator[Row]:
    codec, first = getattr(parts.engine.client, "codec", None), parts.scenario.tasks[0]
    if not isinstance(codec, TransformCodec):
        return
    parts.scenario.begin(first)
    for c in parts.scenario.present(first)[:MOST_MESSAGES]:
        data = parts.scenario.local(c, first)
        if len(data.labels):
            picture = codec.middle(codec.statistics(data.images))[None]
            row = int(nearest(picture, data.images).row)
            yield picture, data.images[row : row + 1], int(data.labels[row]), len(data.labels)


def made(parts: Parts, message: Any, most: int) -> Tensor:
    """Return images made up from the broadcast alone, or those that the server has made: uint8.

    What a server shows because it rebuilt messages is not made up; `sent` has it.
    """
    client, generator = parts.engine.client, parts.engine.slots[0].generator
    generator.manual_seed(seed_of("made"))
    if hasattr(client, "invented"):
        pictures: Tensor = client.invented(message, most, generator)
        return pictures[:most]
    shown = [] if hasattr(client, "overheard") else list(getattr(parts.server, "look", dict)().values())
    nothing = torch.zeros(0, *parts.scenario.shape, dtype=torch.uint8)
    return torch.cat([nothing, *(picture[None].cpu() for picture in shown)]).to(parts.engine.device)[:most]


def _paired(parts: Parts, rows: list[Row]) -> Pairs:
    device, none = parts.engine.device, torch.zeros(0, *parts.scenario.shape, dtype=torch.uint8)
    pictures, sources = (torch.cat([none.to(device), *(row[i].to(device) for row in rows)]) for i in (0, 1))  # type: ignore[union-attr]
    counts = torch.tensor([len(row[0]) for row in rows], dtype=torch.int64)
    labels, sizes = (
        torch.tensor([row[i] for row in rows], dtype=torch.int64).repeat_interleave(counts) for i in (2, 3)
    )
    return Pairs(pictures, sources, labels.to(device), sizes.to(device))


def _most_like(pictures: Tensor, images: Tensor) -> Tensor:
    return images[nearest(pictures, images).row]


def _data(parts: Parts, client: int, task: Task) -> LocalData:
    """Return what a client held in a task, with the draws it had then."""
    call = Call(parts.door.seed, task.index, 0, 0, 1, task.new)
    return seeded_data(parts.scenario.local(client, task), parts.engine.slots[0].generator, client, call)


def _restricted(memory: Any, classes: list[int]) -> Any:
    """Return a memory with some classes alone."""
    values = {part.name: getattr(memory, part.name) for part in fields(memory)}
    some = {n: {j: v[j] for j in classes if j in v} if isinstance(v, dict) else v for n, v in values.items()}
    return type(memory)(**some)
