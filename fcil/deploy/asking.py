"""How the server asks its nodes: over a wire, which is this process or Flower."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fcil.deploy.messages import ASK, EVALUATE, LOOK, VERSION, Reply, Request, shown
from fcil.deploy.registry import normal
from fcil.deploy.roster import Roster
from fcil.federation.calls import Answered, Call, Origin
from fcil.files import write_text
from fcil.records import Weights, flatten
from fcil.scenario.tasks import Task

Log = Callable[[str], None]
STRANGE = 60.0  # seconds for which a node that does not say who it is, or takes another's name, is left out at first
MOST_STRANGE = 3600.0  # they double with every time, up to these
MOST_NAMES, LONGEST_NAME = 10_000, 200  # of classes that a node may tell, and letters in each


class Wire(Protocol):
    """What carries questions to addresses, and answers back."""

    def online(self) -> list[int]:
        """Return the addresses that can be reached now."""
        ...

    def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
        """Send to each address its question; return the answers that came in time."""
        ...


@dataclass(frozen=True)
class Rules:
    """When the server goes on."""

    min_nodes: int = 1  # that must be there, and answer
    enough: int = 1  # nodes that report new classes, and a task begins
    every: float = 0.0  # seconds after which a task begins with whatever is new; 0 is never
    look_every: float = 60.0  # seconds between two looks at the nodes' folders, while there is nothing to learn
    pause: float = 2.0  # seconds between two looks at who is there
    ends: bool = False  # whether the run is over when there is nothing new


class Asking:
    """A transport whose clients are nodes; what it brings back is judged at the door."""

    def __init__(self, wire: Wire, roster: Roster, rules: Rules, status: Path, log: Log, most_images: int):
        self.wire, self.roster, self.rules, self.status, self.log = wire, roster, rules, status, log
        self.most_images = most_images  # that a node may claim to have
        self.standing: dict[str, Any] = {}  # what every question of this task says
        self.strange: dict[int, tuple[float, float]] = {}  # nodes that are left out: until when, and then for how long

    def begin(self, task: Task) -> None:
        """Nothing to do: every question says which task it belongs to."""

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered]]:
        """Ask all at once; yield the answers in the order of `who`."""
        facts = {"handler": handler.__name__, "call": call._asdict()}
        came = self._asked(who, ASK, facts, flatten(message))
        for client in who:
            if client in came:
                try:
                    answered = _answered(came[client], self.most_images)
                except Exception as error:  # whatever a node can think of: no reason for the server to end
                    self.refuse(client, f"it cannot be read ({type(error).__name__}: {error})")
                    continue
                yield client, answered

    def evaluate(self, who: Sequence[int], broadcast: Any, call: Call, classes: int) -> dict[int, dict[str, Any]]:
        """Return what nodes count on the images they hold out; where too few answer, ask the others again."""
        found: dict[int, dict[str, Any]] = {}
        least, tries = min(self.rules.min_nodes, len(who)), 0
        while not found or len(found) < least:
            if tries:
                self.wait(tries, f"{len(found)} of at least {least} nodes have counted right answers")
            missing = [client for client in who if client not in found]
            replies = self._asked(missing, EVALUATE, {"call": call._asdict()}, flatten(broadcast))
            for client, reply in replies.items():
                try:
                    found[client] = _counted(reply, classes, self.most_images)
                except Exception as error:
                    self.refuse(client, str(error) or type(error).__name__)
            tries += 1
        return found

    def wait(self, tries: int, sentence: str) -> None:
        """Wait a little for nodes that are missing."""
        self.log(f"{sentence}; asking the other nodes again")
        time.sleep(min(self.rules.pause * tries, 30.0))

    def gather(self, least: int) -> None:
        """Wait until so many nodes are there; look at those that are new."""
        said = False
        while True:
            strangers = self.roster.keep_only(online := self.wire.online())
            if not self.roster.nodes and len(online) < least:
                strangers = set()  # the first ones are numbered together, by name, in whatever order they came
            self.strange = {a: rest for a, rest in self.strange.items() if a in strangers}
            if new := [a for a in sorted(strangers) if a not in self.strange or self.strange[a][0] < time.monotonic()]:
                self.look(new)
                for a in set(new) - set(self.roster.addresses.values()):
                    rest = self.strange[a][1] if a in self.strange else STRANGE
                    self.strange[a] = time.monotonic() + rest, min(2 * rest, MOST_STRANGE)
            if len(self.roster.addresses) >= least:
                return
            if not said:
                self.log(f"{len(self.roster.addresses)} of at least {least} nodes are there; waiting")
                self._write_status()
                said = True
            time.sleep(self.rules.pause)

    def look(self, addresses: Iterable[int]) -> None:
        """Ask nodes who they are and which classes they have."""
        found = []
        for address, reply in self.wire.exchange(
            {a: Request(LOOK, {"version": VERSION}, {}) for a in addresses}
        ).items():
            try:
                if reply.error:
                    raise ValueError(reply.error)
                found.append((address, _name(reply.facts["name"]), _classes(reply, self.most_images)))
            except Exception as error:
                self.log(f"the node at {address} did not say who it is: {shown(error) or type(error).__name__}")
        for complaint in self.roster.meet(found):
            self.log(complaint)
        self._write_status()

    def refuse(self, client: int, why: str) -> None:
        """Note that a reply was not taken."""
        node = self.roster.nodes[client]
        node.refused, node.why = node.refused + 1, shown(why)
        self.log(f"refused a reply of node {node.name}: {node.why}")
        self._write_status()

    def _asked(self, who: Sequence[int], kind: str, facts: Mapping[str, Any], tensors: Weights) -> dict[int, Reply]:
        """Ask those of `who` that can be reached, once; return what came, but for those who say they cannot answer."""
        self.gather(self.rules.min_nodes)
        reached = {client: self.roster.addresses[client] for client in who if client in self.roster.addresses}
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        mail = {
            address: Request(kind, {**self.standing, **facts, "client": client}, on_cpu)
            for client, address in reached.items()
        }
        replies = self.wire.exchange(mail)
        came = {}
        for client, address in reached.items():
            node = self.roster.nodes[client]
            node.down += _weight(on_cpu)
            if address not in replies:
                self.log(f"no answer of node {node.name} to {facts.get('handler', kind)}")
                continue
            reply, node.last, node.answers = replies[address], time.time(), node.answers + 1
            node.up += _weight(reply.tensors)
            if reply.error:
                self.refuse(client, reply.error)
            else:
                came[client] = reply
        self._write_status()
        return came

    def _write_status(self) -> None:
        online = set(self.roster.addresses)
        nodes = [{**node, "online": number in online} for number, node in enumerate(self.roster.saved()["nodes"])]
        task = {"task": len(self.standing.get("groups", ())), "names": self.standing.get("names", [])}
        write_text(self.status, json.dumps({"nodes": nodes, **task, "written": time.time()}) + "\n")


def _answered(reply: Reply, most: int) -> Answered:
    """Read an answer: its tensors as they came, which are judged at the door."""
    facts = reply.facts
    for name, tensor in reply.tensors.items():
        if tensor.is_complex():
            raise ValueError(f"{shown(name, 60)} is complex")
    origin = Origin(*(facts[name] for name in Origin._fields))
    kept, images = _count(facts["kept"], 2**53), _count(facts["images"], most)
    return Answered(dict(reply.tensors), kept, float(facts["loss"]), images, origin)


def _counted(reply: Reply, classes: int, most: int) -> dict[str, Any]:
    """Read what a node counts, by class: right answers, images held out, images trained on so far."""
    counts = {key: [_count(n, most) for n in reply.facts[key]] for key in ("correct", "total", "held")}
    if any(len(found) != classes for found in counts.values()):
        raise ValueError(f"it does not count {classes} classes")
    if any(c > n for c, n in zip(counts["correct"], counts["total"], strict=True)):
        raise ValueError("it has more right answers than images")
    return {**counts, "classes": _classes(reply, most)}


def _classes(reply: Reply, most: int) -> dict[str, int]:
    """Read which classes a node says it has, and how many images of each."""
    told = reply.facts["classes"]
    if len(told) > MOST_NAMES:
        raise ValueError(f"it tells of {len(told):,} classes, and {MOST_NAMES:,} are allowed")
    for name in told:
        if not isinstance(name, str) or not normal(name) or len(name) > LONGEST_NAME:
            raise ValueError(f"{shown(name, 60)!r} is no class; a name has 1 to {LONGEST_NAME} letters")
    return {name: _count(n, most) for name, n in told.items()}


def _name(told: Any) -> str:
    if not isinstance(told, str) or not told.strip() or len(told) > LONGEST_NAME:
        raise ValueError(f"{shown(told, 60)!r} is no name of a node; it has 1 to {LONGEST_NAME} letters")
    return shown(told)


def _count(told: Any, most: int) -> int:
    if not isinstance(told, int) or not 0 <= told <= most:
        raise ValueError(f"it counts {shown(told, 30)}; allowed are 0 to {most:,}")
    return told


def _weight(tensors: Weights) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
