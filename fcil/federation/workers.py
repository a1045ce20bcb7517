"""Workers: processes that answer for clients side by side on the CPU.

They live as long as the run. Words go to them through a socket, tensors through shared memory that is written in place
again and again: a message once for all of them. Images and memory come with each question, so a worker knows no more
than the client it answers for. Every answer computes with one thread in whatever process, so its bits are the same.
This is the end of the line in the run's own process; the other end is desk.py.
"""

import multiprocessing
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import BaseContext
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fcil.errors import UserError
from fcil.federation.calls import Answered, Call, Question
from fcil.federation.desk import Trouble, serve
from fcil.federation.shared import Block, Shelf, Wire
from fcil.method import Method, Setting, reply_type
from fcil.records import Weights, flatten, unflatten

QUEUED = 2  # questions that a worker has at a time: while it answers one, the next is there already
AHEAD = 3  # answers per worker that may be there before their turn
AT_ONCE = 32  # questions per worker that are put together

PRELOADED = ["torch", "torch._dynamo", serve.__module__]  # an optimizer imports the second one when it is first used


class Worker:
    """A process, the line to it, and what it was asked."""

    def __init__(self, context: BaseContext, job: tuple[Any, ...]):
        ours, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, os.getpid(), *job), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()
        self.wire = Wire(ours, self.process.pid)
        self.shelf = Shelf([self.wire])
        self.asked: list[int] = []  # positions of the questions it has, in order
        self.ready = False


class Outcome(NamedTuple):
    """What came of a question: an answer, or what went wrong."""

    reply: Weights
    memory: Weights | None  # where it changed
    measured: tuple[int, float, int]
    error: BaseException | None = None


