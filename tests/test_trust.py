"""What comes from a client is not trusted: every way to be wrong is refused at the door, and the round goes on."""

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fcil import __version__
from fcil.errors import UserError
from fcil.experiment import execute
from fcil.federation import trust
from fcil.federation.calls import Answered, Call, Origin
from fcil.federation.clients import MOST_TRIES, Door
from fcil.federation.loop import learn
from fcil.federation.outliers import far_out
from fcil.method import remote
from fcil.parts import Parts, assemble
from fcil.plan import Plan
from fcil.records import ByClass, Update, Weights, flatten, record, varying
from fcil.report.outcome import trust as told
from fcil.results.ledger import result_of
from fcil.scenario.benchmarks import Protocol
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import Task
from tests.conftest import FILES, TINY, tiny_plan

CLIENTS = 6
CAPACITY = 6  # three tasks of two digits


@record
class Sent:
    weights: Weights


@record
class Statistics:
    sums: ByClass
    counts: ByClass
    spread: Tensor
    count: int


@record
class Rows:
    centres: ByClass = varying("rows")
    gradients: Weights = varying("names")


class Pupil:
    """Only says what its answers answer with; the transport below makes them up."""

    @remote
    def train(self, memory: object, data: object, message: Sent) -> Update: ...

    @remote
    def measure(self, memory: object, data: object, message: Sent) -> Statistics: ...

    @remote
    def rows(self, memory: object, data: object, message: Sent) -> Rows: ...


def an_update(client: int) -> Update:
    return Update({"w": torch.full((4,), float(client)), "b": torch.zeros(2), "steps": torch.tensor(3)}, 5)


def statistics(client: int) -> Statistics:
    sums = {j: torch.full((3,), 10.0 * (1 + 0.01 * client)) for j in (0, 1)}
    return Statistics(sums, {j: torch.tensor(10) for j in sums}, torch.ones(2), 20)


def rows_of(client: int) -> Rows:
    return Rows({0: torch.ones(client + 1, 3)}, {str(n): torch.ones(4) for n in range(client)})


HONEST = {"train": an_update, "measure": statistics, "rows": rows_of}
MESSAGE = Sent({"w": torch.zeros(4), "b": torch.zeros(2), "steps": torch.tensor(0)})


def changed(**parts: Any) -> Callable[[Answered], Answered]:
    """A fault: the reply as flat tensors, with some of them replaced, or left out where None."""

    def fault(answered: Answered) -> Answered:
        flat = {**flatten(answered.reply), **{name.replace("__", "/"): value for name, value in parts.items()}}
        return answered._replace(reply={name: value for name, value in flat.items() if value is not None})

    return fault


def beside(**facts: Any) -> Callable[[Answered], Answered]:
    """A fault in what comes beside a reply."""
    return lambda answered: answered._replace(**facts)


def of(**facts: Any) -> Callable[[Answered], Answered]:
    """A fault in what a reply says it belongs to."""
    return lambda answered: answered._replace(origin=answered.origin._replace(**facts))


class Wild:
    """A transport over another machine's clients, some of whom are faulty or silent."""

    def __init__(self, faults: dict[int, Callable[[Answered], Answered]], silent: dict[int, int] | None = None):
        self.faults, self.silent, self.calls = faults, silent or {}, list[tuple[int, Call]]()

    def begin(self, task: Task) -> None: ...

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered]]:
        for client in who:
            self.calls.append((client, call))
            if self.silent.get(client, 0) > 0:
                self.silent[client] -= 1
                continue
            reply, origin = HONEST[handler.__name__](client), Origin("ward", __version__, call.step, handler.__name__)
            trained = handler is Pupil.train
            answered = Answered(flatten(reply), 100, 0.5 if trained else math.nan, 5 if trained else 0, origin)
            fault = self.faults.get(client, lambda it: it)
            yield client, fault(answered._replace(reply=reply)) if client in self.faults else answered


def a_door(faults: Any = None, silent: Any = None, **protocol: Any) -> Door:
    scenario = Scenario(replace(TINY, clients=CLIENTS, active=3, train_limit=20), 0)
    chosen = Protocol(rounds=3, **protocol)
    door = Door(Wild(faults or {}, silent), scenario, chosen, 0, experiment="ward")
    door.begin(scenario.tasks[0])
    assert scenario.capacity == CAPACITY
    return door


