"""What a run keeps and carries, in numbers and in bytes.

The paper counts numbers: an exemplar of 307 numbers against an image of 3,072. What a device stores are bytes, and a
number takes one of them (a code of ours, a pixel) or four (a float).
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from torch import Tensor

from fcil.records import ByClass, flatten

LABEL_BYTES = 8  # of the whole number under which a client keeps the exemplars of a class
DECODING = ("weights: decoder", "codec", "codebooks", "autoencoder", "generator")  # parts that turn codes into images


class Weight(NamedTuple):
    """How many numbers something has, and how many bytes they take."""

    numbers: int
    bytes: int

    def plus(self, tensor: Tensor) -> "Weight":
        """Add a tensor."""
        return Weight(self.numbers + tensor.numel(), self.bytes + tensor.numel() * tensor.element_size())


NOTHING = Weight(0, 0)


def exemplars_of(memory: Any) -> ByClass:
    """Return the exemplars of a memory, by class: its first field that has rows of each class."""
    for value in (getattr(memory, part.name) for part in fields(memory)):
        if isinstance(value, dict) and all(isinstance(j, int) and rows.ndim for j, rows in value.items()):
            return value
    return {}


def weighed(rec: Any) -> dict[str, Weight]:
    """Weigh the fields of a record; of weights, a decoder apart."""
    found: dict[str, Weight] = {}
    for name, tensor in flatten(rec).items():
        field, _, inner = name.partition("/")
        part = f"{field}: decoder" if inner.startswith("decoder.") else field
        found[part] = found.get(part, NOTHING).plus(tensor)
    return found


def memory_report(memories: Mapping[int, Any], broadcast: Any, classes: int, clients: int) -> dict[str, Any]:
    """Say what clients keep, one by one and all together, and what the broadcast brings each of them."""
    count, numbers, by_client, parts = 0, 0, [], dict[str, Weight]()
    for memory in memories.values():
        kept, own = exemplars_of(memory), weighed(memory)
        count += sum(map(len, kept.values()))
        numbers += sum(tensor.numel() for tensor in kept.values())
        by_client.append(sum(weight.bytes for weight in own.values()))
        own["labels"] = Weight(len(kept), LABEL_BYTES * len(kept))  # the keys of dictionaries, beside the budget
        parts |= {name: _sum([parts.get(name, NOTHING), weight]) for name, weight in own.items()}
    carried = weighed(broadcast)
    return {
        "exemplars": count,
        "exemplars_per_class": round(count / classes, 3) if classes else 0,
        "numbers_per_exemplar": round(numbers / count, 2) if count else 0,
        "client_bytes": {"most": max(by_client, default=0), "mean": round(sum(by_client) / max(1, clients), 1)},
        "federation": {name: weight._asdict() for name, weight in parts.items()},
        "broadcast": {name: weight._asdict() for name, weight in carried.items()},
        "decoder": _sum([weight for name, weight in carried.items() if name in DECODING])._asdict(),
    }


def _sum(weights: list[Weight]) -> Weight:
    return Weight(sum(w.numbers for w in weights), sum(w.bytes for w in weights))
