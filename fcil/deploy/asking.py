"""How the server asks its nodes: over a wire, which is this process or Flower."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fcil.deploy.messages import ASK, EVALUATE, LOOK, VERSION, Reply, Request, shown
from fcil.deploy.reading import answer_of, classes_of, counts_of, name_of
from fcil.deploy.roster import Roster
from fcil.federation.calls import Answered, Call
from fcil.files import write_text
from fcil.records import Weights, flatten
from fcil.scenario.tasks import Task

Log = Callable[[str], None]
STRANGE = 60.0  # seconds for which a node that does not say who it is, or takes another's name, is left out at first
MOST_STRANGE = 3600.0  # they double with every time, up to these
FRESH = 30.0  # seconds after which what is known of the nodes is written down again, while the server waits


class Wire(Protocol):
    """What carries questions to addresses, and answers back."""

    def online(self) -> dict[int, str]:
        """Return the addresses that can be reached now, and whose each is by its key; "" where no key says so."""
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
        self.heard: dict[int, tuple[str, dict[str, int]]] = {}  # who the first nodes are, until they are enough
        self.named: dict[int, str] = {}  # whose the addresses are that can be reached, by their keys
        self.misnamed: set[int] = set()  # those that call themselves otherwise, of which it was said
        self.question: tuple[str, Any] = "", None  # the one being asked
        self.missing: list[int] = []  # clients that have not answered it
        self.waiting, self.written = "", 0.0  # for what the server waits; when that was last written down

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
                    answered = answer_of(came[client], self.most_images)
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
                    found[client] = counts_of(reply, classes, self.most_images)
                except Exception as error:
                    self.refuse(client, str(error) or type(error).__name__)
            tries += 1
        self._wait_for("")
        return found

    def wait(self, tries: int, sentence: str) -> None:
        """Wait a little for nodes that are missing."""
        self._wait_for(f"{sentence}; asking again: {self._names(self.missing)}")
        time.sleep(min(self.rules.pause * tries, 30.0))

    def gather(self, least: int) -> None:
        """Wait until so many nodes are there; look at those that are new."""
        said = False
        while True:
            self.named = online = self.wire.online()
            strangers = self.roster.keep_only(online)
            self.strange = {a: rest for a, rest in self.strange.items() if a in strangers}
            self.heard = {a: told for a, told in self.heard.items() if a in strangers}
            now = time.monotonic()
            new = [
                a for a in sorted(strangers - self.heard.keys()) if a not in self.strange or self.strange[a][0] < now
            ]
            if new and (self.roster.nodes or len(online) >= least):
                self.look(new, least)
                for a in set(new) - self.heard.keys() - set(self.roster.addresses.values()):
                    rest = self.strange[a][1] if a in self.strange else STRANGE
                    self.strange[a] = time.monotonic() + rest, min(2 * rest, MOST_STRANGE)
            if (there := len(self.roster.addresses)) >= least:
                if said:
                    self._wait_for("")
                    self.log(f"{there} nodes are there; going on")
                return
            away = [number for number in range(len(self.roster.nodes)) if number not in self.roster.addresses]
            self._wait_for(f"{there} of at least {least} nodes are there; waiting for {self._names(away)}")
            said = True
            time.sleep(self.rules.pause)

    def look(self, addresses: Iterable[int], least: int = 1) -> None:
        """Ask nodes who they are and which classes they have.

        The first so many are numbered together, by name, in whatever order they come and answer.
        """
        for address, reply in self.wire.exchange(
            {a: Request(LOOK, {"version": VERSION}, {}) for a in addresses}
        ).items():
            try:
                if reply.error:
                    raise ValueError(reply.error)
                self.heard[address] = self._whose(address, reply), classes_of(reply, self.most_images)
            except Exception as error:
                self.log(f"the node at {address} did not say who it is: {shown(error) or type(error).__name__}")
        if self.roster.nodes or len(self.heard) >= least:
            for complaint in self.roster.meet((address, *told) for address, told in self.heard.items()):
                self.log(complaint)
            self.heard = {}
        self._write_status()

    def refuse(self, client: int, why: str) -> None:
        """Note that a reply was not taken."""
        node = self.roster.nodes[client]
        node.refused, node.why = node.refused + 1, shown(why)
        self.log(f"refused a reply of node {node.name}: {node.why}")
        self._write_status()

    def _asked(self, who: Sequence[int], kind: str, facts: Mapping[str, Any], tensors: Weights) -> dict[int, Reply]:
        """Ask those of `who` that can be reached, once; return what came, but for those who say they cannot answer."""
        if (question := (kind, facts["call"])) != self.question:
            self.question = question
            if self.waiting:  # for an answer to the last one, which came
                self._wait_for("")
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
        self.missing = [client for client in who if client not in came]
        self._write_status()
        return came

    def _whose(self, address: int, reply: Reply) -> str:
        """Return the name of a node: its key's, whatever it calls itself; without a key, what it says."""
        told, known = name_of(reply), self.named.get(address, "")
        if known and told != known and address not in self.misnamed:
            self.misnamed.add(address)
            self.log(f"the node with the key of {known!r} calls itself {told!r}; it takes part as {known!r}")
        return known or told

    def _wait_for(self, sentence: str) -> None:
        """Say once for what the server waits, and keep what `fcil status` shows fresh while it does."""
        if sentence == self.waiting and time.monotonic() - self.written < FRESH:
            return
        if sentence not in ("", self.waiting):
            self.log(sentence)
        self.waiting = sentence
        self._write_status()

    def _names(self, clients: Iterable[int]) -> str:
        return ", ".join(self.roster.nodes[client].name for client in clients) or "more"

    def _write_status(self) -> None:
        self.written, online = time.monotonic(), self.roster.addresses
        nodes = [
            {**node, "online": number in online, "address": online.get(number)}
            for number, node in enumerate(self.roster.saved()["nodes"])
        ]
        task = {"task": len(self.standing.get("groups", ())), "names": self.standing.get("names", [])}
        about = {"nodes": nodes, **task, "waiting": self.waiting, "written": time.time()}
        write_text(self.status, json.dumps(about) + "\n")


def _weight(tensors: Weights) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