def whys(door: Door) -> dict[int, str]:
    return {one["client"]: one["why"] for one in door.tally.refused}


def test_honest_replies_of_other_machines_are_let_in() -> None:
    door = a_door()
    assert door.ask([0, 2, 4], Pupil.train, MESSAGE).mean("weights")["w"].tolist() == [2.0] * 4
    assert door.ask(range(4), Pupil.measure, MESSAGE).sum("count") == 80
    assert door.tally.refused == [] and door.tally.lost == 0 and door.cursor.kept[4] == 100
    assert door.tally.loss() == 0.5


WRONG = {
    "a shape": (changed(weights__w=torch.zeros(5)), r"has float32 of shape \(5,\) as weights/w; what was sent is.*4"),
    "a type": (changed(weights__w=torch.zeros(4).double()), "has float64 of shape"),
    "an unknown field": (changed(backdoor=torch.zeros(1)), "has backdoor, which is no part of a Update"),
    "a field in a number": (changed(count__x=torch.zeros(1)), "has count/x, which is no part of a Update"),
    "an unknown weight": (changed(weights__more=torch.zeros(1)), "has weights/more, which was not sent to it"),
    "a missing weight": (changed(weights__w=None), "lacks weights/w"),
    "a missing field": (changed(count=None), "lacks count"),
    "a number of numbers": (
        changed(count=torch.ones(2, dtype=torch.int64)),
        r"shape \(2,\) as count, which is one int",
    ),
    "a float count": (changed(count=torch.tensor(5.0)), "float32 of shape .* as count, which is one int"),
    "NaN": (changed(weights__w=torch.tensor([0, math.nan, 0, 0])), "numbers in weights/w that are not finite"),
    "infinity": (changed(weights__b=torch.tensor([0, -math.inf])), "numbers in weights/b that are not finite"),
    "a count below zero": (changed(count=torch.tensor(-1)), "counts -1 as count, which is less than nothing"),
    "too many images": (changed(count=torch.tensor(10**12)), "counts 1,000,000,000,000 as count; most_images"),
    "another record": (beside(reply=MESSAGE), "is a Sent, not a Update"),
    "no record": (beside(reply="rm -rf"), "is a str, not a Update"),
    "no tensors": (changed(weights__w=[1, 2, 3, 4]), "lacks weights/w"),
    "a loss that is NaN": (beside(loss=math.nan), "numbers in its loss that are not finite"),
    "less than no memory": (beside(kept=-1), "less than nothing"),
    "less than no images": (beside(images=-1), "less than nothing"),
    "another experiment": (of(experiment="kitchen"), "is of another experiment, kitchen"),
    "another version": (of(version="0.0.1"), f"is of fcil 0.0.1; here is fcil {__version__}"),
    "a replay": (of(step=7), r"answers question 7 \(train\), not 1 \(train\)"),
    "another answer": (of(answer="measure"), r"answers question 1 \(measure\), not 1 \(train\)"),
}


