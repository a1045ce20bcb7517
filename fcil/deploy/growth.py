"""Room for more classes: a server's state, laid into that of a fresh server with larger heads and tables.

Classes have their rows at the front of every table, so the old numbers keep their places, and what lies beyond them is
what the fresh server begins with: nothing that was learned changes.
"""

from typing import TypeVar

import torch
from torch import Tensor

from fcil.records import Weights, flatten, unflatten

T = TypeVar("T")


def grown(state: T, fresh: T) -> T:
    """Return `state` with the shapes of `fresh`."""
    old, new = flatten(state), flatten(fresh)
    by_part: Weights = {}  # of a network that is there twice, as a teacher is, one may be missing in the fresh state
    for name, tensor in new.items():
        if "/" in name:
            by_part.setdefault(name.partition("/")[2], tensor)
    wide = {name: _laid_into(tensor, new.get(name, by_part.get(_part(name)))) for name, tensor in old.items()}
    return unflatten(type(state), wide)


def _part(name: str) -> str:
    part = name.partition("/")[2]
    return "" if part.isdigit() else part


def _laid_into(old: Tensor, fresh: Tensor | None) -> Tensor:
    if fresh is None or fresh.ndim != old.ndim or old.ndim == 0 or old.shape == fresh.shape:
        return old
    shape = [max(sizes) for sizes in zip(old.shape, fresh.shape, strict=True)]
    made = torch.zeros(shape, dtype=old.dtype, device=old.device)
    made[tuple(slice(n) for n in fresh.shape)] = fresh.to(old)
    made[tuple(slice(n) for n in old.shape)] = old
    return made
