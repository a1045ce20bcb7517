"""The door: counts what passes, resumes where it stood, and lets nobody through who is not marked."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.federation.calls import Answered, Call
from fcil.federation.clients import Cursor, Door, Tally
from fcil.federation.loop import rounds_of
from fcil.federation.rounds import fedavg
from fcil.method import remote
from fcil.records import Done, Update, Weights, record, size_in_bytes
from fcil.scenario.benchmarks import Protocol
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import Task
from tests.conftest import TINY

PROTOCOL = Protocol(rounds=3)


@record
class Sent:
    weights: Weights
    note: Tensor
    level: int


class Pupil:
    """Answers without a network: the weights sent, moved by what it was told."""

    @remote
    def train(self, memory: object, data: object, message: Sent) -> Update:
        return Update({"w": message.weights["w"] + message.level}, 5)

    @remote
    def remember(self, memory: object, data: object, message: Sent) -> Done:
        return Done()

    def private(self, memory: object, data: object, message: Sent) -> Done:
        return Done()


class Classroom:
    """A transport that writes down who was asked what."""

    def __init__(self, deaf: Sequence[int] = ()):
        self.deaf, self.asked = deaf, []

    def begin(self, task: Task) -> None:
        self.task = task

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered[Any]]]:
        for client in who:
            self.asked.append((client, handler.__name__, call))
            if client not in self.deaf:
                reply = handler(Pupil(), None, None, message)
                yield client, Answered(reply, kept=100 + client, loss=float(client), images=client)


def a_door(cursor: Cursor | None = None, deaf: Sequence[int] = (), seed: int = 0, **benchmark: object) -> Door:
    scenario = Scenario(replace(TINY, **{"clients": 6, "active": 3, "train_limit": 20, **benchmark}), seed)
    return Door(Classroom(deaf), scenario, PROTOCOL, seed, cursor)


def begun(**how: Any) -> Door:
    door = a_door(**how)
    door.begin(door.scenario.tasks[door.cursor.task])
    return door


def a_message(level: int = 1) -> Sent:
    return Sent({"w": torch.zeros(7)}, torch.zeros(3, dtype=torch.uint8), level)


def script(clients: Door, log: list[object]) -> Iterator[None]:
    """A server's task with everything in it: parts done once, and two loops of rounds."""
    log.append("begin")
    if clients.once("align"):
        log.append("align")
        clients.ask(clients.everyone(), Pupil.remember, a_message())
    for r in clients.rounds(2, "warm"):
        log.append(("warm", r, clients.ask(clients.sample(), Pupil.train, a_message()).sum("count")))
        yield
    if clients.once("middle"):
        log.append("middle")
    for r in clients.rounds():
        log.append(("train", r, clients.sample()))
        clients.ask(clients.sample(), Pupil.train, a_message())
        yield
    clients.ask(clients.everyone(), Pupil.remember, a_message())
    log.append("end")


def test_a_task_runs_through() -> None:
    door, log = begun(), []
    for _ in script(door, log):
        door.finish()
    assert [entry if isinstance(entry, str) else entry[:2] for entry in log] == [
        "begin", "align", ("warm", 0), ("warm", 1), "middle", ("train", 0), ("train", 1), ("train", 2), "end",
    ]  # fmt: skip
    assert door.cursor.step == 7 and door.cursor.rounds == {"warm": 2, "train": 3}


@pytest.mark.parametrize("stop", range(1, 6))
def test_a_run_goes_on_from_the_cursor_of_any_yield(stop: int) -> None:
    whole, log = begun(), []
    for _ in script(whole, log):
        whole.finish()
    whole.finish()

    first, before = begun(), []
    for number, _ in enumerate(script(first, before), 1):
        first.finish()
        if number == stop:
            break
    saved = json.loads(json.dumps(asdict(first.cursor)))  # as a checkpoint keeps it
    saved["kept"] = {int(client): kept for client, kept in saved["kept"].items()}

    second, after = begun(cursor=Cursor(**saved)), []
    for _ in script(second, after):
        second.finish()
    second.finish()
    assert after[0] == "begin" and before + after[1:] == log
    assert first.transport.asked + second.transport.asked == whole.transport.asked
    assert second.cursor == whole.cursor