@pytest.mark.parametrize(("fault", "why"), WRONG.values(), ids=WRONG)
def test_a_wrong_update_is_refused_by_name_and_the_round_goes_on(
    fault: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    door = a_door({2: fault})
    with caplog.at_level(logging.WARNING, "fcil"):
        came = door.ask([0, 2, 4, 5], Pupil.train, MESSAGE)
        assert came.mean("weights")["w"].tolist() == [3.0] * 4 and len(came) == 3
    assert [(one["client"], one["answer"]) for one in door.tally.refused] == [(2, "train")]
    assert caplog.messages == [f"refused the reply of client 2 to train: it {whys(door)[2]}"]
    assert re.search(why, whys(door)[2]), whys(door)[2]
    assert door.tally.loss() == 0.5 and door.tally.lost == 0
    assert 2 not in door.cursor.kept, "nothing that came with it is believed, either"


STATISTICS = {
    "a class beyond all": (changed(sums__6=torch.ones(3)), "speaks of class 6; there is room for 6"),
    "a class below zero": (changed(**{"sums__-1": torch.ones(3)}), "speaks of class -1"),
    "a class of very many digits": (changed(**{"sums__" + "9" * 5000: torch.ones(3)}), "speaks of class 9{60}; there"),
    "a class written in two ways": (changed(sums__00=torch.ones(3)), "speaks of class 00"),
    "a name that would forge a log": (
        changed(**{"sums\nserver": torch.ones(3)}),
        r"has sums\?server, which is no part",
    ),
    "a class that is no number": (changed(sums__cat=torch.ones(3)), "speaks of class cat"),
    "a shape of its own": (changed(sums__0=torch.ones(2)), r"shape \(2,\) as sums/0; most replies have .*\(3,\)"),
    "two shapes": (changed(spread=torch.ones(2, 1)), r"shape \(2, 1\) as spread; most replies"),
    "a type of its own": (changed(spread=torch.ones(2, dtype=torch.int64)), "has int64 of shape"),
    "a class counted below zero": (changed(counts__1=torch.tensor(-3)), "counts -3 as counts/1"),
    "a class counted too often": (changed(counts__1=torch.tensor(10**9)), "as counts/1; most_images allows"),
    "NaN": (changed(sums__1=torch.full((3,), math.nan)), "numbers in sums/1 that are not finite"),
}


@pytest.mark.parametrize("liar", [0, 1, 3])
@pytest.mark.parametrize(("fault", "why"), STATISTICS.values(), ids=STATISTICS)
def test_wrong_statistics_are_refused_whoever_comes_first(fault: Any, why: str, liar: int) -> None:
    honest = a_door().ask([c for c in range(4) if c != liar], Pupil.measure, MESSAGE).sum("sums")
    door = a_door({liar: fault})
    sums = door.ask(range(4), Pupil.measure, MESSAGE).sum("sums")
    assert list(whys(door)) == [liar] and re.search(why, whys(door)[liar])
    assert all(torch.equal(sums[j], honest[j]) for j in honest) and sums.keys() == honest.keys()


def test_where_two_disagree_and_there_is_no_third_neither_is_believed() -> None:
    door = a_door({1: changed(spread=torch.ones(7))})
    with pytest.raises(UserError, match="no reply to measure was let in; the last one differs from another"):
        door.ask([0, 1], Pupil.measure, MESSAGE).sum("spread")
    assert list(whys(door)) == [0, 1]


def test_what_honest_replies_differ_in_is_no_reason_to_refuse() -> None:
    door = a_door({3: changed(centres__0=torch.ones(2, 4)), 4: changed(gradients__0=torch.ones(5))})
    assert len(door.ask(range(5), Pupil.rows, MESSAGE)) == 3
    assert set(whys(door)) == {3, 4}


def test_an_answer_that_never_left_this_machine_needs_no_origin() -> None:
    door = a_door({1: beside(origin=None)})
    assert len(door.ask([0, 1], Pupil.train, MESSAGE)) == 2 and door.tally.refused == []


def test_what_is_let_in_is_not_copied() -> None:
    reply = an_update(1)
    judge = trust.Judge(Update, MESSAGE, Origin("", "", 1, "train"), CAPACITY, Protocol())
    (verdict,) = judge.verdicts(iter([(1, Answered(reply, 0))]))
    assert verdict.answered.reply is reply and verdict.size == 4 * 4 + 2 * 4 + 8 + 8


def test_only_some_replies_are_held_back_and_the_first_three_settle_what_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(trust.HELD, "cpu", 1)
    came = []

    def stream() -> Iterator[tuple[int, Answered]]:
        for client in range(8):
            came.append(client)
            reply = replace(statistics(client), spread=torch.ones(2 if client not in (0, 4) else 3))
            yield client, Answered(reply, 0)

    judge, seen = trust.Judge(Statistics, MESSAGE, Origin("", "", 1, ""), CAPACITY, Protocol()), []
    for verdict in judge.verdicts(stream()):
        seen.append((verdict.client, bool(verdict.why), len(came)))
    assert [(client, why) for client, why, _ in seen] == [(c, c in (0, 4)) for c in range(8)]
    assert [there for *_, there in seen] == [3, 3, 3, 6, 6, 6, 8, 8]


# -- far from the others ----------------------------------------------------------------------------------------------


def test_a_centroid_far_from_the_others_is_refused() -> None:
    door = a_door({2: changed(sums__1=torch.full((3,), 500.0))}, outliers=10)
    sums = door.ask(range(5), Pupil.measure, MESSAGE).sum("sums")
    assert list(whys(door)) == [2] and "has sums of class 1 that lie" in whys(door)[2]
    assert "outliers allows 10" in whys(door)[2] and sums[1][0] < 50
    lenient = a_door({2: changed(sums__1=torch.full((3,), 500.0))})
    assert lenient.ask(range(5), Pupil.measure, MESSAGE).sum("sums")[1][0] > 500


def test_three_replies_are_too_few_to_say_who_is_far_out() -> None:
    door = a_door({2: changed(sums__1=torch.full((3,), 500.0))}, outliers=10)
    assert len(door.ask(range(3), Pupil.measure, MESSAGE)) == 3 and door.tally.refused == []


def test_clients_with_many_images_are_not_far_out_for_that() -> None:
    many = {"sums": torch.full((3,), 1e5), "counts": torch.tensor(100_000)}
    door = a_door({2: changed(**{f"{part}__{j}": value for part, value in many.items() for j in (0, 1)})}, outliers=10)
    assert len(door.ask(range(5), Pupil.measure, MESSAGE)) == 5


def test_the_rule_is_the_median_absolute_deviation_worked_out_by_hand() -> None:
    @record
    class Means:
        means: ByClass

    flats = [{"means/0": torch.tensor([x, 0.0])} for x in (0.0, 1.0, 2.0, 3.0, 10.0)]
    # the median is 2, the distances are 2, 1, 0, 1, 8, their median is 1: the last lies 8 times as far as usual
    assert [bool(why) for why in far_out(flats, Means, 7.9)] == [False, False, False, False, True]
    assert far_out(flats, Means, 8.0) == [""] * 5
    assert "lie 8 times as far" in far_out(flats, Means, 7.9)[4]
    alike = [{"means/0": torch.tensor([100.0 + x])} for x in (0.0, 0.0, 0.0, 0.5)]  # half a percent off
    assert far_out(alike, Means, 3.0) == [""] * 4


# -- too few ----------------------------------------------------------------------------------------------------------


def test_below_the_quorum_those_missing_are_asked_again_the_same_question() -> None:
    door = a_door({4: of(step=0)}, {0: 2, 2: 1}, quorum=3)
    waited = []
    door.wait = lambda tries, sentence: waited.append((tries, sentence))
    assert len(door.ask([0, 2, 4, 5], Pupil.train, MESSAGE)) == 3
    asked = [(client, call.step) for client, call in door.transport.calls]
    assert asked == [(c, 1) for c in (0, 2, 4, 5, 0, 2, 4, 0, 4)]
    assert waited == [
        (1, "1 of 4 clients have answered train of task 1, and quorum=3"),
        (2, "2 of 4 clients have answered train of task 1, and quorum=3"),
    ]
    assert door.tally.lost == 0 and door.tally.clients == 4 and set(whys(door)) == {4}


def test_a_quorum_asks_for_no_more_clients_than_there_are() -> None:
    door = a_door(quorum=100)
    assert len(door.ask([0, 2], Pupil.train, MESSAGE)) == 2 and len(door.ask([], Pupil.train, MESSAGE)) == 0


def test_a_simulation_does_not_wait_forever() -> None:
    door = a_door(silent={0: 1000}, quorum=2)
    with pytest.raises(
        UserError, match=f"1 of 2 clients have answered train.*in {MOST_TRIES} tries; set a smaller quorum"
    ):
        door.ask([0, 2], Pupil.train, MESSAGE).mean("weights")
    assert len(door.transport.calls) == MOST_TRIES + 1


def test_lost_messages_are_sent_again_until_there_is_a_quorum(tmp_path: Path) -> None:
    lines = list(execute(tiny_plan("finetune", lost=0.5, quorum=2), tmp_path / "run", "cpu", workers=1))
    assert all(line["lost"] == 0 for line in lines if line["kind"] == "round")


# -- whole runs -------------------------------------------------------------------------------------------------------


class Meddled:
    """The simulation's transport with one client's replies changed on the way, or taken away if there is no fault."""

    def __init__(self, inner: Any, client: int, fault: Callable[[Answered], Answered] | None):
        self.inner, self.client, self.fault = inner, client, fault

    def begin(self, task: Task) -> None:
        self.inner.begin(task)

    def deliver(self, *question: Any) -> Iterator[tuple[int, Answered]]:
        for client, answered in self.inner.deliver(*question):
            if client != self.client:
                yield client, answered
            elif self.fault is not None:
                yield client, self.fault(answered)


def poisoned(answered: Answered) -> Answered:
    """Every number of every tensor is NaN; a reply without any names a field that it has not."""
    flat = {n: torch.full_like(t, math.nan) if t.is_floating_point() else t for n, t in flatten(answered.reply).items()}
    return answered._replace(reply=flat if any(t.is_floating_point() for t in flat.values()) else {"x": torch.ones(1)})


def meddled(wanted: Plan, fault: Callable[[Answered], Answered] | None) -> tuple[Parts, list[dict[str, Any]]]:
    parts = assemble(wanted, "cpu", workers=1)
    parts.door.transport = Meddled(parts.transport, 1, fault)
    return parts, list(learn(parts.scenario, parts.server, parts.door, parts.engine))


def test_who_alone_speaks_of_a_class_is_held_against_what_others_said_of_others() -> None:
    door = a_door({2: changed(sums__1=torch.ones(7))})
    list(door.ask([0, 1, 2, 3], Pupil.measure, MESSAGE))
    with pytest.raises(UserError, match="no reply to measure was let in"):
        list(door.ask([2], Pupil.measure, MESSAGE))
    why = "has float32 of shape (7,) as sums/1; most replies have float32 of shape (3,)"
    assert [(one["client"], one["why"]) for one in door.tally.refused] == [(2, why), (2, why)]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"counts__1": torch.ones(7, dtype=torch.int64)}, "int64 of shape (7,) as counts/1, which is one number"),
        ({"sums__1": torch.ones(3, dtype=torch.complex64)}, "complex64 of shape (3,) as sums/1; numbers are real"),
    ],
)
def test_what_no_honest_reply_has_is_refused_of_one_alone(fault: dict[str, Tensor], why: str) -> None:
    door, heard = a_door({2: changed(**fault)}), list[tuple[int, str]]()
    door.told = lambda client, said: heard.append((client, said))
    with pytest.raises(UserError, match="no reply to measure was let in"):
        list(door.ask([2], Pupil.measure, MESSAGE))
    assert [client for client, _ in heard] == [2] and why in heard[0][1]


