"""How the server asks its nodes: over a wire, which is this process or Flower."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fcil.deploy.messages import ASK, EVALUATE, LOOK, VERSION, Reply, Request
from fcil.deploy.roster import Roster
from fcil.federation.calls import Answered, Call, Origin
from fcil.files import write_text
from fcil.records import Weights, flatten
from fcil.scenario.tasks import Task

Log = Callable[[str], None]
STRANGE = 60.0  # seconds for which a node that does not say who it is, or takes another's name, is left out


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

    def __init__(self, wire: Wire, roster: Roster, rules: Rules, status: Path, log: Log):
        self.wire, self.roster, self.rules, self.status, self.log = wire, roster, rules, status, log
        self.standing: dict[str, Any] = {}  # what every question of this task says
        self.strange: dict[int, float] = {}  # addresses of nodes that are left out, and until when

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
                    yield client, _answered(came[client])
                except (KeyError, TypeError, ValueError) as error:
                    self.refuse(client, f"it cannot be read ({type(error).__name__}: {error})")

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
                    found[client] = _counted(reply, classes)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
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
            strangers = self.roster.keep_only(self.wire.online())
            if new := [a for a in sorted(strangers) if self.strange.get(a, 0.0) < time.monotonic()]:
                self.look(new)
                known = set(self.roster.addresses.values())
                self.strange |= {a: time.monotonic() + STRANGE for a in new if a not in known}
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
                classes = {str(name): int(n) for name, n in reply.facts["classes"].items()}
                found.append((address, str(reply.facts["name"]), classes))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self.log(f"the node at {address} did not say who it is: {error}")
        for complaint in self.roster.meet(found):
            self.log(complaint)
        self._write_status()

    def refuse(self, client: int, why: str) -> None:
        """Note that a reply was not taken."""
        node = self.roster.nodes[client]
        node.refused, node.why = node.refused + 1, why
        self.log(f"refused a reply of node {node.name}: {why}")

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


def _answered(reply: Reply) -> Answered:
    """Read an answer: its tensors as they came, which are judged at the door."""
    facts = reply.facts
    origin = Origin(*(facts[name] for name in Origin._fields))
    return Answered(dict(reply.tensors), int(facts["kept"]), float(facts["loss"]), int(facts["images"]), origin)


def _counted(reply: Reply, classes: int) -> dict[str, Any]:
    """Read what a node counts, by class: right answers, images held out, images trained on so far."""
    counts = {key: [int(n) for n in reply.facts[key]] for key in ("correct", "total", "held")}
    if any(len(found) != classes or min(found, default=0) < 0 for found in counts.values()):
        raise ValueError(f"it does not count {classes} classes, each at least 0")
    if any(c > n for c, n in zip(counts["correct"], counts["total"], strict=True)):
        raise ValueError("it has more right answers than images")
    return {**counts, "classes": {str(name): int(n) for name, n in reply.facts["classes"].items()}}


def _weight(tensors: Weights) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
