"""Workers: the same bits in every layout, and nothing left behind whatever happens."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.experiment import execute
from fcil.federation import shared, workers
from fcil.federation.adaptive import TRIED, Adaptive, crew
from fcil.federation.calls import Answered, Call, Question
from fcil.federation.engine import Engine
from fcil.federation.in_process import InProcess
from fcil.federation.loop import learn
from fcil.federation.shared import Block, Shelf
from fcil.federation.workers import Workers
from fcil.method import Setting
from fcil.methods import method
from fcil.parts import Parts, assemble
from fcil.records import Weights, flatten
from fcil.scenario.benchmarks import Protocol
from fcil.scenario.memory import Budget
from fcil.scenario.scenario import Scenario
from tests.conftest import FILES, TINY, tiny_plan
from tests.test_resume import outcome

CALL = Call(seed=0, task=0, step=7, round=1, rounds=4)
SETTING = Setting(6, (1, 8, 8), Protocol(rounds=4, steps=3, batch_size=8), Budget(10**9, "fixed", 6), "small", "none")

OWN = """
import os, signal, time
from dataclasses import dataclass, field
import torch
from fcil.errors import UserError
from fcil.knobs import knob
from fcil.method import Method, remote
from fcil.records import ByClass, Done, Weights, record

@dataclass(frozen=True)
class Config:
    scale: float = knob(1.0, "what draws are multiplied by")

@record
class Sent:
    weights: Weights

@record
class Memory:
    images: ByClass = field(default_factory=dict)
    visits: int = 0

class Odd(Exception):
    pass

class Server:
    def __init__(self, config, setting):
        self.state = Sent({})
    def broadcast(self) -> Sent:
        return self.state
    def learn_task(self, task, clients):
        yield

class Client:
    def __init__(self, config, setting):
        self.config = config
    def networks(self):
        return {"net": torch.nn.Linear(2, 2)}
    def predict(self, message: Sent, images):
        return images
    @remote
    def draw(self, memory, data, message: Sent) -> Sent:
        big = torch.rand(message.weights["size"].item(), generator=data.generator) * self.config.scale
        facts = torch.tensor([torch.get_num_threads(), len(data.labels), memory.visits])
        return Sent({"big": big, "stray": torch.rand(3), "first": data.images[:1], "facts": facts})
    @remote
    def who(self, memory, data, message: Done) -> Sent:
        return Sent({"pid": torch.tensor(os.getpid()), "sum": data.labels.sum()})
    @remote
    def fill(self, memory, data, message: Done) -> Done:
        memory.images[0], memory.visits = data.images[:2].float(), memory.visits + 1
        return Done()
    @remote
    def touch(self, memory, data, message: Done) -> Done:
        memory.images[0][1] = 5.0
        return Done()
    @remote
    def drop(self, memory, data, message: Done) -> Done:
        memory.images.clear()
        return Done()
    @remote
    def derive(self, memory, data, message: Sent) -> Sent:
        made = []
        kept = data.cached("view", lambda _: made.append(1) or message.weights["w"])
        return Sent({"kept": kept.clone(), "made": torch.tensor(len(made)), "visits": torch.tensor(memory.visits)})
    @remote
    def fail(self, memory, data, message: Sent) -> Done:
        kind = [UserError, ValueError, Odd][message.weights["kind"].item()]
        raise kind("it is too green")
    @remote
    def die(self, memory, data, message: Done) -> Done:
        os.kill(os.getpid(), signal.SIGKILL)
        return Done()
    @remote
    def sleep(self, memory, data, message: Done) -> Done:
        time.sleep(1000)
        return Done()

METHOD = Method(Config, Server, Client, Memory)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A method file of the user's."""
    path = tmp_path_factory.mktemp("own") / "greens.py"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    made = Scenario(TINY, 0)
    made.begin(made.tasks[0])
    return made


def a_crew(own: Path, many: int = 2, **how: Any) -> Workers:
    return Workers(method, str(own), method(str(own)).config(scale=2.0), SETTING, many, **how)


