"""Clients in this process: the simulation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fcil.errors import UserError
from fcil.federation.calls import Answered, Call, Question
from fcil.federation.engine import Engine
from fcil.records import flatten
from fcil.scenario.memory import Budget
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import LocalData, Task

MOST_CACHES = 128  # clients whose derived data is kept at a time


class InProcess:
    """A transport whose clients are records: a memory each, made when first needed."""

    def __init__(self, engine: Engine, scenario: Scenario, memory: Callable[[], Any], budget: Budget | None):
        self.engine, self.scenario, self.memory, self.budget = engine, scenario, memory, budget
        self.memories: dict[int, Any] = {}
        self.changed: set[int] = set()  # whose memory the next checkpoint must hold
        self.caches: dict[int, dict[str, Any]] = {}

    def begin(self, task: Task) -> None:
        """Let the data of `task` arrive at every client."""
        self.task = task
        self.caches.clear()

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered]]:
        """Let the clients answer, some at a time; the order stays."""
        message, some = self.engine.receive(message), self.engine.at_once
        for group in (who[first : first + some] for first in range(0, len(who), some)):
            questions = [self._question(client) for client in group]
            before = [_snapshot(question.memory) for question in questions]
            answers = self.engine.answers(questions, handler, message, call)
            for question, old, answered in zip(questions, before, answers, strict=True):
                client = question.who
                if _differ(old, _snapshot(question.memory)):
                    self.memories[client] = question.memory
                    self.changed.add(client)
                    self.caches.pop(client, None)  # what was derived from the old memory
                    self._weigh(client, handler, answered.kept)
                yield client, answered

    def _question(self, client: int) -> Question:
        def data() -> LocalData:
            return replace(self.scenario.local(client, self.task), cache=self._cache(client))

        return Question(client, self.memories[client] if client in self.memories else self.memory(), data)

    def _cache(self, client: int) -> dict[str, Any]:
        cache = self.caches.pop(client, {})
        self.caches[client] = cache  # last: the longest unused one is dropped first, and made again if it is needed
        if len(self.caches) > MOST_CACHES:
            del self.caches[next(iter(self.caches))]
        return cache

    def _weigh(self, client: int, handler: Callable[..., Any], kept: int) -> None:
        if self.budget is not None and kept > (limit := self.budget.at(self.task)):
            raise UserError(
                f"client {client} keeps {kept:,} bytes after {handler.__name__} of task {self.task.index + 1}; "
                f"the benchmark allows {limit:,} (set memory to change it)"
            )


def _snapshot(memory: Any) -> dict[str, Any]:
    """Return what tells one state of a memory from the next without reading its tensors."""
    return {
        name: (tensor, 0 if tensor.is_inference() else tensor._version) if tensor.ndim else tensor.item()
        for name, tensor in flatten(memory).items()
    }


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if before.keys() != after.keys():
        return True
    for old, new in zip(before.values(), after.values(), strict=True):
        same = (
            old[0] is new[0] and old[1] == new[1] if isinstance(old, tuple) and isinstance(new, tuple) else old == new
        )
        if not same:
            return True
    return False
