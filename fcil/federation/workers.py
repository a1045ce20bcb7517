"""Workers: processes that answer for clients side by side on the CPU.

They live as long as the run. Words go to them through a socket, tensors through shared memory that is written in place
again and again: a message once for all of them. Images and memory come with each question, so a worker knows no more
than the client it answers for. Every answer computes with one thread in whatever process, so its bits are the same.
"""

import builtins
import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from itertools import count
from math import prod
from multiprocessing import connection, forkserver, reduction, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, get_type_hints

import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.federation.calls import Answered, Call, Question
from fcil.federation.engine import Engine, cores
from fcil.federation.in_process import cache_of, differ, snapshot
from fcil.files import sha256
from fcil.method import Method, Setting, reply_type
from fcil.records import Weights, flatten, unflatten
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import LocalData, Task

QUEUED = 2  # questions that a worker has at a time: while it answers one, the next is there already
AHEAD = 3  # answers per worker that may be there before their turn
AT_ONCE = 32  # questions per worker that are put together
SMALL = 65_536  # bytes up to which a tensor is copied out of shared memory, so that it does not keep a block from use
MOST_WORDS = 30_000  # of an error
MOST_LENT = 64  # blocks that one end looks at; what comes beyond them is copied out
ALIGNED = 64  # bytes, as PyTorch aligns its own
STARTING = 3.0  # seconds that it takes to start workers
TRIED = 3  # rounds after which workers must have been faster than the loop
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h

PRELOADED = ["torch", "torch._dynamo", __name__]  # an optimizer imports the second one when it is first used


# -- shared memory ----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a tensor lies in a block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # None: contiguous
    at: int

    def view(self, memory: Any) -> Tensor:
        """Return the tensor that lies here; it keeps `memory` alive."""
        dtype, numbers = getattr(torch, self.dtype), prod(self.shape)
        if not numbers:
            return torch.empty(self.shape, dtype=dtype)
        flat = torch.frombuffer(memory, dtype=dtype, count=numbers, offset=self.at)
        return flat.view(self.shape) if self.strides is None else flat.as_strided(self.shape, self.strides)


class Layout(NamedTuple):
    """Where the tensors of some flat records lie in a block: small ones first."""

    records: tuple[tuple[Place, ...], ...]
    small: int  # where the small ones end
    end: int

    @staticmethod
    def of(flats: Sequence[Weights]) -> "Layout":
        """Lay records out."""
        rooms = [[-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in flat.values()] for flat in flats]
        small = sum(room for some in rooms for room in some if room <= SMALL)
        near, far, records = 0, small, []
        for flat, some in zip(flats, rooms, strict=True):
            places = []
            for (name, tensor), room in zip(flat.items(), some, strict=True):
                dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
                strides = None if tensor.is_contiguous() else torch.empty_like(tensor).stride()
                places.append(Place(name, dtype, shape, strides, near if room <= SMALL else far))
                near, far = (near + room, far) if room <= SMALL else (near, far + room)
            records.append(tuple(places))
        return Layout(tuple(records), small, far)

    @staticmethod
    def read(text: bytes) -> "Layout":
        """Invert `json.dumps`."""
        records, small, end = json.loads(text)
        return Layout(tuple(tuple(Place(*place) for place in places) for places in records), small, end)


class Block:
    """Shared memory that is mapped once and written many times."""

    def __init__(self, number: int, size: int, fd: int):
        self.number, self.size, self.fd = number, size, fd
        self.memory = mmap.mmap(fd, size)
        self.layout: Layout | None = None
        self.head = 0  # bytes of the layout in words, which stands after the tensors
        self.edition = 0  # how often the layout has changed
        self.lent = 0  # readings that were not given back; only its owner counts
        self._views: list[Tensor] = []

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the descriptor; what is mapped stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def write(self, flats: Sequence[Weights], layout: Layout, head: bytes) -> None:
        """Copy records into the block."""
        if layout != self.layout:
            self.layout, self.head, self.edition = layout, len(head), self.edition + 1
            self.memory[layout.end : layout.end + len(head)] = head
            self._views = [p.view(self.memory) for places in layout.records for p in places if prod(p.shape)]
        tensors = [tensor for flat in flats for tensor in flat.values() if tensor.numel()]
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._views, tensors)

    def read(self, edition: int, end: int, head: int, own: bool) -> "tuple[list[Weights], weakref.ref[Any] | None]":
        """Return the records, in place but for small tensors, and what tells whether anyone still looks at them."""
        if edition != self.edition or self.layout is None:
            self.layout, self.edition = Layout.read(self.memory[end : end + head]), edition
        copied = self.layout.end if own else self.layout.small
        mine = torch.empty(copied, dtype=torch.uint8)
        if copied:
            mine.copy_(torch.frombuffer(self.memory, dtype=torch.uint8, count=copied))
        near, far = mine.numpy(), memoryview(self.memory)
        flats = [{p.name: p.view(near if p.at < copied else far) for p in places} for places in self.layout.records]
        return flats, None if copied == self.layout.end else weakref.ref(far)


