"""Which class has which slot: an append-only list of names that the server keeps and sends with every question."""

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

CAPACITY = 128  # classes that heads and tables have room for at first; they double when it is not enough


def normal(name: str) -> str:
    """Return the one way a class name is written: Unicode NFC, single spaces, none at its ends."""
    return " ".join(unicodedata.normalize("NFC", name).split())


def alike(name: str) -> str:
    """Return what two names have in common that a person may take for the same: case, width, spaces, - and _ aside."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    return "".join(c for c in folded if not c.isspace() and c not in "-_")


@dataclass
class Registry:
    """Names in the order of their slots, and those that wait for a task."""

    names: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # reported by nodes, in no task yet

    def hear(self, reported: Iterable[str]) -> list[str]:
        """Let new names wait for a task, in order; return a warning for each that looks like one known before."""
        known = {*self.names, *self.waiting}
        by_look = {alike(name): name for name in (*self.names, *self.waiting)}
        warnings = []
        for name in sorted({normal(name) for name in reported} - known):
            if other := by_look.get(alike(name)):
                warnings.append(
                    f"class {name!r} looks like {other!r}, but is another class; if they are one, rename its folder"
                )
            by_look.setdefault(alike(name), name)
            self.waiting.append(name)
        return warnings

    def unknown(self, reported: Iterable[str]) -> bool:
        """Tell whether there is a name among them that is in no task yet."""
        return bool({normal(name) for name in reported} - set(self.names))

    def take(self, most: int) -> tuple[int, ...]:
        """Give slots to the names that have waited longest, at most so many; return the slots."""
        first = len(self.names)
        self.names += self.waiting[:most]
        del self.waiting[:most]
        return tuple(range(first, len(self.names)))

    def slots(self) -> dict[str, int]:
        """Return the slot of each name."""
        return {name: slot for slot, name in enumerate(self.names)}


def room_for(classes: int, capacity: int) -> int:
    """Return the capacity, doubled as often as it takes."""
    while capacity < classes:
        capacity *= 2
    return capacity