def test_a_new_task_starts_counting_anew_but_steps_go_on() -> None:
    door = begun()
    for _ in script(door, []):
        door.finish()
    steps = door.cursor.step
    door.begin(door.scenario.tasks[1])
    assert door.cursor == Cursor(task=1, step=steps, kept=door.cursor.kept)
    assert door.once("align") and not door.once("align") and list(door.rounds()) == [0, 1, 2]


def test_beginning_the_same_task_again_keeps_the_place() -> None:
    door = begun(cursor=Cursor(once=["align"], rounds={"train": 2}))
    assert not door.once("align") and list(door.rounds()) == [2]


def test_two_loops_of_one_stage_are_refused() -> None:
    door = begun()
    assert list(door.rounds(2)) == [0, 1]
    with pytest.raises(RuntimeError, match="two loops of rounds called 'train'"):
        list(door.rounds(1))
    assert list(door.rounds(1, "tune")) == [0]


def test_rounds_tell_the_answers_where_they_stand() -> None:
    door = begun()
    for _ in door.rounds(2):
        door.ask([0], Pupil.train, a_message())
    door.ask([0], Pupil.remember, a_message())
    door.finish()
    calls = [call for _, _, call in door.transport.asked]
    assert [(c.step, c.round, c.rounds) for c in calls] == [(1, 0, 2), (2, 1, 2), (3, 0, 1)]
    assert all(c.seed == 0 and c.task == 0 for c in calls)


def test_only_what_is_marked_remote_can_be_asked() -> None:
    door = begun()
    with pytest.raises(TypeError, match=r"Pupil\.private is not marked @remote"):
        door.ask([0], Pupil.private, a_message())
    assert door.cursor.step == 0 and door.tally.down == 0


def test_every_byte_is_counted() -> None:
    door, message = begun(), a_message()
    down, up = 7 * 4 + 3 + 8, 7 * 4 + 8
    assert size_in_bytes(message) == down
    door.ask([0, 2, 5], Pupil.train, message).mean("weights")
    assert (door.tally.down, door.tally.up, door.tally.clients, door.tally.lost) == (3 * down, 3 * up, 3, 0)
    door.ask([1], Pupil.remember, message)
    door.finish()
    assert (door.tally.down, door.tally.up, door.tally.clients) == (4 * down, 3 * up, 4)


def test_bytes_to_a_client_that_does_not_answer_are_spent_all_the_same() -> None:
    door, message = begun(deaf=[2]), a_message()
    assert len(door.ask([0, 2, 5], Pupil.train, message)) == 2
    assert door.tally.down == 3 * size_in_bytes(message) and door.tally.up == 2 * (7 * 4 + 8)
    assert (door.tally.clients, door.tally.lost) == (3, 1)


def test_the_door_notes_what_each_client_keeps_and_the_loss_of_those_with_images() -> None:
    door = begun()
    door.ask([0, 2, 4], Pupil.train, a_message())
    door.finish()
    assert door.cursor.kept == {0: 100, 2: 102, 4: 104}
    assert door.tally.loss() == 3.0  # client 0 had no images
    assert begun().tally.loss() is None


def test_answers_nobody_looks_at_are_given_all_the_same() -> None:
    door = begun()
    door.ask([0, 1], Pupil.remember, a_message())
    assert door.transport.asked == []  # not yet
    door.ask([4], Pupil.train, a_message())
    assert [client for client, *_ in door.transport.asked] == [0, 1]
    door.finish()
    assert [client for client, *_ in door.transport.asked] == [0, 1, 4]
    door.finish()
    assert len(door.transport.asked) == 3


def test_rounds_end_with_every_answer_given() -> None:
    door = begun()
    for _ in door.rounds(1):
        door.ask([3], Pupil.remember, a_message())
    assert [client for client, *_ in door.transport.asked] == [3]