class Shelf:
    """Blocks of one owner, none of which is written while another process looks at it."""

    numbers = count()

    def __init__(self, wires: "Sequence[Wire]"):
        self.wires, self.blocks = wires, list[Block]()

    def put(self, *flats: Weights) -> Block:
        """Write records into a block that is free."""
        layout, free = Layout.of(flats), [block for block in self.blocks if not block.lent]
        for block in free:
            if block.layout == layout:
                block.write(flats, layout, b"")
                return block
        head = json.dumps(layout).encode()
        need = layout.end + len(head)
        fitting = sorted((block for block in free if block.size >= need), key=lambda block: block.size)
        if not fitting:
            for block in free:
                self._drop(block)
            fitting = [_shared(next(self.numbers), need + need // 8)]
            self.blocks += fitting
        fitting[0].write(flats, layout, head)
        return fitting[0]

    def _drop(self, block: Block) -> None:
        self.blocks.remove(block)
        block.close()
        for wire in self.wires:
            wire.forget(block)


def _shared(number: int, size: int) -> Block:
    size = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = -1
    try:
        fd = _anonymous()
        os.ftruncate(fd, size)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)  # else a lack of memory would be a SIGBUS later on
        return Block(number, size, fd)
    except (OSError, ValueError) as error:
        if fd >= 0:
            os.close(fd)
        raise UserError(
            f"there is no room for {size / 2**20:,.1f} MiB of memory shared with worker processes ({error}); "
            "set workers=1 to do without them"
        ) from error


def _anonymous() -> int:
    """Return a file without a name: in memory, whatever the size of /dev/shm, where the system has such files."""
    if sys.platform == "linux":
        with suppress(OSError):
            return os.memfd_create("fcil")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Wire:
    """One end of the line between two processes; every reading of a block is a loan that is given back."""

    def __init__(self, line: "connection.Connection[Any, Any]", pid: int):
        self.line, self._pid = line, pid
        self._lent: dict[int, Block] = {}  # ours, as the other end knows them
        self._gone: list[int] = []  # ours, that the other end can forget
        self._seen: dict[int, Block] = {}  # theirs
        self._looking: list[tuple[int, weakref.ref[Any]]] = []  # at theirs
        self._back: list[int] = []

    def send(self, words: Any, *blocks: Block) -> None:
        """Send words, and blocks to be read."""
        for number, looked in self._looking:
            if looked() is None:
                self._back.append(number)
        self._looking = [(number, looked) for number, looked in self._looking if looked() is not None]
        shown = []
        for block in blocks:
            assert block.layout is not None
            shown.append((block.number, block.size, block.edition, block.layout.end, block.head))
            block.lent += 1
        self.line.send((words, shown, self._back, self._gone))
        self._back, self._gone = [], []
        for block in blocks:
            if block.number not in self._lent:
                reduction.send_handle(self.line, block.fd, self._pid)
                self._lent[block.number] = block

    def receive(self, *own: bool) -> tuple[Any, list[list[Weights]]]:
        """Return words, and the records in each block; `own` says of each whether all of it is to be copied out."""
        words, shown, back, gone = self.line.recv()
        for number in back:
            self._lent[number].lent -= 1
        for number in gone:
            del self._seen[number]
        found = []
        for (number, size, edition, end, head), mine in zip(shown, own, strict=False):
            if number not in self._seen:
                self._seen[number] = Block(number, size, reduction.recv_handle(self.line))
                self._seen[number].close()
            flats, looked = self._seen[number].read(edition, end, head, mine or len(self._looking) >= MOST_LENT)
            if looked is None:
                self._back.append(number)
            else:
                self._looking.append((number, looked))
            found.append(flats)
        return words, found

    def forget(self, block: Block) -> None:
        """Tell the other end, when it is next told anything, that a block is no longer used."""
        if self._lent.pop(block.number, None) is not None:
            self._gone.append(block.number)


# -- in the parent ----------------------------------------------------------------------------------------------------


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
            raise UserError("a daemonic process may start no workers; set workers=1 to do without them")
        self.many, self.at_once = many, AT_ONCE * many
        values = {knob.name: getattr(config, knob.name) for knob in fields(config)}
        with _quietly():
            job = (load, name, values, source, setting, torch.get_default_dtype())
            self.crew = [Worker(_context(), job) for _ in range(many)]
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
                f"a worker process {how}{why}; set fewer workers, or workers=1 to do without them"
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


# -- in a worker ------------------------------------------------------------------------------------------------------


class Trouble(NamedTuple):
    """An error on its way to the parent."""

    kind: str
    said: str
    trace: str

    @staticmethod
    def of(error: Exception) -> "Trouble":
        """Put an error into words."""
        return Trouble(type(error).__name__, str(error)[:MOST_WORDS], traceback.format_exc()[-MOST_WORDS:])

    def error(self) -> Exception:
        """Return the error again, for its kind if that is a common one, with where it happened as its cause."""
        if self.kind == UserError.__name__:
            return UserError(self.said)
        kind = getattr(builtins, self.kind, None)
        error: Exception = RuntimeError(f"{self.kind}: {self.said}")
        if isinstance(kind, type) and issubclass(kind, Exception):
            with suppress(TypeError):  # some want more than a sentence
                error = kind(self.said)
        error.__cause__ = Traceback(self.trace)
        return error


class Traceback(Exception):
    """What a worker was doing when an error happened, as text."""

    def __str__(self) -> str:
        return f"in a worker process\n\n{self.args[0]}"


def serve(
    line: "connection.Connection[Any, Any]", parent: int, load: Callable[[str], Method], name: str,
    values: Mapping[str, Any], source: str, setting: Setting, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Answer questions until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    keep_memory()
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    wire = Wire(line, parent)
    try:
        if source and sha256(Path(name)) != source:
            raise UserError(f"{name} has changed since the run was begun; start it again in another folder")
        made = load(name)
        desk = Desk(made, Engine(made, replace(made.config(), **values), setting), Shelf([wire]))
    except Exception as error:
        wire.send(Trouble.of(error))
        return
    wire.send("ready")
    with suppress(EOFError, ConnectionError):
        while True:
            desk.answer_one(wire)


class Desk:
    """Where a worker answers: an engine, and what was derived for clients that it has answered for."""

    def __init__(self, method: Method, engine: Engine, shelf: Shelf):
        self.engine, self.client, self.kind, self.shelf = engine, method.client, type(method.memory()), shelf
        self.task = -1
        self.caches: dict[int, dict[str, Any]] = {}
        self.versions: dict[int, int] = {}  # of the memories they were derived from

    def answer_one(self, wire: Wire) -> None:
        """Take one question and answer it."""
        words, found = wire.receive(False, True)
        said: Any
        try:
            said, blocks = self._answered(words, found)
        except Exception as error:
            said, blocks = Trouble.of(error), []
        del found  # the message is given back with the answer
        wire.send(said, *blocks)

    def _answered(self, words: Any, found: list[list[Weights]]) -> tuple[Any, list[Block]]:
        who, name, call, task, version = words
        handler = getattr(self.client, name)
        message = unflatten(get_type_hints(handler)["message"], found[0][0])
        memory, held = unflatten(self.kind, found[1][0]), found[1][1]
        data = LocalData(task, held["images"], held["labels"], cache=self._cache(who, task, version))
        before = snapshot(memory)
        answered = self.engine.answer(who, handler, memory, data, message, Call(*call))
        flats = [flatten(answered.reply)]
        if differ(before, snapshot(memory)):
            flats.append(flatten(memory))
            self.caches.pop(who, None)
        return (answered.kept, float(answered.loss), answered.images), [self.shelf.put(*flats)]

    def _cache(self, who: int, task: Task, version: int) -> dict[str, Any]:
        if task.index != self.task:
            self.task = task.index
            self.caches.clear()
        if self.versions.get(who) != version:
            self.versions[who] = version
            self.caches.pop(who, None)
        return cache_of(self.caches, who)


def keep_memory() -> None:
    """Let this process keep the memory that it frees: getting it anew takes longer than a small training needs it."""
    with suppress(AttributeError, OSError):  # where the C library is another one
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)


def _end_with_the_parent() -> NoReturn:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


# -- which of the two -------------------------------------------------------------------------------------------------


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
        crew = self._there() if len(questions) > 1 else None
        start = time.perf_counter()
        yield from (crew or self.engine).answers(questions, handler, message, call)
        times = (self._crew if crew else self._loop).setdefault(handler.__name__, [])
        times.append((time.perf_counter() - start) / max(1, len(questions)))
        if crew is None:
            self._consider(min(times) if len(times) > 1 else 0.0, len(questions), call)  # the first one also imports
        elif len(times) == TRIED and min(times) > min(self._loop.get(handler.__name__, times)):
            self.close()

    def _there(self) -> Workers | None:
        """Return the workers if they can answer."""
        if self.stays or self.workers is None:
            return None
        try:
            return self.workers if self.workers.ready() else None
        except UserError:  # they cannot be had: the loop needs nothing
            self.close()
            return None

    def _consider(self, each: float, questions: int, call: Call) -> None:
        """Start workers where they save more than it costs to start them, given what is left of the run."""
        if self.stays or self.workers is not None:
            return
        if self._began:
            if time.perf_counter() - self._began >= STARTING:  # by now the imports are done
                self.workers = self.start()
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
    """Return who answers in place of an engine on the CPU: with 0 workers whatever is faster, with 1 nobody."""
    if workers < 0:
        raise UserError(f"workers={workers} is not allowed; workers takes whole numbers at least 0")
    if workers == 1:
        return None
    many = workers or min(cores(), scenario.benchmark.active)

    def start() -> Workers:
        return Workers(load, name, config, engine.setting, many, source)

    return start() if workers else Adaptive(engine, start, many, len(scenario.tasks))