@pytest.fixture(scope="module")
def pair(own: Path) -> Iterator[Workers]:
    with a_crew(own) as made:
        yield made


class Room:
    """A transport, with workers or without, and the handlers of the user's file."""

    def __init__(self, scenario: Scenario, own: Path, crew: Any = None):
        self.method = method(str(own))
        engine = Engine(self.method, self.method.config(scale=2.0), SETTING)
        self.transport = InProcess(engine, scenario, self.method.memory, None, crew)
        self.transport.begin(scenario.tasks[0])
        self.module: Any = sys.modules["fcil_own_greens"]

    def ask(self, who: list[int], name: str, call: Call = CALL, **weights: Any) -> list[tuple[int, Answered]]:
        message = self.module.Sent({n: torch.as_tensor(w) for n, w in weights.items()})
        handler = getattr(self.method.client, name)
        return list(self.transport.deliver(who, handler, message if weights else self.module.Done(), call))


@pytest.fixture
def room(scenario: Scenario, own: Path, pair: Workers) -> Room:
    return Room(scenario, own, pair)


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def gone(pids: list[int]) -> bool:
    """Wait until none of these processes is there any more."""
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.01)
    return True


# -- whole runs -------------------------------------------------------------------------------------------------------


def with_crew(parts: Parts, crew: Any) -> None:
    parts.transport.crew, parts.transport.answering = crew, crew or parts.engine


def learned(wanted: Any, many: int, scenario: Scenario, switching: bool = False) -> tuple[Weights, dict[int, Weights]]:
    """Return the server's state and all memories after a whole run; when switching, every other round is a loop's."""
    parts = assemble(wanted, "cpu", scenario, workers=1)
    other = None if many == 1 else Workers(method, wanted.method, wanted.config, parts.setting, many, wanted.source)
    with_crew(parts, other)
    for number, _ in enumerate(learn(parts.scenario, parts.server, parts.door, parts.engine)):
        if switching:
            with_crew(parts, other if number % 2 else None)
    if other is not None:
        other.close()
    return flatten(parts.server.state), {client: flatten(m) for client, m in parts.transport.memories.items()}


@pytest.mark.parametrize("method", FILES)
def test_every_layout_gives_the_same_bits(method: str) -> None:
    wanted = tiny_plan(method, rounds=2, joining=1, leaving=1, lost=0.1, weighting="samples", augment="crop-flip")
    scenario = Scenario(wanted.benchmark, wanted.seed)
    state, memories = learned(wanted, 1, scenario)
    for many, switching in ((3, False), (2, True)):
        found, kept = learned(wanted, many, scenario, switching)
        assert same(found, state), (many, switching)
        assert kept.keys() == memories.keys() and all(same(kept[c], memories[c]) for c in kept), (many, switching)


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 3)])
def test_a_run_goes_on_in_another_layout(first: int, then: int, tmp_path: Path) -> None:
    wanted = tiny_plan("hr-literal", tasks=2)
    list(execute(wanted, tmp_path / "whole", "cpu", workers=1))
    lines = execute(wanted, tmp_path / "torn", "cpu", every=0.0, workers=first)
    for _ in range(5):
        next(lines)
    lines.close()
    list(execute(wanted, tmp_path / "torn", "cpu", workers=then))
    (ledger, model, _), (ledger_too, model_too, _) = outcome(tmp_path / "whole"), outcome(tmp_path / "torn")
    assert ledger == ledger_too and same(model, model_too)


# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_engine_in_their_order(scenario: Scenario, own: Path, room: Room) -> None:
    for who in ([2], [3, 0, 1, 2], [1, 1, 0, 1]):
        alone, together = Room(scenario, own).ask(who, "draw", size=5), room.ask(who, "draw", size=5)
        assert [client for client, _ in together] == who
        for (_, one), (_, other) in zip(alone, together, strict=True):
            assert same(one.reply.weights, other.reply.weights)
            assert (one.kept, one.images) == (other.kept, other.images) and one.reply.weights["facts"][0] == 1


