"""Who takes part: the nodes' names, in the order that gave them their numbers, and what was seen of each."""

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fcil.scenario.tasks import Task
from fcil.seeds import seed_of


@dataclass
class Seen:
    """What the server knows of a node."""

    name: str
    classes: dict[str, int] = field(default_factory=dict)  # in its folder when it last looked, with their images
    held: list[int] = field(default_factory=list)  # images of each class that it has trained on so far
    last: float = 0.0  # when it last answered, in seconds since 1970
    down: int = 0
    up: int = 0
    answers: int = 0
    refused: int = 0  # replies that were not taken
    why: str = ""  # the last of them


class Roster:
    """Nodes by number; a number stays with its name. To a door these are the clients that take part."""

    def __init__(self, seed: int, active: int, capacity: int):
        self.seed, self.active, self.capacity = seed, active, capacity
        self.nodes: list[Seen] = []
        self.addresses: dict[int, int] = {}  # where each can be reached now
        self.there: list[list[int]] = []  # the clients of each task
        self.renamed: set[int] = set()  # addresses that changed their name, of which it was said

    def meet(self, looked: Iterable[tuple[int, str, dict[str, int]]]) -> list[str]:
        """Take in (address, name, classes) of nodes; new names get numbers in their own order. Return complaints."""
        complaints = []
        known = {node.name: number for number, node in enumerate(self.nodes)}
        taken = {address: self.nodes[number].name for number, address in self.addresses.items()}
        for address, name, classes in sorted(looked, key=lambda one: (one[1], one[0])):
            if taken.get(address, name) != name:  # or else one key would vote as many nodes
                if address not in self.renamed:
                    complaints.append(
                        f"node {taken[address]!r} now calls itself {name!r}, and is not listened to as that"
                    )
                self.renamed.add(address)
                continue
            number = known.setdefault(name, len(self.nodes))
            if number == len(self.nodes):
                self.nodes.append(Seen(name))
            elif self.addresses.get(number, address) != address:
                complaints.append(f"two nodes call themselves {name!r}; the second is left out")
                continue
            self.addresses[number] = address
            self.nodes[number].classes = classes
            self.nodes[number].last = time.time()
        return complaints

    def keep_only(self, online: Iterable[int]) -> set[int]:
        """Forget the addresses that nobody is at; return those online that belong to nobody known."""
        online = set(online)
        self.addresses = {number: address for number, address in self.addresses.items() if address in online}
        return online - set(self.addresses.values())

    def enter(self, task: int) -> None:
        """Let those who are online now be the clients of a task."""
        del self.there[task:]
        self.there.append(sorted(self.addresses))

    def join(self, task: int) -> list[str]:
        """Let those who have come since be clients of a task that is under way, too; return their names."""
        new = sorted(set(self.addresses) - set(self.there[task]))
        self.there[task] = sorted({*self.there[task], *new})
        return [self.nodes[number].name for number in new]

    def begin(self, task: Task) -> None:
        """Nothing to do: a node takes in its images when it is first asked in a task."""

    def present(self, task: Task) -> list[int]:
        """Return the clients of a task."""
        return self.there[task.index]

    def sample(self, task: Task, name: str, round: int) -> list[int]:
        """Return the clients of a round; depends on nothing but the seed, the clients of the task and the arguments."""
        here = self.there[task.index]
        if self.active >= len(here):
            return here
        rng = np.random.default_rng(seed_of(self.seed, "sample", task.index, name, round))
        found: list[int] = np.sort(rng.choice(here, self.active, replace=False, shuffle=False)).tolist()
        return found

    def loses(self, client: int, task: Task, where: str, times: int) -> bool:
        """Lose nothing on purpose."""
        return False

    def saved(self) -> dict[str, Any]:
        """Return what outlasts the server."""
        return {"nodes": [asdict(node) for node in self.nodes], "there": self.there}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on with the nodes of an earlier life."""
        self.nodes = [Seen(**node) for node in saved["nodes"]]
        self.there = [list(clients) for clients in saved["there"]]
