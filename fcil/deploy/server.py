"""The server of a deployment: tasks as classes come, rounds as in a simulation, evaluation by the nodes.

The run folder is that of `fcil run`; beside it, nodes.json says what was seen of each node, and server.log what
happened. A checkpoint is on disk before the next question is asked, so that a server killed at any moment goes on from
its last round, and its nodes with it.
"""

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from fcil.deploy.asking import Asking, Log, Rules, Wire
from fcil.deploy.growth import grown
from fcil.deploy.messages import VERSION
from fcil.deploy.registry import Registry, room_for
from fcil.deploy.roster import Roster
from fcil.federation.calls import Call
from fcil.federation.clients import Cursor, Door
from fcil.federation.engine import seeded, threads
from fcil.federation.loop import Line, by_class, round_line, rounds_of, task_line
from fcil.federation.store import Checkpoints
from fcil.files import append_line, set_aside, write_text
from fcil.machine import commit, reset_peak
from fcil.method import Server, Setting
from fcil.methods import method
from fcil.parts import setting_of
from fcil.plan import Plan
from fcil.records import flatten, size_in_bytes, unflatten
from fcil.results.ledger import Ledger
from fcil.results.runs import FORMAT
from fcil.run_folder import locked, said_plainly, write_outcome
from fcil.scenario.tasks import Task


def serve(wanted: Plan, folder: Path, wire: Wire, rules: Rules, log: Log, capacity: int) -> Iterator[Line]:
    """Run a deployment, or go on with it; yield the ledger's lines as they are written."""
    with said_plainly(folder, "fcil serve --resume"), locked(folder), threads(1):
        reset_peak()
        if not (folder / "config.toml").exists():
            write_text(folder / "config.toml", wanted.to_toml())
        federation = Federation(wanted, folder, wire, rules, log, capacity)
        try:
            yield from federation.run()
        finally:
            federation.checkpoints.join()


