"""A node: answers for its own images, from its own memory on disk. The same for a simulation and behind Flower."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import torch

from fcil import __version__
from fcil.deploy.folders import Arrivals, inventory
from fcil.deploy.messages import ASK, EVALUATE, LOOK, VERSION, Reply, Request
from fcil.errors import UserError
from fcil.federation.calls import Call, Origin
from fcil.federation.engine import Engine
from fcil.federation.in_process import differ, snapshot
from fcil.federation.versions import Place, Versions
from fcil.method import Method
from fcil.methods import family, method
from fcil.parts import setting_of
from fcil.plan import Plan
from fcil.records import flatten, keep_no_more, unflatten
from fcil.scenario.memory import Budget
from fcil.scenario.tasks import LocalData, Task


class Node:
    """One participant: a name, a folder of class folders, and a folder for what it remembers."""

    def __init__(self, name: str, data: Path, state: Path, device: str = "cpu"):
        self.name, self.data, self.state, self.device = name, data, state, device

    def answer(self, asked: Request) -> Reply:
        """Answer any question; what is wrong with it is a UserError."""
        if asked.facts.get("version") != VERSION:
            raise UserError(
                f"the server speaks version {asked.facts.get('version')} of fcil's messages, this node (fcil "
                f"{__version__}) version {VERSION}; install the same fcil on both"
            )
        if asked.kind == LOOK:
            return Reply({"name": self.name, "classes": inventory(self.data), "fcil": __version__}, {})
        here = Here(self, asked.facts)
        if asked.kind == ASK:
            return here.ask(asked)
        if asked.kind == EVALUATE:
            return here.evaluate(asked)
        raise UserError(f"this node knows no question {asked.kind!r}")


class Here:
    """A node in one experiment, at the place that a question names."""

    def __init__(self, node: Node, facts: dict[str, Any]):
        self.node, self.facts = node, facts
        self.made = Made.of(facts["plan"], int(facts["capacity"]), node.device)
        self.call = Call(**{**facts["call"], "new": tuple(facts["call"]["new"])})
        self.task = Task(self.call.task, tuple(tuple(group) for group in facts["groups"]))
        place = node.state / _safe(str(facts["experiment"]))
        self.versions = Versions(place / "memory")
        self.arrivals = Arrivals(node.data, place / "images", self.made.setting.shape[1])
        self.slots = {str(name): slot for slot, name in enumerate(facts["names"])}

    def ask(self, asked: Request) -> Reply:
        """Give an answer of the method, and remember what it changed."""
        place = Place(int(self.facts["life"]), self.call.task, self.call.step)
        if (applied := self.versions.applied).is_after(place.life, place.step):
            raise UserError(
                f"question {place.step} of the server's life {place.life} comes too late: {self.node.name} has "
                f"answered question {applied.step} of life {applied.life}; nothing was changed"
            )
        saved_task, saved_step = self.facts["saved"]
        self.versions.forget_before(min(int(saved_step), self.call.step - 1))
        self.arrivals.forget_before(int(saved_task))
        handler = self.made.handler(str(self.facts["handler"]))
        engine, kind = self.made.engine, type(self.made.method.memory())
        kept = self.versions.before(self.call.step)
        memory = engine.receive(self.made.method.memory() if kept is None else unflatten(kind, kept))
        arrived = self.arrivals.of(self.task.index, self.slots)
        data = LocalData(self.task, arrived.images.to(engine.device), arrived.labels.to(engine.device))
        message = engine.receive(unflatten(get_type_hints(handler)["message"], asked.tensors))
        before = snapshot(memory)
        answered = engine.answer(int(self.facts["client"]), handler, memory, data, message, self.call)
        changed = differ(before, snapshot(memory))
        if changed:
            keep_no_more(memory)
            self._weigh(handler.__name__, answered.kept)
        self.versions.apply(place, flatten(memory) if changed else None)
        origin = Origin(str(self.facts["experiment"]), __version__, self.call.step, handler.__name__)
        measured = {"kept": answered.kept, "loss": float(answered.loss), "images": answered.images}
        facts = {**origin._asdict(), **measured}
        return Reply(facts, {name: tensor.detach().cpu() for name, tensor in flatten(answered.reply).items()})

    def evaluate(self, asked: Request) -> Reply:
        """Count right answers on the images that this node holds out, by class."""
        engine, classes = self.made.engine, len(self.slots)
        self.arrivals.of(self.task.index, self.slots)  # what is held out of a task counts, whether or not it trained
        message = engine.receive(unflatten(self.made.broadcast, asked.tensors))
        correct, total = torch.zeros(classes, dtype=torch.int64), torch.zeros(classes, dtype=torch.int64)
        for images, labels in self.arrivals.tested():
            if len(labels):
                right = engine.classify(message, images).cpu() == labels
                total += torch.bincount(labels, minlength=classes)
                correct += torch.bincount(labels[right], minlength=classes)
        counts = {"correct": correct.tolist(), "total": total.tolist(), "held": self.arrivals.held(classes)}
        return Reply({**counts, "name": self.node.name, "classes": inventory(self.node.data)}, {})

    def _weigh(self, name: str, kept: int) -> None:
        if self.made.budget is not None and kept > (limit := self.made.budget.at(self.task)):
            raise UserError(
                f"{self.node.name} would keep {kept:,} bytes after {name} of task {self.task.index + 1}; "
                f"the experiment allows {limit:,} (set memory to change it)"
            )


class Made:
    """What a plan makes of a method, for a number of classes."""

    def __init__(self, text: str, capacity: int, device: str):
        wanted = Plan.parse(text, Path("the server's config.toml"), "install the server's version here")
        if wanted.method.endswith(".py"):
            raise UserError(f"{wanted.name} is a file of the server's; nodes answer for methods that fcil has")
        self.method: Method = method(wanted.method)
        shape = (3, wanted.benchmark.image_size, wanted.benchmark.image_size)
        self.setting = setting_of(wanted, capacity, shape, device)
        self.engine = Engine(self.method, wanted.config, self.setting, device)
        self.budget: Budget | None = None if family(wanted.method) == "bound" else self.setting.budget
        self.broadcast: type = get_type_hints(self.method.server.broadcast)["return"]  # type: ignore[attr-defined]

    @staticmethod
    @lru_cache(maxsize=2)
    def of(text: str, capacity: int, device: str) -> "Made":
        """Return what a plan makes, made once."""
        return Made(text, capacity, device)

    def handler(self, name: str) -> Callable[..., Any]:
        """Return the answer of this name; nothing else of a client can be called."""
        found: Callable[..., Any] | None = getattr(type(self.engine.client), name, None)
        if not getattr(found, "is_remote", False):
            raise UserError(f"a client of this method has no answer {name!r}")
        assert found is not None
        return found


def _safe(experiment: str) -> str:
    if not experiment.isalnum():
        raise UserError(f"{experiment!r} is no experiment; it takes letters and digits")
    return experiment
