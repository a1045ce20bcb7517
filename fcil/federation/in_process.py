"""Clients in this process: the simulation."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from fcil.errors import UserError
from fcil.federation.calls import Answered, Call, Question
from fcil.federation.engine import Engine
from fcil.records import flatten, keep_no_more
from fcil.scenario.memory import Budget
from fcil.scenario.reach import handing_over
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import LocalData, Task

MOST_CACHES = 128  # clients whose images and what is derived from them are kept at hand at a time
LOCAL = ""  # under which a client's images are kept, beside what methods derive


class Crew(Protocol):
    """Those that may answer in place of the engine: see workers."""

    @property
    def at_once(self) -> int:
        """How many questions are put together."""
        ...

    def receive(self, message: Any) -> Any:
        """Bring a message to where it is answered."""

    def answers(
        self, questions: Sequence[Question], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[Answered]:
        """Let clients answer, in the order of the questions."""
        ...

    @property
    def running(self) -> int:
        """How many processes answer."""
        ...

    def close(self) -> None:
        """Let go of what they hold."""


class InProcess:
    """A transport whose clients are records: a memory each, made when first needed."""

    def __init__(
        self,
        engine: Engine,
        scenario: Scenario,
        memory: Callable[[], Any],
        budget: Budget | None,
        crew: Crew | None = None,
    ):
        self.engine, self.scenario, self.memory, self.budget = engine, scenario, memory, budget
        self.crew, self.answering = crew, crew or engine
        self.memories: dict[int, Any] = {}
        self.versions: dict[int, int] = {}  # how often each of them has changed
        self.changed: set[int] = set()  # whose memory the next checkpoint must hold
        self.caches: dict[int, dict[str, Any]] = {}

    def close(self) -> None:
        """End the processes that answer, where there are any."""
        if self.crew is not None:
            self.crew.close()

    def described(self) -> str:
        """Say in words how clients are trained."""
        return self.engine.described(self.crew.running if self.crew else 0)

    def begin(self, task: Task) -> None:
        """Let the data of `task` arrive at every client."""
        self.task = task
        self.caches.clear()

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered]]:
        """Let the clients answer, some at a time; the order stays."""
        message = self.answering.receive(message)
        for group in _groups(who, self.answering.at_once):
            questions = [self._question(client) for client in group]
            before = deque(snapshot(question.memory) for question in questions)
            answers = self.answering.answers(questions, handler, message, call)
            for question, answered in zip(questions, answers, strict=True):
                client = question.who
                if differ(before.popleft(), snapshot(question.memory)):
                    keep_no_more(question.memory)
                    self.memories[client] = question.memory
                    self.versions[client] = self.versions.get(client, 0) + 1
                    self.changed.add(client)
                    self.caches.pop(client, None)  # what was derived from the old memory
                    self._weigh(client, handler, answered.kept)
                yield client, answered
        self.engine.settle()  # what a GPU still does belongs to this question's time

    def _question(self, client: int) -> Question:
        def data() -> LocalData:
            cache = cache_of(self.caches, client)
            if LOCAL not in cache:
                with handing_over():  # the server's script waits meanwhile
                    cache[LOCAL] = self.scenario.local(client, self.task)
            held: LocalData = cache[LOCAL]
            return replace(held, cache=cache)

        memory = self.memories[client] if client in self.memories else self.memory()
        return Question(client, memory, data, self.versions.get(client, 0))

    def _weigh(self, client: int, handler: Callable[..., Any], kept: int) -> None:
        if self.budget is not None and kept > (limit := self.budget.at(self.task)):
            raise UserError(
                f"client {client} keeps {kept:,} bytes after {handler.__name__} of task {self.task.index + 1}; "
                f"the benchmark allows {limit:,} (set memory to change it)"
            )


def cache_of(caches: dict[int, dict[str, Any]], client: int) -> dict[str, Any]:
    """Return what was derived for a client so far; of too many, what was unused for longest goes and is made again."""
    cache = caches.pop(client, {})
    caches[client] = cache
    if len(caches) > MOST_CACHES:
        del caches[next(iter(caches))]
    return cache


def snapshot(memory: Any) -> dict[str, Any]:
    """Return what tells one state of a memory from the next without reading its tensors."""
    return {
        name: (tensor, 0 if tensor.is_inference() else tensor._version) if tensor.ndim else tensor.item()
        for name, tensor in flatten(memory).items()
    }


def differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Tell whether a memory has changed between two snapshots."""
    if before.keys() != after.keys():
        return True
    for old, new in zip(before.values(), after.values(), strict=True):
        same = (
            old[0] is new[0] and old[1] == new[1] if isinstance(old, tuple) and isinstance(new, tuple) else old == new
        )
        if not same:
            return True
    return False


def _groups(who: Sequence[int], most: int) -> Iterator[list[int]]:
    """Split clients into groups in which nobody is twice: the second answer needs the memory of the first."""
    group: list[int] = []
    for client in who:
        if len(group) == most or client in group:
            yield group
            group = []
        group.append(client)
    if group:
        yield group
