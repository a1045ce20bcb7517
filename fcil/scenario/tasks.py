"""Tasks, and what one client holds of the current one.

Classes are numbered in the order in which they appear: task 0 brings slots 0..k-1, task 1 the next, and so on.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from fcil.seeds import seed_of

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """What everyone may know of a task: which classes come when."""

    index: int  # h, from 0
    groups: tuple[tuple[int, ...], ...]  # the classes of tasks 0..h

    @property
    def new(self) -> tuple[int, ...]:
        """The classes this task brings."""
        return self.groups[-1]

    @property
    def old(self) -> tuple[int, ...]:
        """The classes of all earlier tasks."""
        return tuple(j for group in self.groups[:-1] for j in group)

    @property
    def seen(self) -> tuple[int, ...]:
        """The classes of all tasks so far, this one included."""
        return self.old + self.new


def mask(classes: tuple[int, ...], capacity: int) -> Tensor:
    """Return a boolean vector of length `capacity` that is true at `classes`."""
    chosen = set(classes)
    return torch.tensor([j in chosen for j in range(capacity)])


@dataclass(frozen=True)
class LocalData:
    """What one client holds of the current task; it is gone when the task ends."""

    task: Task
    images: Tensor  # uint8 (N, channels, height, width)
    labels: Tensor  # int64 (N,)
    generator: torch.Generator = field(default_factory=torch.Generator)  # for this answer's random draws
    cache: dict[str, Any] = field(default_factory=dict)
    cache_seed: int = 0
    own_seed: int = 0  # the client's, the same in every task of a run

    def of(self, label: int) -> Tensor:
        """The images of one class."""
        return self.images[self.labels == label]

    def classes(self) -> list[int]:
        """The classes this client holds, in order."""
        return sorted(set(self.labels.tolist()))

    def own_task(self) -> Task:
        """The task that these images are of: an earlier one where the client is behind."""
        groups, held = self.task.groups, set(self.classes())
        last = max((i for i, group in enumerate(groups) if held & set(group)), default=self.task.index)
        return Task(last, groups[: last + 1])

    def own_classes(self) -> tuple[int, ...]:
        """The classes of that task, and others that the client has got images of in it."""
        return (*self.own_task().new, *self.classes())

    def cached(self, key: str, make: Callable[[torch.Generator], T]) -> T:
        """Return what `make` derives from data or memory, kept until the task ends; rebuilt alike after a restart."""
        if key not in self.cache:
            self.cache[key] = make(torch.Generator(self.images.device).manual_seed(seed_of(self.cache_seed, key)))
        value: T = self.cache[key]
        return value
