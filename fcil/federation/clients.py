"""The door: the one way between a server and its clients."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fcil import __version__
from fcil.errors import UserError
from fcil.federation import privacy
from fcil.federation.calls import Answered, Call, Origin
from fcil.federation.replies import Replies
from fcil.federation.trust import Form, Judge, Verdict
from fcil.method import reply_type
from fcil.records import flatten, size_in_bytes, unflatten
from fcil.scenario import benchmarks
from fcil.scenario.tasks import Task


class Participants(Protocol):
    """Who takes part when: drawn by a scenario, or the nodes of a deployment."""

    capacity: int  # classes that there is room for

    def begin(self, task: Task) -> None:
        """Let the images of `task` arrive."""

    def present(self, task: Task) -> list[int]:
        """Return the clients that are there in a task."""
        ...

    def sample(self, task: Task, name: str, round: int) -> list[int]:
        """Return the clients of a round."""
        ...

    def loses(self, client: int, task: Task, where: str, times: int) -> bool:
        """Tell whether a message is made to be lost on its way to a client."""
        ...


MOST_TRIES = 10  # of a question that too few answer, where nobody else says how long to wait
log = logging.getLogger("fcil")


class Transport(Protocol):
    """What carries questions to clients and answers back: this process, or Flower."""

    def begin(self, task: Task) -> None:
        """Let the data of `task` arrive at every client."""

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered]]:
        """Yield (client, answer) in the order of `who`, as they come; those that do not answer are left out."""
        ...


@dataclass
class Cursor:
    """Where the run stands: with the server's state and the memories, all that a resumed run needs."""

    task: int = 0
    step: int = 0
    once: list[str] = field(default_factory=list)  # parts of this task that are done
    rounds: dict[str, int] = field(default_factory=dict)  # rounds done in this task, by stage
    asked: dict[str, int] = field(default_factory=dict)  # how often each question was asked in this task, by round
    kept: dict[int, int] = field(default_factory=dict)  # bytes in each client's memory

    def enter(self, task: int) -> None:
        """Stand at the beginning of a task."""
        self.task, self.once, self.rounds, self.asked = task, [], {}, {}


@dataclass
class Tally:
    """What passed the door since it was last looked at."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    down: int = 0
    up: int = 0
    clients: int = 0
    lost: int = 0
    losses: list[Any] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)  # clients whose training was let in
    diverged: set[int] = field(default_factory=set)  # those whose numbers are not finite
    refused: list[dict[str, Any]] = field(default_factory=list)  # whose reply to what, and why
    releases: Counter[str] = field(default_factory=Counter)  # sums that were made private, by what they are of

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the seconds inside to a part of the run."""
        start = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - start

    def loss(self) -> float | None:
        """Return the mean training loss, or None if nobody trained."""
        if not self.losses:
            return None
        return float(torch.stack([torch.as_tensor(x, dtype=torch.float64).cpu() for x in self.losses]).mean())

    def noted(self) -> dict[str, Any]:
        """Return what a ledger line says only where there is something to say."""
        found = {"refused": self.refused, "releases": dict(self.releases)}
        return {name: value for name, value in found.items() if value}


def tried(tries: int, sentence: str) -> None:
    """Give up on a question that too few have answered so many times: in a simulation nobody comes back later."""
    if tries == MOST_TRIES:
        raise UserError(f"{sentence}, in {tries} tries; set a smaller quorum")