@pytest.mark.parametrize("method", ["hr", "icarl", "mfcl", "remind"])
def test_a_run_with_a_poisoner_ends_as_if_it_had_never_answered(method: str) -> None:
    wanted = tiny_plan(method, replace(TINY, active=4))
    bad, lines = meddled(wanted, poisoned)
    without, _ = meddled(wanted, None)
    mine, theirs = flatten(bad.server.broadcast()), flatten(without.server.broadcast())
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[n], theirs[n]) for n in mine)
    refused = [one for line in lines for one in line.get("refused", [])]
    assert {one["client"] for one in refused} == {1} and len(refused) >= 9
    result = result_of(json.loads(json.dumps(lines)))
    assert result["refused"] == {"1": len(refused)}
    assert told(result) == f"refused {len(refused)} replies: {len(refused)} of client 1; why is in ledger.jsonl"


@pytest.mark.parametrize("method", ["finetune", "hr"])  # which asks more than once in a round
def test_one_client_alone_cannot_make_a_run_look_diverged(method: str) -> None:
    parts, lines = meddled(tiny_plan(method, replace(TINY, active=2)), beside(images=1, loss=math.nan))
    assert [line["kind"] for line in lines].count("task") == 3 and all(
        math.isfinite(line["loss"]) for line in lines if "loss" in line
    )


def test_a_training_that_diverges_for_most_clients_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="training diverged in task 1, round 1: most clients.*smaller lr"):
        list(execute(tiny_plan("finetune", lr=1e30, clip=0), tmp_path / "run", "cpu", workers=1))


@pytest.mark.parametrize("method", FILES)
def test_no_reply_of_an_honest_run_is_refused(method: str, tmp_path: Path) -> None:
    wanted = tiny_plan(method, stop_after=2, outliers=0)
    lines = list(execute(wanted, tmp_path / "run", "cpu", workers=1))
    assert lines and not any("refused" in line for line in lines)