def test_clients_get_the_message_as_it_was_when_they_were_asked() -> None:
    door, state = begun(), a_message(level=1)
    came = door.ask([0, 1], Pupil.train, state)
    state.level, state.weights["w"] = 50, torch.full((7,), 9.0)  # the server moves on before it looks
    assert torch.equal(came.mean("weights")["w"], torch.ones(7))


class AServer:
    """As much of a server as `fedavg` needs."""

    def __init__(self) -> None:
        self.state = a_message()

    def broadcast(self) -> Sent:
        return self.state


def test_fedavg_broadcasts_trains_and_averages() -> None:
    door, server = begun(), AServer()
    assert len(list(fedavg(server, door, Pupil.train))) == PROTOCOL.rounds
    assert torch.equal(server.state.weights["w"], torch.full((7,), 3.0))


def test_if_every_message_is_lost_the_weights_stay() -> None:
    door, server = begun(lost=1.0), AServer()
    assert len(list(fedavg(server, door, Pupil.train, rounds=2))) == 2
    assert torch.equal(server.state.weights["w"], torch.zeros(7))
    assert door.transport.asked == [] and door.tally.up == 0 and door.tally.loss() is None
    assert door.tally.lost == door.tally.clients == 6 and door.tally.down == 6 * size_in_bytes(server.state)
    with pytest.raises(UserError, match="no client answered"):
        door.ask([0], Pupil.train, Done()).mean("weights")


def test_about_the_asked_share_is_lost_and_always_the_same() -> None:
    def heard(seed: int) -> list[tuple[int, int]]:
        door = begun(lost=0.3, seed=seed)
        for _ in range(100):
            door.ask(door.everyone(), Pupil.remember, Done())
        door.finish()
        return [(client, call.step) for client, _, call in door.transport.asked]

    assert heard(0) == heard(0) != heard(1)
    assert 0.62 < len(heard(0)) / 600 < 0.78


def test_methods_that_ask_more_lose_the_same_messages_of_a_round() -> None:
    def trained(chatty: bool) -> list[int]:
        door, heard = begun(lost=0.4), []
        if chatty and door.once("hello"):
            door.ask(door.everyone(), Pupil.remember, Done())
        for _ in door.rounds():
            if chatty:
                door.ask(door.everyone(), Pupil.remember, Done())
            before = len(door.transport.asked)
            door.ask(door.everyone(), Pupil.train, a_message())
            door.finish()
            heard += [client for client, handler, _ in door.transport.asked[before:] if handler == "train"]
        return heard

    assert trained(False) == trained(True) != []


def test_the_same_clients_train_whatever_the_method_asks() -> None:
    quiet, busy = begun(), begun()
    plain, chatty = [], []
    for _ in quiet.rounds():
        plain.append(quiet.sample())
    busy.once("something")
    busy.ask(busy.everyone(), Pupil.remember, a_message())
    for _ in busy.rounds():
        busy.sample()
        busy.ask(busy.sample(), Pupil.train, a_message())
        busy.ask([0], Pupil.remember, a_message())
        chatty.append(busy.sample())
    assert plain == chatty and len({tuple(who) for who in plain}) > 1
    assert all(len(set(who)) == 3 and set(who) <= set(range(6)) for who in plain)


def test_another_seed_gives_other_clients() -> None:
    def drawn(seed: int) -> list[list[int]]:
        door = begun(seed=seed)
        return [door.sample() for _ in door.rounds(6)]

    assert drawn(0) == drawn(0) != drawn(1)


def test_everyone_is_everyone_present() -> None:
    door = a_door(joining=2, leaving=1)
    counts = []
    for task in door.scenario.tasks:
        door.begin(task)
        counts.append(len(door.everyone()))
    assert counts == [6, 7, 8]


def test_time_that_no_answer_took_is_the_servers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, door = [0.0], a_door()
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def script() -> Iterator[None]:
        clock[0] += 5
        with door.tally.timing("train"):
            clock[0] += 2
        yield
        clock[0] += 1

    for _ in rounds_of(script(), door):
        assert dict(door.tally.seconds) == {"train": 2, "server": 5}
        clock[0] += 100  # of whoever reads the ledger
        door.tally = Tally()
    assert dict(door.tally.seconds) == {"server": 1}