class Door:
    """`Clients` for a server: asks over a transport, judges what comes, counts bytes, remembers how far it came."""

    def __init__(
        self,
        transport: Transport,
        scenario: Participants,
        protocol: benchmarks.Protocol,
        seed: int,
        cursor: Cursor | None = None,
        experiment: str = "",
        wait: Callable[[int, str], None] = tried,
        journal: Callable[[str], None] = lambda release: None,
        told: Callable[[int, str], None] = lambda client, why: None,
    ):
        privacy.ready(protocol)
        self.transport, self.scenario, self.protocol, self.seed = transport, scenario, protocol, seed
        self.cursor = cursor or Cursor()
        self.tally = Tally()
        self.experiment = experiment  # what every reply from another machine has to name
        self.wait = wait  # called with (tries, what is missing) before a question is asked again
        self.journal = journal  # told of everything private before anyone sees it: after a crash, twice of some
        self.told = told  # of every reply that is refused, at once
        self.usual: dict[str, dict[str, Form]] = {}  # what is said of a class looks like, by answer
        self.stage, self.round, self.of = "task", 0, 1
        self._open: Replies[Any] | None = None

    def begin(self, task: Task) -> None:
        """Let the data of `task` arrive at every client."""
        if task.index != self.cursor.task:
            self.cursor.enter(task.index)
        self.task = task
        self.stage, self.round, self.of = "task", 0, 1
        self._started: set[str] = set()
        self.scenario.begin(task)
        self.transport.begin(task)

    def sample(self) -> list[int]:
        """Return the clients of this round, from the scenario's seeded schedule."""
        return self.scenario.sample(self.task, self.stage, self.round)

    def everyone(self) -> list[int]:
        """Return all clients present."""
        return self.scenario.present(self.task)

    def once(self, name: str) -> bool:
        """Tell whether this part of the task is still to be done, and book it as done."""
        if name in self.cursor.once:
            return False
        self.cursor.once.append(name)
        return True

    def rounds(self, rounds: int = 0, stage: str = "train") -> Iterator[int]:
        """Count communication rounds; a round counts as done when the server yields at its end."""
        if stage in self._started:
            raise RuntimeError(f"a task has two loops of rounds called {stage!r}; give the second its own stage name")
        self._started.add(stage)
        total = rounds or self.protocol.rounds
        while (done := self.cursor.rounds.get(stage, 0)) < total:
            self.stage, self.round, self.of = stage, done, total
            self.cursor.rounds[stage] = done + 1
            yield done
        self.finish()
        self.stage, self.round, self.of = "task", 0, 1

    def ask(self, who: Sequence[int], handler: Callable[..., Any], message: Any) -> Replies[Any]:
        """Send `message` to each client in `who`, run `handler` there, return the replies that come."""
        if not getattr(handler, "is_remote", False):
            raise TypeError(f"{handler.__qualname__} is not marked @remote, so no server may call it")
        self.finish()
        self.cursor.step += 1
        message = unflatten(type(message), flatten(message))  # answers come later: the server may have moved on by then
        call = Call(self.seed, self.task.index, self.cursor.step, self.round, self.of, self.task.new)
        kind, name = reply_type(handler), handler.__name__
        private = None
        if self.protocol.dp != "off":
            private = privacy.Sums(kind, self.protocol, (self.seed, call.step), lambda field: self._book(name, field))
        answers = self._answers(list(who), handler, message, call)
        self._open = Replies(kind, answers, message, self.protocol, private)
        return self._open

    def finish(self) -> None:
        """See the last question through, so that nothing is under way."""
        if self._open is not None:
            self._open.finish()
            self._open = None

    def _answers(self, who: list[int], handler: Callable[..., Any], message: Any, call: Call) -> Iterator[Any]:
        """Yield the replies that are let in; ask those again who are missing, while they are too few."""
        kind, origin = reply_type(handler), Origin(self.experiment, __version__, call.step, handler.__name__)
        usual = self.usual.setdefault(handler.__qualname__, {}) if self.experiment else None
        judge = Judge(kind, message, origin, self.scenario.capacity, self.protocol, usual)
        self.tally.clients += len(who)
        self.tally.lost += len(who)
        missing, tries, why = who, 0, ""
        heard: set[int] = set()
        while True:
            came = set()
            for name in privacy.covered(kind) if self.protocol.dp == "local" and missing else ():
                self._book(handler.__name__, name)
            for verdict in judge.verdicts(self._delivered(missing, handler, message, call)):
                self.tally.lost -= verdict.client not in heard
                heard.add(verdict.client)
                if self._let_in(verdict, handler):
                    came.add(verdict.client)
                    yield verdict.answered.reply
                elif not verdict.diverged:  # a training that diverges is the loop's to tell
                    why = verdict.why
            missing, tries = [client for client in missing if client not in came], tries + 1
            enough = min(self.protocol.quorum, len(who))
            if len(who) - len(missing) >= enough:
                break
            there = f"{len(who) - len(missing)} of {len(who)} clients have answered {handler.__name__}"
            self.wait(tries, f"{there} of task {call.task + 1}, and quorum={self.protocol.quorum}")
        if why and len(missing) == len(who):
            raise UserError(f"no reply to {handler.__name__} was let in; the last one {why}")

    def _delivered(
        self, who: list[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered]]:
        where = f"{self.stage}/{self.round}/{handler.__name__}"
        self.cursor.asked[where] = time_asked = self.cursor.asked.get(where, 0) + 1
        reached = [c for c in who if not self._is_lost(c, where, time_asked)]
        self.tally.down += size_in_bytes(message) * len(who)
        start = time.perf_counter()
        for client, answered in self.transport.deliver(reached, handler, message, call):
            self.tally.seconds[handler.__name__] += time.perf_counter() - start
            yield client, answered
            start = time.perf_counter()
        self.tally.seconds[handler.__name__] += time.perf_counter() - start

    def _let_in(self, verdict: Verdict, handler: Callable[..., Any]) -> bool:
        """Book a reply, and say so where it is refused."""
        self.tally.up += verdict.size
        if verdict.why:
            if verdict.diverged:
                self.tally.diverged.add(verdict.client)
            refused = {"client": verdict.client, "answer": handler.__name__, "why": verdict.why}
            self.tally.refused.append(refused)
            log.warning("refused the reply of client %d to %s: it %s", *refused.values())
            self.told(verdict.client, f"to {handler.__name__}: it {verdict.why}")
            return False
        self.cursor.kept[verdict.client] = verdict.answered.kept
        if verdict.answered.images:
            self.tally.losses.append(verdict.answered.loss)
            self.tally.trained.add(verdict.client)
        return True

    def _book(self, answer: str, field: str) -> None:
        self.journal(name := f"{answer}.{field}")
        self.tally.releases[name] += 1

    def _is_lost(self, client: int, where: str, time_asked: int) -> bool:
        return self.scenario.loses(client, self.task, where, time_asked)