def test_replies_that_are_held_stay_what_they_are(room: Room) -> None:
    size = shared.SMALL  # numbers: four times what is copied out
    held = [room.ask([0, 1, 2, 3], "draw", CALL._replace(step=s), size=size) for s in range(4)]
    copies = [[answered.reply.weights["big"].clone() for _, answered in some] for some in held]
    again = [room.ask([0, 1, 2, 3], "draw", CALL._replace(step=s), size=size) for s in range(4)]
    for some, kept, others in zip(held, copies, again, strict=True):
        for (_, one), copy, (_, other) in zip(some, kept, others, strict=True):
            assert torch.equal(one.reply.weights["big"], copy) and torch.equal(copy, other.reply.weights["big"])


def test_buffers_are_used_again(scenario: Scenario, own: Path) -> None:
    with a_crew(own) as two:
        room = Room(scenario, own, two)
        for step in range(30):
            room.ask([0, 1, 2, 3], "draw", CALL._replace(step=step), size=99_999)
        assert len(two._messages.blocks) == 1
        for worker in two.crew:
            assert len(worker.shelf.blocks) <= workers.QUEUED
            assert len(worker.wire._seen) <= 4 + workers.QUEUED  # the replies of one call, and those on their way


def test_a_message_that_is_cached_stays_what_it_was(room: Room) -> None:
    made_from: dict[int, list[Tensor]] = {client: [] for client in range(4)}
    for weights in (torch.rand(99_999) for _ in range(4)):
        for client, answered in room.ask([0, 1, 2, 3], "derive", w=weights):
            if answered.reply.weights["made"]:  # once, or twice where a busy machine has moved the client to and fro
                made_from[client].append(weights)
            assert len(made_from[client]) in (1, 2)
            assert any(torch.equal(answered.reply.weights["kept"], whole) for whole in made_from[client])


def test_clients_stay_with_their_worker_and_both_work(room: Room) -> None:
    first = {client: int(answered.reply.weights["pid"]) for client, answered in room.ask([0, 1, 2, 3], "who")}
    assert len(set(first.values())) == 2 and os.getpid() not in first.values()
    mine = [[client for client, pid in first.items() if pid == one] for one in set(first.values())]
    pairs = [list(clients) for clients in zip(*mine, strict=False)]
    for some in pairs:  # one of each
        assert {c: int(a.reply.weights["pid"]) for c, a in room.ask(some, "who")} == {c: first[c] for c in some}


def test_an_abandoned_question_does_not_reach_into_the_next(scenario: Scenario, own: Path, room: Room) -> None:
    done = room.module.Done()
    answers = room.transport.deliver([0, 1, 2, 3], room.method.client.who, done, CALL)
    next(answers)
    answers.close()
    alone, together = Room(scenario, own).ask([3, 2], "draw", size=4), room.ask([3, 2], "draw", size=4)
    for (_, one), (_, other) in zip(alone, together, strict=True):
        assert same(one.reply.weights, other.reply.weights)


# -- memories and caches ----------------------------------------------------------------------------------------------


def test_a_memory_is_changed_in_place_and_noticed(room: Room) -> None:
    transport = room.transport
    room.ask([0, 1], "fill")
    assert transport.changed == {0, 1} and transport.versions == {0: 1, 1: 1}
    memory = transport.memories[1]
    assert memory.images[0].shape == (2, 1, 8, 8) and memory.visits == 1
    for name, version in (("touch", 2), ("drop", 3)):
        transport.changed.clear()
        room.ask([1], name)
        assert transport.changed == {1} and transport.versions[1] == version and transport.memories[1] is memory
        if name == "touch":
            assert (memory.images[0][1] == 5).all() and not (memory.images[0][0] == 5).all()
    assert memory.images == {} and transport.memories[0].images != {}
    transport.changed.clear()
    room.ask([0, 1, 2], "who")
    assert transport.changed == set()