class Federation:
    """A run of a deployment: what is known of classes, nodes and tasks, and the method's server."""

    def __init__(self, wanted: Plan, folder: Path, wire: Wire, rules: Rules, log: Log, capacity: int):
        self.wanted, self.folder, self.rules, self.log = wanted, folder, rules, log
        self.experiment, self.life = _begun(folder / "experiment.json")
        self.registry, self.groups, self.begun = Registry(), list[tuple[int, ...]](), time.time()
        self.roster = Roster(wanted.seed, wanted.benchmark.active, capacity)
        self.asking = Asking(wire, self.roster, rules, folder / "nodes.json", log, wanted.protocol.most_images)
        protocol = replace(wanted.protocol, quorum=max(wanted.protocol.quorum, rules.min_nodes))
        self.door = Door(
            self.asking, self.roster, protocol, wanted.seed, experiment=self.experiment, wait=self.asking.wait,
            journal=partial(append_line, folder / "releases.log"), told=self.asking.refuse,
        )  # fmt: skip
        self.checkpoints = Checkpoints(folder / "checkpoint", every=0)
        self.capacity, self.saved, self.offset = capacity, (0, 0), 0
        self.setting, self.server = self._made()
        self._restore()

    def run(self) -> Iterator[Line]:
        """Learn task after task, until there are as many as planned, or nothing is new and that is an end."""
        path = self.folder / "ledger.jsonl"
        if not self.offset and path.exists():
            self._start_over()
            set_aside(path)
        with Ledger.open(path, self.offset or None) as ledger:
            if ledger.offset == 0:
                ledger.append(self._first_line())
            self.asking.gather(self.rules.min_nodes)
            while self._next_task(ledger):
                for line in self._learn(Task(len(self.groups) - 1, tuple(self.groups))):
                    ledger.append(line)
                    self._save(ledger)
                    yield line
                self._write_model()
        self._write_model(result=True)

    def _start_over(self) -> None:
        """Begin another experiment: no checkpoint is whole, and what nodes remember is of the one that is lost."""
        (self.folder / "experiment.json").unlink(missing_ok=True)
        self.experiment, self.life = _begun(self.folder / "experiment.json")
        self.door.experiment = self.experiment
        self.log("nothing was saved yet, or it cannot be read: the run starts over, as another experiment")

    def _learn(self, task: Task) -> Iterator[Line]:
        self._stand()
        self.door.begin(task)
        for _ in rounds_of(self.server.learn_task(task, self.door), self.door):
            self.door.finish()
            every = self.door.protocol.evaluate_every
            if every and self.door.stage == "train" and (self.door.round + 1) % every == 0:
                where = {"stage": self.door.stage, "round": self.door.round, "rounds": self.door.of}
                yield {"kind": "evaluation", "task": task.index, **where, **self._evaluated(task)}
            for name in self.roster.join(task.index):
                self.log(f"node {name} takes part in task {task.index + 1} from the next round on")
            yield round_line(self.door)  # with the checkpoint, so that a resumed run has the same clients
        self.door.finish()
        counts = self._evaluated(task)
        held = [_padded(self.roster.nodes[c].held, len(self.registry.names)) for c in self.door.everyone()]
        line = task_line(task, self.server, self.door, counts, held, None)
        self.door.cursor.enter(task.index + 1)
        yield line

    def _evaluated(self, task: Task) -> Line:
        """Let the nodes count right answers on what they hold out; nobody else has test images."""
        classes, broadcast, who = len(self.registry.names), self.server.broadcast(), self.door.everyone()
        call = Call(self.wanted.seed, task.index, self.door.cursor.step, new=task.new)
        with self.door.tally.timing("evaluate"):
            found = self.asking.evaluate(who, broadcast, call, classes)
        self.door.tally.down += size_in_bytes(broadcast) * len(who)
        for client, counts in found.items():
            self.roster.nodes[client].held, self.roster.nodes[client].classes = counts["held"], counts["classes"]
        correct, total = (
            [sum(column) for column in zip(*(counts[key] for counts in found.values()), strict=True)]
            for key in ("correct", "total")
        )
        return {
            "correct": [sum(correct[j] for j in group) for group in self.groups],
            "total": [sum(total[j] for j in group) for group in self.groups],
            "per_class": by_class(correct, total),
        }

    def _next_task(self, ledger: Ledger) -> bool:
        """Come to a task that is to be learned: the one under way, or a new one as soon as the rule says so."""
        if self.door.cursor.task < len(self.groups):
            return True
        b = self.wanted.benchmark
        if len(self.groups) >= b.tasks:
            return False
        while not self._due():
            if self.rules.ends:
                return False
            time.sleep(self.rules.look_every)
            self.asking.gather(self.rules.min_nodes)
            self.asking.look(self.roster.addresses.values())
        self.groups.append(self.registry.take(b.classes_per_task))
        self.roster.enter(len(self.groups) - 1)
        self.begun = time.time()
        self._make_room()
        self._save(ledger)  # before any node hears of it
        brought = ", ".join(repr(self.registry.names[j]) for j in self.groups[-1])
        self.log(f"task {len(self.groups)} begins: {brought}; {len(self.roster.there[-1])} nodes")
        return True

    def _due(self) -> bool:
        nodes = [self.roster.nodes[number] for number in self.roster.addresses]
        for warning in self.registry.hear(name for node in nodes for name in node.classes):
            self.log(warning)
        if not self.registry.waiting:
            return False
        telling = sum(self.registry.unknown(node.classes) for node in nodes)
        late = self.rules.every > 0 and time.time() - self.begun >= self.rules.every
        return self.rules.ends or late or telling >= self.rules.enough

    def _make_room(self) -> None:
        wider = room_for(len(self.registry.names), self.capacity)
        if wider != self.capacity:
            self.log(f"room for {wider} classes in place of {self.capacity}")
            before, self.capacity = self.server.state, wider
            self.roster.capacity = wider
            self.setting, self.server = self._made()
            self.server.state = grown(before, self.server.state)

    def _made(self) -> tuple[Setting, Server]:
        size = self.wanted.benchmark.image_size
        setting = setting_of(self.wanted, self.capacity, (3, size, size))
        with seeded(self.wanted.seed, "initial weights"):
            return setting, method(self.wanted.method).server(self.wanted.config, setting)

    def _stand(self) -> None:
        """Tell every question of this task where the server stands."""
        self.asking.standing = {
            "version": VERSION, "experiment": self.experiment, "plan": self.wanted.to_toml(), "life": self.life,
            "names": list(self.registry.names), "capacity": self.capacity, "groups": [list(g) for g in self.groups],
            "saved": list(self.saved),
        }  # fmt: skip

    def _save(self, ledger: Ledger) -> None:
        ledger.sync()
        cursor = self.door.cursor
        facts = {
            "cursor": asdict(cursor), "ledger": ledger.offset, "registry": asdict(self.registry), "begun": self.begun,
            "groups": self.groups, "capacity": self.capacity, "roster": self.roster.saved(),
        }  # fmt: skip
        self.checkpoints.save(facts, flatten(self.server.state), lambda everything: {})
        self.checkpoints.wait()
        self.saved = (cursor.task, cursor.step)
        self.asking.standing["saved"] = list(self.saved)

    def _restore(self) -> None:
        found = self.checkpoints.latest()
        if found is None:
            return
        facts = found.facts
        self.registry, self.begun = Registry(**facts["registry"]), float(facts["begun"])
        self.groups, self.capacity = [tuple(group) for group in facts["groups"]], int(facts["capacity"])
        self.roster.restore(facts["roster"])
        self.roster.capacity = self.capacity
        self.setting, self.server = self._made()
        self.server.state = unflatten(type(self.server.state), found.state)
        cursor = dict(facts["cursor"])
        cursor["kept"] = {int(client): kept for client, kept in cursor["kept"].items()}
        self.door.cursor = Cursor(**cursor)
        self.saved, self.offset = (self.door.cursor.task, self.door.cursor.step), int(facts["ledger"])
        self.log(f"going on in task {self.door.cursor.task + 1} after question {self.door.cursor.step}")

    def _first_line(self) -> Line:
        w = self.wanted
        return {
            "kind": "run", "format": FORMAT, "method": w.method, "benchmark": w.benchmark.name,
            "protocol": w.protocol.name, "seed": w.seed, "settings": w.settings, "command": w.command,
            "device": "cpu", "partition": "nodes", "commit": commit(), "evaluated": "by nodes",
            "memory_budget": self.setting.budget.per_client, "classes": [], "warnings": [],
        }  # fmt: skip

    def _write_model(self, result: bool = False) -> None:
        if self.groups:
            write_outcome(
                self.wanted, self.folder, self.server, self.setting, self.registry.names, "cpu",
                f"{len(self.roster.nodes)} nodes", result,
            )  # fmt: skip


def _begun(path: Path) -> tuple[str, int]:
    """Return the experiment's name, made up when it first begins, and how often it was started."""
    try:
        known: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        known = {"experiment": secrets.token_hex(8), "life": 0}
    known["life"] += 1
    write_text(path, json.dumps(known) + "\n")
    return str(known["experiment"]), int(known["life"])


def _padded(held: list[int], classes: int) -> list[int]:
    return [*held, *[0] * (classes - len(held))]
