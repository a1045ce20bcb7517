"""Replies, averaged while they come in.

Answers are computed when they are first looked at (at the latest when the next question is asked), so that an average
over many clients holds one reply at a time. The order is that of the clients asked: sums are the same to the bit
everywhere.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Generic, TypeVar, get_origin, get_type_hints

import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.federation.aggregation import clipped, ordered
from fcil.federation.privacy import Sums
from fcil.records import Weights, flatten
from fcil.scenario.benchmarks import Protocol

Up = TypeVar("Up")


class Replies(Generic[Up]):
    """The answers to one question. A reply whose `count` is 0 had no images: it is left out of means and sums."""

    def __init__(
        self, kind: type[Up], stream: Iterator[Up], sent: Any, protocol: Protocol, private: Sums | None = None
    ):
        self._kind, self._stream, self._sent, self._protocol, self._private = kind, stream, sent, protocol, private
        self._held: list[Up] | None = None
        self._folded: Folded | None = None
        self._released: dict[str, Weights] = {}  # noise is drawn once, however often a sum is looked at

    def __iter__(self) -> Iterator[Up]:
        """Yield single replies; they are all held in memory from then on."""
        if self._private is not None:
            return map(self._private.single, self._hold())
        return iter(self._hold())

    def __len__(self) -> int:
        """Count the replies that came."""
        return self._folded.replies if self._folded else len(self._hold())

    def mean(self, field: str) -> Any:
        """Average one field over the replies; if nobody answered, what was sent stands."""
        if self._private is not None:
            self._private.averaged(field)
        if self._protocol.aggregate != "mean":
            single = self._of(field)
            return self._rebuilt(field, self._robust(field, single) if single else self._as_sent(field))
        folded = self._fold()
        return self._rebuilt(field, folded.mean(field) if folded.counted else self._as_sent(field))

    def sum(self, field: str) -> Any:
        """Add one field up over the replies; None if nobody answered."""
        found = self._sums(field)
        return self._rebuilt(field, found) if found else None

    def finish(self) -> None:
        """Let every client answer that has not been looked at yet."""
        if self._folded is None:
            self._hold()

    def _hold(self) -> list[Up]:
        if self._held is None:
            if self._folded is not None:
                raise RuntimeError(
                    "these replies were averaged as they came; iterate over them before calling mean or sum"
                )
            self._held = list(self._stream)
        return self._held

    def _fold(self) -> "Folded":
        if self._folded is None:
            if self._protocol.aggregate != "mean":
                self._hold()  # a robust average may be asked for next
            self._folded = Folded(self._protocol.weighting)
            for reply in self._stream if self._held is None else self._held:
                flat = flatten(reply) if self._private is None else self._private.clipped(flatten(reply))
                self._folded.add(flat, getattr(reply, "count", None))
        return self._folded

    def _sums(self, field: str) -> Weights:
        found = self._fold().sum(field)
        if self._private is None or not found:
            return found
        if field not in self._released:
            self._released[field] = self._private.released(field, found, self._fold().counted)
        return {name: tensor.clone() for name, tensor in self._released[field].items()}

    def _robust(self, field: str, single: list[Weights]) -> Weights:
        if self._protocol.aggregate != "clipped":
            return ordered(single, self._protocol)
        was_sent = field in {f.name for f in fields(self._sent)}
        folded, counts = Folded(self._protocol.weighting), [getattr(r, "count", None) for r in self._counted()]
        limited = clipped(single, self._as_sent(field), self._protocol.update_norm) if was_sent else single
        for flat, count in zip(limited, counts, strict=True):
            folded.add(flat, count)
        return folded.mean(field)

    def _of(self, field: str) -> list[Weights]:
        return [{n: t for n, t in flatten(r).items() if _is_of(field, n)} for r in self._counted()]

    def _counted(self) -> list[Up]:
        return [r for r in self._hold() if getattr(r, "count", 1) != 0]

    def _as_sent(self, field: str) -> Weights:
        if field not in {f.name for f in fields(self._sent)}:
            raise UserError(f"no client answered, so there is no mean of {field!r}; ask more clients or lower `lost`")
        value = getattr(self._sent, field)
        return (
            {f"{field}/{k}": v for k, v in value.items()}
            if isinstance(value, dict)
            else {field: torch.as_tensor(value)}
        )

    def _rebuilt(self, field: str, flat: Weights) -> Any:
        kind = get_type_hints(self._kind)[field]
        if get_origin(kind) is dict:
            key = int if kind == dict[int, Tensor] else str
            return {key(name.removeprefix(field + "/")): tensor for name, tensor in flat.items()}
        return flat[field] if kind is Tensor else flat[field].item()


class Folded:
    """Running sums of every tensor of the replies, by flat name."""

    def __init__(self, weighting: str):
        self.by_samples = weighting == "samples"
        self.replies = self.counted = 0  # those that came; those of them with images
        self.sums: Weights = {}
        self.weighted: Weights = {}  # filled only where clients weigh by their samples
        self.first: Weights = {}  # integers are counters: an average of them means nothing
        self.total: dict[str, float] = {}

    def add(self, flat: Weights, count: int | None) -> None:
        """Add one reply."""
        self.replies += 1
        if count == 0:
            return
        self.counted += 1
        weight = float(count) if self.by_samples and count is not None else 1.0
        for name, tensor in flat.items():
            self.total[name] = self.total.get(name, 0.0) + weight
            if not tensor.is_floating_point():
                self.first.setdefault(name, tensor)
        floats = {name: tensor.detach() for name, tensor in flat.items() if tensor.is_floating_point()}
        counts = {n: t.to(torch.int64) for n, t in flat.items() if n not in floats and t.dtype != torch.bool}
        _add(self.sums, floats, 1)
        _add(self.sums, counts, 1)  # small integers would wrap around
        if self.by_samples:
            _add(self.weighted, floats, weight)

    def sum(self, field: str) -> Weights:
        """Return the sum of every tensor of a field."""
        return {name: tensor.clone() for name, tensor in self.sums.items() if _is_of(field, name)}

    def mean(self, field: str) -> Weights:
        """Return the average of every floating tensor of a field, and the first client's value of every other."""
        sums, names = self.weighted if self.by_samples else self.sums, [n for n in self.total if _is_of(field, n)]
        return {n: self.first[n] if n in self.first else sums[n] / self.total[n] for n in names}


def _is_of(field: str, name: str) -> bool:
    return name == field or name.startswith(field + "/")


def _add(sums: Weights, flat: Weights, weight: float) -> None:
    known = [name for name in flat if name in sums]
    if known:
        torch._foreach_add_([sums[n] for n in known], [flat[n] for n in known], alpha=weight)
    for name in [name for name in flat if name not in known]:
        sums[name] = flat[name] * weight if weight != 1 else flat[name].clone()