class Workers:
    """Answers for clients as an engine does, in several processes."""

    def __init__(
        self, load: Callable[[str], Method], name: str, config: Any, setting: Setting, many: int, source: str = ""
    ):
        if multiprocessing.current_process().daemon:
            raise UserError("a daemonic process may start no workers; use --workers 1 to do without them")
        self.running, self.at_once = many, AT_ONCE * many
        values = {knob.name: getattr(config, knob.name) for knob in fields(config)}
        job = (load, name, values, source, setting, torch.get_default_dtype())
        try:
            with _quietly():
                self.crew = [Worker(_context(), job) for _ in range(many)]
        except (OSError, EOFError) as error:
            raise UserError(
                f"worker processes cannot be started here ({error}); use --workers 1 to do without them"
            ) from error
        self._messages = Shelf([worker.wire for worker in self.crew])
        self._homes: dict[int, Worker] = {}  # who answered for a client last, and may have things cached for it
        mine = [(worker.process, worker.wire.line) for worker in self.crew]
        self._end = weakref.finalize(self, _end, os.getpid(), mine)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._end()

    @property
    def closed(self) -> bool:
        """Whether the processes have been ended."""
        return not self._end.alive

    def ready(self) -> bool:
        """Tell, without waiting, whether all of them could answer now."""
        while late := [worker.wire.line for worker in self.crew if not worker.ready]:
            if not connection.wait(late, timeout=0):
                return False
            self._collect({}, waiting=False)
        return True

    def receive(self, message: Any) -> Any:
        """Pass a message on as it is."""
        return message

    def answers(
        self, questions: Sequence[Question], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[Answered]:
        """Let clients answer side by side; their order is that of the questions, none of whom may be asked twice."""
        if self.closed:
            raise RuntimeError("these workers have been ended")
        try:
            self._settle()
            asking = Asking(questions, handler.__name__, call, self._messages.put(flatten(message)))
            kind = reply_type(handler)
            for position, asked in enumerate(questions):
                while position not in asking.outcomes:
                    self._hand_out(asking, position)
                    self._collect(asking.outcomes)
                self._hand_out(asking, position + 1)
                yield _answered(asking.outcomes.pop(position), asked, kind)
        except GeneratorExit:  # what is still under way is waited for when there is something else to do
            raise
        except BaseException:
            self.close()
            raise

    def _settle(self) -> None:
        """Wait until all workers are there and none is busy with what nobody wants any more."""
        while any(worker.asked or not worker.ready for worker in self.crew):
            self._collect({})

    def _hand_out(self, asking: "Asking", turn: int) -> None:
        """Give questions to workers that have room for them, first to those with nothing to do."""
        for queued in range(QUEUED):
            for worker in self.crew:
                todo = [p for p in asking.todo if p < turn + AHEAD * len(self.crew)]
                if len(worker.asked) == queued and todo and (queued == 0 or len(asking.todo) >= len(self.crew)):
                    position = self._chosen(worker, todo, asking.questions)
                    asking.todo.remove(position)
                    self._ask(worker, position, asking)

    def _chosen(self, worker: Worker, todo: list[int], questions: Sequence[Question]) -> int:
        """Return a client that this worker knows, or that no other one does, or the last that the other would take."""
        homes = {position: self._homes.get(questions[position].who) for position in todo}
        known = (position for position, home in homes.items() if home is worker)
        new = (position for position, home in homes.items() if home is None)
        return next(known, next(new, todo[-1]))

    def _ask(self, worker: Worker, position: int, asking: "Asking") -> None:
        asked = asking.questions[position]
        data = asked.data()
        held = {"images": data.images, "labels": data.labels}
        self._homes[asked.who] = worker
        block = worker.shelf.put(flatten(asked.memory), held)
        words = (asked.who, asking.handler, tuple(asking.call), data.task, asked.version)
        worker.asked.append(position)
        with self._alive(worker):
            worker.wire.send(words, asking.message, block)

    def _collect(self, outcomes: dict[int, Outcome], waiting: bool = True) -> None:
        """Take in what has come, and wait for the first thing to come."""
        busy = {worker.wire.line: worker for worker in self.crew if worker.asked or not worker.ready}
        for line in connection.wait(list(busy), timeout=None if waiting else 0):
            worker = busy[line]  # type: ignore[index]
            with self._alive(worker):
                words, found = worker.wire.receive(False)
            error = words.error() if isinstance(words, Trouble) else None
            if not worker.ready:
                worker.ready = True
                if error is not None:
                    self.close()
                    raise error
                continue
            position = worker.asked.pop(0)
            if error is not None:
                outcomes[position] = Outcome({}, None, (0, 0.0, 0), error)
            else:
                flats = found[0]
                outcomes[position] = Outcome(flats[0], flats[1] if len(flats) > 1 else None, words)

    @contextmanager
    def _alive(self, worker: Worker) -> Iterator[None]:
        """Say it plainly where a worker has died."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            worker.process.join(5)
            code = worker.process.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else "ended"
            why = ", as happens where memory runs out" if code == -signal.SIGKILL else ""
            raise UserError(
                f"a worker process {how}{why}; the same command goes on; --workers 1 does without them"
            ) from error


class Asking:
    """The questions of one call, and what came of those that were answered before their turn."""

    def __init__(self, questions: Sequence[Question], handler: str, call: Call, message: Block):
        self.questions, self.handler, self.call, self.message = questions, handler, call, message
        self.todo = list(range(len(questions)))
        self.outcomes: dict[int, Outcome] = {}


def _answered(outcome: Outcome, asked: Question, kind: type) -> Answered:
    if outcome.error is not None:
        raise outcome.error
    if outcome.memory is not None:
        own = {name: tensor.clone() for name, tensor in outcome.memory.items()}
        changed = unflatten(type(asked.memory), own)
        for field in fields(changed):
            setattr(asked.memory, field.name, getattr(changed, field.name))
    kept, loss, images = outcome.measured
    return Answered(unflatten(kind, outcome.reply), kept, loss, images)


def _context() -> Any:
    """Return a way to start processes that copies no threads, and that has the heavy imports done once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def prepare() -> None:
    """Let the imports of the first workers begin, without waiting for them."""
    if _context().get_start_method() == "forkserver":
        with _quietly():
            forkserver.ensure_running()


@contextmanager
def _quietly() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach, and that do not run the user's script again."""
    resource_tracker.ensure_running()  # it would let signals through again
    main, before = sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(owner: int, crew: "list[tuple[Any, connection.Connection[Any, Any]]]") -> None:
    if os.getpid() != owner:  # a copy of the parent that was forked off has no workers of its own
        return
    for process, _ in crew:
        process.kill()
    for process, line in crew:
        process.join()
        process.close()
        line.close()