def test_the_same_client_twice_has_the_memory_of_its_first_answer(room: Room) -> None:
    room.ask([3, 3, 0, 3], "fill")
    assert room.transport.memories[3].visits == 3 and room.transport.memories[0].visits == 1


def test_what_was_derived_goes_when_the_memory_or_the_task_changes(
    scenario: Scenario, own: Path, pair: Workers
) -> None:
    room = Room(scenario, own, pair)

    def made(client: int) -> int:
        (only,) = room.ask([client], "derive", w=torch.zeros(3))
        return int(only[1].reply.weights["made"])

    for name in ("fill", "fill"):
        room.ask([2], name)
        assert [made(2), made(2)] == [1, 0]
    try:
        scenario.begin(scenario.tasks[1])
        room.transport.begin(scenario.tasks[1])
        assert [made(2), made(2)] == [1, 0]
    finally:
        scenario.begin(scenario.tasks[0])
    room.transport.begin(scenario.tasks[0])
    assert [made(2), made(2)] == [1, 0]


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "error", "says"),
    [(0, UserError, "^it is too green$"), (1, ValueError, "^it is too green$"), (2, RuntimeError, "^Odd: it is too")],
)
def test_errors_come_to_the_parent(kind: int, error: type, says: str, scenario: Scenario, own: Path) -> None:
    with a_crew(own) as two:
        pids = [worker.process.pid for worker in two.crew]
        with pytest.raises(error, match=says) as caught:
            Room(scenario, own, two).ask([0, 1, 2], "fail", kind=kind)
        cause = caught.value.__cause__
        assert (cause is None) if kind == 0 else re.search(r"greens\.py.*in fail", str(cause))
        assert two.closed and gone(pids)
        with pytest.raises(RuntimeError, match="ended"):
            Room(scenario, own, two).ask([0], "who")


def test_a_worker_that_dies_is_said_plainly(scenario: Scenario, own: Path) -> None:
    with a_crew(own) as two:
        pids = [worker.process.pid for worker in two.crew]
        with pytest.raises(UserError, match="a worker process was killed by SIGKILL.*--workers 1"):
            Room(scenario, own, two).ask([0, 1, 2], "die")
        assert two.closed and gone(pids)


def test_a_worker_that_died_before_it_was_asked(scenario: Scenario, own: Path) -> None:
    with a_crew(own) as two:
        Room(scenario, own, two).ask([0, 1], "who")
        os.kill(two.crew[0].process.pid, signal.SIGKILL)
        assert gone([two.crew[0].process.pid])
        with pytest.raises(UserError, match="a worker process was killed by SIGKILL"):
            Room(scenario, own, two).ask([0, 1], "who")


def test_no_process_stays(scenario: Scenario, own: Path) -> None:
    two = a_crew(own)
    Room(scenario, own, two).ask([0, 1], "who")
    pids = [worker.process.pid for worker in two.crew]
    del two
    gc.collect()
    assert gone(pids)
    three = a_crew(own, many=3)
    pids = [worker.process.pid for worker in three.crew]
    three.close()
    three.close()
    assert gone(pids)


def test_a_file_that_has_changed_is_not_trusted(scenario: Scenario, own: Path, tmp_path: Path) -> None:
    with a_crew(own, source="0" * 64) as two, pytest.raises(UserError, match="has changed since the run was begun"):
        Room(scenario, own, two).ask([0], "who")


def test_shared_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"no room for 4\.3 MiB of memory shared with worker processes.*--workers 1"):
        Shelf([]).put({"w": torch.zeros(10**6)})


