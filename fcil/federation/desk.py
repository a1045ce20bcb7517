"""Where a worker process answers for clients: the far end of the line that workers.py holds."""

import builtins
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_type_hints

import torch

from fcil.errors import UserError
from fcil.federation.calls import Call
from fcil.federation.engine import Engine
from fcil.federation.in_process import cache_of, differ, snapshot
from fcil.federation.shared import Block, Shelf, Wire
from fcil.files import sha256
from fcil.machine import keep_memory
from fcil.method import Method, Setting
from fcil.records import Weights, flatten, unflatten
from fcil.scenario.tasks import LocalData, Task

MOST_WORDS = 30_000  # of an error


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
    with suppress(EOFError, ConnectionError):
        wire.send("ready")
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


def _end_with_the_parent() -> NoReturn:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
