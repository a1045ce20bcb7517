"""How the server asks its nodes: over a wire, which is this process or Flower."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fcil.deploy.messages import ASK, EVALUATE, LOOK, VERSION, Reply, Request
from fcil.deploy.roster import Roster
from fcil.federation.calls import Answered, Call
from fcil.files import write_text
from fcil.method import reply_type
from fcil.records import Weights, flatten, unflatten
from fcil.scenario.tasks import Task

Log = Callable[[str], None]
Judge = Callable[[Any, Mapping[int, Any]], Mapping[int, str]]  # what was sent, replies by client -> why refused


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


def all_good(sent: Any, replies: Mapping[int, Any]) -> Mapping[int, str]:
    """Refuse nothing."""
    return {}


class Asking:
    """A transport whose clients are nodes. Below `min_nodes` good answers it waits, and asks the others again."""

    def __init__(self, wire: Wire, roster: Roster, rules: Rules, status: Path, log: Log, judge: Judge = all_good):
        self.wire, self.roster, self.rules, self.status, self.log, self.judge = wire, roster, rules, status, log, judge
        self.standing: dict[str, Any] = {}  # what every question of this task says

    def begin(self, task: Task) -> None:
        """Nothing to do: every question says which task it belongs to."""

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered]]:
        """Ask all at once; yield the good answers in the order of `who`."""
        came: dict[int, Answered] = {}
        kind = reply_type(handler)

        def read(reply: Reply) -> Answered:
            facts = reply.facts
            return Answered(
                unflatten(kind, reply.tensors), int(facts["kept"]), float(facts["loss"]), int(facts["images"])
            )

        def judged(answers: Mapping[int, Answered]) -> Mapping[int, str]:
            return self.judge(message, {client: answered.reply for client, answered in answers.items()})

        facts = {"handler": handler.__name__, "call": call._asdict()}
        for client, answered in self._until_enough(who, ASK, facts, flatten(message), read, judged):
            came[client] = answered
        yield from ((client, came[client]) for client in who if client in came)

    def evaluate(self, who: Sequence[int], broadcast: Any, call: Call, classes: int) -> dict[int, dict[str, Any]]:
        """Return what each node counts on the images it holds out: `correct`, `total` and `held`, by class."""

        def read(reply: Reply) -> dict[str, Any]:
            counts = {key: [int(n) for n in reply.facts[key]] for key in ("correct", "total", "held")}
            right = all(0 <= c <= n for c, n in zip(counts["correct"], counts["total"], strict=True))
            if not right or any(len(found) != classes or min(found, default=0) < 0 for found in counts.values()):
                raise ValueError("its counts cannot be")
            return {**counts, "classes": {str(name): int(n) for name, n in reply.facts["classes"].items()}}

        facts = {"call": call._asdict()}
        return dict(self._until_enough(who, EVALUATE, facts, flatten(broadcast), read, lambda _: {}))

    def gather(self, least: int) -> None:
        """Wait until so many nodes are there; look at those that are new."""
        said = False
        while True:
            if strangers := self.roster.keep_only(self.wire.online()):
                self.look(strangers)
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

    def _until_enough(
        self,
        who: Sequence[int],
        kind: str,
        facts: Mapping[str, Any],
        tensors: Weights,
        read: Callable[[Reply], Any],
        judged: Callable[[Mapping[int, Any]], Mapping[int, str]],
    ) -> Iterator[tuple[int, Any]]:
        good: dict[int, Any] = {}
        least = min(self.rules.min_nodes, len(who))
        weight = sum(t.numel() * t.element_size() for t in tensors.values())
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        while True:
            self.gather(self.rules.min_nodes)
            reached = {c: self.roster.addresses[c] for c in who if c not in good and c in self.roster.addresses}
            mail = {
                address: Request(kind, {**self.standing, **facts, "client": client}, on_cpu)
                for client, address in reached.items()
            }
            replies = self.wire.exchange(mail)
            opened = {}
            for client, address in reached.items():
                node = self.roster.nodes[client]
                node.down += weight
                if address not in replies:
                    self.log(f"no answer of node {node.name} to {facts.get('handler', kind)}")
                    continue
                reply, node.last, node.answers = replies[address], time.time(), node.answers + 1
                node.up += sum(t.numel() * t.element_size() for t in reply.tensors.values())
                try:
                    if reply.error:
                        raise ValueError(reply.error)
                    opened[client] = read(reply)
                except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
                    self.refuse(client, str(error) or type(error).__name__)
            for client, why in judged(opened).items():
                self.refuse(client, why)
                del opened[client]
            good |= opened
            self._write_status()
            if len(good) >= least:
                yield from good.items()
                return
            self.log(f"{len(good)} of at least {least} good answers; asking the other nodes again")
            time.sleep(self.rules.pause)

    def _write_status(self) -> None:
        online = set(self.roster.addresses)
        nodes = [{**node, "online": number in online} for number, node in enumerate(self.roster.saved()["nodes"])]
        task = {"task": len(self.standing.get("groups", ())), "names": self.standing.get("names", [])}
        write_text(self.status, json.dumps({"nodes": nodes, **task, "written": time.time()}) + "\n")