def test_processes_that_do_not_start(own: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(workers, "Worker", refused)
    with pytest.raises(UserError, match="cannot be started here.*unavailable.*--workers 1"):
        a_crew(own)
    loop = Clocked(clock, 1.0)
    adaptive = Adaptive(loop, lambda: a_crew(own), 2, 1)  # type: ignore[arg-type]
    rounds(adaptive, 9)
    assert adaptive.stays and loop.calls == 9


def test_where_no_process_may_be_started(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="daemonic"):
        a_crew(own)
    engine = SimpleNamespace(setting=SETTING, at_once=1)
    assert Adaptive(engine, lambda: a_crew(own), 2, 3).stays  # type: ignore[arg-type]


SCRIPT = """
import multiprocessing, sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from tests.test_workers import Room, a_crew, TINY, Scenario
print("begin", flush=True)
scenario, own = Scenario(TINY, 0), Path({own!r})
scenario.begin(scenario.tasks[0])
two = a_crew(own)
room = Room(scenario, own, two)
room.ask([0, 1], "who")
print(*[worker.process.pid for worker in two.crew], flush=True)
room.ask([0, 1, 2], "sleep")
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_script_without_a_guard_and_its_end(how: signal.Signals, own: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[1]), own=str(own)))
    process = subprocess.Popen(
        [sys.executable, script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )  # fmt: skip
    with process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begin\n"
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does
        else:
            process.kill()
        process.wait()
        assert gone(pids)
        assert process.stdout.read() == "" and process.stderr.read().count("Traceback") == (how == signal.SIGINT)


# -- shared memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [False, True])
def test_tensors_come_out_of_a_block_as_they_went_in(own: bool) -> None:
    flat = {
        "empty": torch.zeros(0, 3), "number": torch.tensor(7), "flag": torch.tensor([True, False]),
        "half": torch.rand(5).bfloat16(), "turned": torch.rand(300, 400).t(), "part": torch.rand(9, 300, 100)[:, ::2],
        "last": torch.rand(2, 3, 90, 90).contiguous(memory_format=torch.channels_last), "wide": torch.ones(1).expand(5),
        "bytes": torch.randint(0, 255, (70_001,), dtype=torch.uint8), "odd": torch.rand(3, dtype=torch.float64),
    }  # fmt: skip
    shelf = Shelf([])
    block = shelf.put({}, flat, {"grad": torch.ones(3, requires_grad=True)})
    there = Block(0, block.size, os.dup(block.fd))  # as another process maps it
    (nothing, found, more), looked = there.read(block.edition, block.layout.end, block.head, own)
    assert nothing == {} and same(found, flat) and not more["grad"].requires_grad
    assert found["turned"].stride() == flat["turned"].stride() and found["last"].stride() == flat["last"].stride()
    assert all(t.dtype == flat[n].dtype and t.data_ptr() % 64 == 0 for n, t in found.items())
    assert (looked is None) == own
    if looked is not None:
        kept = found["bytes"][5:]
        del found, more, nothing
        assert looked() is not None
        del kept
        assert looked() is None


def test_a_block_in_use_is_not_written() -> None:
    shelf = Shelf([])
    one = shelf.put({"w": torch.zeros(9)})
    assert shelf.put({"w": torch.ones(9)}) is one
    one.lent = 1
    other = shelf.put({"w": torch.ones(9)})
    assert other is not one and len(shelf.blocks) == 2
    one.lent = 0
    assert shelf.put({"v": torch.ones(3)}) in (one, other) and len(shelf.blocks) == 2
    large = shelf.put({"w": torch.zeros(10**5)})
    assert shelf.blocks == [large]  # those too small for what is sent now are let go


# -- which of the two -------------------------------------------------------------------------------------------------


class Clocked:
    """Answers that take a given time."""

    at_once, setting = 1, SETTING

    def __init__(self, clock: list[float], seconds: float):
        self.clock, self.seconds, self.calls, self.closed = clock, seconds, 0, False

    def answers(self, questions: list[Question], *_: Any) -> Iterator[Answered]:
        self.calls += 1
        for _question in questions:
            self.clock[0] += self.seconds
            yield Answered(None, 0)

    def ready(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("fcil.federation.adaptive.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("fcil.federation.adaptive.prepare", lambda: None)
    return now


def rounds(adaptive: Adaptive, count: int, questions: int = 4, of: int = 100) -> None:
    for number in range(count):
        call = Call(0, 0, number, number, of)
        assert len(list(adaptive.answers([None] * questions, SETTING.classifier, None, call))) == questions  # type: ignore[list-item]


def test_workers_are_started_where_they_pay(clock: list[float]) -> None:
    loop, two = Clocked(clock, 0.5), Clocked(clock, 0.3)
    adaptive = Adaptive(loop, lambda: two, 2, 1)  # type: ignore[arg-type, return-value]
    rounds(adaptive, 20)
    assert loop.calls == 4 and two.calls == 16 and not two.closed  # 2 to measure, 2 while they start
    rounds(adaptive, 1, questions=1)
    assert loop.calls == 5  # a single question is not worth the way
    adaptive.close()
    assert two.closed


@pytest.mark.parametrize("seconds", [1e-4, 0.005])
def test_a_short_run_stays_with_the_loop(seconds: float, clock: list[float]) -> None:
    loop = Clocked(clock, seconds)
    adaptive = Adaptive(loop, pytest.fail, 2, 1)  # type: ignore[arg-type]
    rounds(adaptive, 100)
    assert loop.calls == 100


def test_workers_that_are_slower_are_ended(clock: list[float]) -> None:
    loop, two = Clocked(clock, 0.5), Clocked(clock, 0.6)
    adaptive = Adaptive(loop, lambda: two, 2, 1)  # type: ignore[arg-type, return-value]
    rounds(adaptive, 20)
    assert two.calls == TRIED and two.closed and loop.calls == 20 - TRIED


def test_one_core_or_one_client_stays_with_the_loop(clock: list[float]) -> None:
    for many, questions in ((1, 4), (2, 1)):
        loop = Clocked(clock, 9.0)
        rounds(Adaptive(loop, pytest.fail, many, 1), 20, questions)  # type: ignore[arg-type]
        assert loop.calls == 20


def test_workers_that_cannot_be_had_are_done_without(own: Path, clock: list[float]) -> None:
    loop = Clocked(clock, 1.0)
    adaptive = Adaptive(loop, lambda: a_crew(own, source="0" * 64), 2, 1)  # type: ignore[arg-type]
    while not adaptive.stays:
        rounds(adaptive, 1)
    rounds(adaptive, 3)
    assert adaptive.workers is not None and adaptive.workers.closed


def test_a_switch_in_mid_run_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tiny_plan("hr-literal")
    scenario = Scenario(wanted.benchmark, wanted.seed)
    state, memories = learned(wanted, 1, scenario)
    monkeypatch.setattr("fcil.federation.adaptive.STARTING", 0.0)
    monkeypatch.setattr("fcil.federation.adaptive.TRIED", 0)
    parts = assemble(wanted, "cpu", scenario, workers=1)
    adaptive = crew(0, parts.engine, scenario, method, wanted.method, wanted.config, wanted.source)
    assert isinstance(adaptive, Adaptive)
    adaptive.many, adaptive.stays = 2, False  # also on a machine with one core
    with_crew(parts, adaptive)
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        while adaptive.workers is not None and not adaptive.workers.ready():
            time.sleep(0.01)
    assert adaptive.workers is not None and adaptive._crew["train"]
    adaptive.close()
    assert same(flatten(parts.server.state), state)
    assert all(same(flatten(m), memories[c]) for c, m in parts.transport.memories.items())


def test_how_many(scenario: Scenario) -> None:
    engine = Engine(method("finetune"), method("finetune").config(), SETTING)
    job = (engine, scenario, method, "finetune", method("finetune").config())
    assert crew(1, *job) is None
    chosen = crew(0, *job)
    assert isinstance(chosen, Adaptive) and chosen.many <= scenario.benchmark.active
    with crew(100_000, *job) as many:
        assert many.running == len(many.crew) == scenario.benchmark.active
    alone = Scenario(replace(scenario.benchmark, active=1), 0)
    assert crew(5, engine, alone, *job[2:]) is None
    with pytest.raises(UserError, match="workers=-1 is not allowed"):
        crew(-1, *job)
