"""The loop or workers: whichever is faster for what is left of a run."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fcil.errors import UserError
from fcil.federation.calls import Answered, Call, Question
from fcil.federation.engine import Engine, cores
from fcil.federation.workers import AT_ONCE, Workers, prepare
from fcil.method import Method
from fcil.scenario.scenario import Scenario

STARTING = 3.0  # seconds that it takes to start workers
TRIED = 3  # rounds after which workers must have been faster than the loop


class Adaptive:
    """The loop, until workers pay: they are started while it goes on, and ended if they turn out slower."""

    def __init__(self, engine: Engine, start: Callable[[], Workers], many: int, tasks: int):
        self.engine, self.start, self.many, self.tasks = engine, start, many, tasks
        self.at_once = AT_ONCE * many
        self.workers: Workers | None = None
        self.stays = many < 2 or multiprocessing.current_process().daemon  # with the loop, for good
        self._began = 0.0  # when it was decided to start them
        self._loop: dict[str, list[float]] = {}  # seconds an answer took, by handler
        self._crew: dict[str, list[float]] = {}
        self._slower: set[str] = set()  # handlers for which the loop has turned out to be faster
        self._asked = (0, 0)  # the last question, and of how many clients so far

    @property
    def running(self) -> int:
        """How many processes answer."""
        return self.many if self._crew and self.workers is not None and not self.workers.closed else 1

    def receive(self, message: Any) -> Any:
        """Pass a message on as it is."""
        return message

    def close(self) -> None:
        """End the workers, if there are any."""
        self.stays = True
        if self.workers is not None:
            self.workers.close()

    def answers(
        self, questions: Sequence[Question], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[Answered]:
        """Let clients answer in the way that is faster."""
        crew = self._there() if len(questions) > 1 and handler.__name__ not in self._slower else None
        start = time.perf_counter()
        yield from (crew or self.engine).answers(questions, handler, message, call)
        times = (self._crew if crew else self._loop).setdefault(handler.__name__, [])
        times.append((time.perf_counter() - start) / max(1, len(questions)))
        if crew is None:
            self._asked = (call.step, len(questions) + (self._asked[1] if self._asked[0] == call.step else 0))
            self._consider(min(times) if len(times) > 1 else 0.0, self._asked[1], call)  # the first one also imports
        elif len(times) == TRIED and min(times) > min(self._loop.get(handler.__name__, times)):
            self._slower.add(handler.__name__)
            if self._slower == self._crew.keys():
                self.close()

    def _there(self) -> Workers | None:
        """Return the workers if they can answer."""
        if self.stays or self.workers is None:
            return None
        try:
            return self.workers if self.workers.ready() else None
        except UserError:
            self.close()
            return None

    def _consider(self, each: float, questions: int, call: Call) -> None:
        """Start workers where they save more than it costs to start them, given what is left of the run."""
        if self.stays or self.workers is not None:
            return
        if self._began:
            if time.perf_counter() - self._began >= STARTING:  # by now the imports are done
                try:
                    self.workers = self.start()
                except UserError:  # the loop needs nothing
                    self.stays = True
            return
        rounds = (self.tasks - call.task) * call.rounds - call.round - 1
        saved = rounds * questions * each * (1 - 1 / max(1, min(self.many, questions)))
        if saved > STARTING:
            self._began = time.perf_counter()
            prepare()


def crew(
    workers: int,
    engine: Engine,
    scenario: Scenario,
    load: Callable[[str], Method],
    name: str,
    config: Any,
    source: str = "",
) -> Workers | Adaptive | None:
    """Return who answers in place of an engine on the CPU: with 0 workers whatever is faster, with 1 nobody.

    There are never more than clients in a round, however many are asked for.
    """
    if workers < 0:
        raise UserError(f"workers={workers} is not allowed; workers takes whole numbers at least 0")
    if workers == 1:
        return None
    many = min(workers or cores(), scenario.benchmark.active)  # nobody else has anything to do in a round
    if workers and many == 1:
        return None

    def start() -> Workers:
        return Workers(load, name, config, engine.setting, many, source)

    return start() if workers else Adaptive(engine, start, many, len(scenario.tasks))
