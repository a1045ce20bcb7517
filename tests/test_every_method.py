"""What every method must do, on three tasks of two digits each."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fcil.federation import engine
from fcil.federation.calls import Answered, Call
from fcil.federation.clients import Door
from fcil.federation.in_process import InProcess
from fcil.federation.loop import Line, learn
from fcil.methods import METHODS, family
from fcil.parts import Parts, assemble, setting_of
from fcil.plan import Plan
from fcil.records import Weights, flatten, size_in_bytes, unflatten
from fcil.scenario.reach import handing_over
from fcil.scenario.scenario import Scenario
from tests.conftest import FILES, TINY, tiny_plan
from tests.test_bars import BARS, BASELINES

LEARNS_ALONE: dict[str, dict[str, int]] = {"fedspace": {"pretrain": 0}}  # how to keep a server from training alone
TOO_SHORT = ("fedftg-plain", "mfcl", "ictrl")  # such runs are too short for their bars: those are left to `make bars`
SERVER_DRAWS = ("podnet", "glfc", "fedftg", "fedspace", "target", "mfcl", "remind", "remind-plus", "ictrl")
DECLARED: dict[str, set[str]] = {}  # method -> fields of its replies that hold images or what looks like them

every_method = pytest.mark.parametrize("method", METHODS)
every_file = pytest.mark.parametrize("method", FILES)  # where ablations run the same lines


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine.os, "cpu_count", lambda: 1)  # evaluation takes all cores; others are at work here
    with engine.threads(1):
        yield


# -- running and watching ---------------------------------------------------------------------------------------------


def copied(flat: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in flat.items()}


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one
    )


def timeless(lines: list[Line]) -> list[Line]:
    return [{**line, "seconds": None} for line in lines]


def remade(rec: Any) -> Any:
    """Take a record apart and put it together again."""
    return unflatten(type(rec), copied(flatten(rec)))


def is_record(thing: Any) -> bool:
    return is_dataclass(thing) and equal(flatten(thing), flatten(remade(thing)))


@dataclass
class Seen:
    """One answer as the transport saw it."""

    client: int
    handler: str
    task: int
    message: Any
    sent: Weights  # a copy from before
    reply: Any
    kept: int
    memory: Any
    images: Tensor  # what the client holds of the task
    labels: Tensor


class Watching(InProcess):
    """Clients in this process, under observation."""

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered[Any]]]:
        sent = copied(flatten(message))
        for client, answered in super().deliver(who, handler, message, call):
            with handing_over():
                data = self.scenario.local(client, self.task)
            self.seen.append(
                Seen(
                    client, handler.__name__, call.task, message, sent, answered.reply, answered.kept,
                    copy.deepcopy(self.memories.get(client)), data.images, data.labels,
                )
            )  # fmt: skip
            yield client, answered


class Backwards(InProcess):
    """Clients that answer in the opposite order of that in which they were asked."""

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered[Any]]]:
        answers = dict(super().deliver(list(reversed(who)), handler, message, call))
        yield from ((client, answers[client]) for client in who)


@cache
def tiny_scenario() -> Scenario:
    return Scenario(TINY, 0)


def parts_of(wanted: Plan, transport: type[InProcess] = InProcess) -> Parts:
    shared = tiny_scenario() if wanted.benchmark == TINY and wanted.seed == 0 else None
    parts = assemble(wanted, "cpu", shared)
    with_it = parts.transport
    parts.transport = transport(with_it.engine, with_it.scenario, with_it.memory, with_it.budget)
    parts.transport.seen = []  # type: ignore[attr-defined]
    parts.door = Door(parts.transport, parts.scenario, wanted.protocol, wanted.seed)
    return parts


def lines_of(parts: Parts) -> list[Line]:
    return list(learn(parts.scenario, parts.server, parts.door, parts.engine))


def finished(method: str, transport: type[InProcess] = InProcess, **how: Any) -> tuple[Parts, list[Line]]:
    parts = parts_of(tiny_plan(method, **how), transport)
    return parts, lines_of(parts)


@cache
def watched(method: str) -> tuple[Parts, list[Line]]:
    return finished(method, Watching)


def accuracies(lines: list[Line]) -> list[list[float]]:
    tasks = [line for line in lines if line["kind"] == "task"]
    return [[100 * c / n for c, n in zip(line["correct"], line["total"], strict=True)] for line in tasks]


# -- learning ---------------------------------------------------------------------------------------------------------


@cache
def taught(method: str) -> list[Line]:
    """A run with time enough to learn two tasks."""
    return finished(method, benchmark=replace(TINY, tasks=2), rounds=8, steps=6, batch_size=32)[1]


@every_method
def test_learns_the_first_task(method: str) -> None:
    assert accuracies(taught(method))[0][0] > 75, "chance is 50"


def test_joint_training_keeps_what_fine_tuning_forgets() -> None:
    upper, lower = accuracies(taught("joint"))[-1], accuracies(taught("finetune"))[-1]
    assert upper[0] - lower[0] > 60 and sum(upper) - sum(lower) > 60
    assert lower[1] > 75, "fine-tuning learns the task at hand"


@pytest.mark.parametrize("method", [name for name in BASELINES if name not in TOO_SHORT])
def test_baselines_forget_less_than_fine_tuning(method: str) -> None:
    """With one seed; by chance one may pass joint training by 5 points, which are 7 of the 143 test images."""
    lower, final, upper = (sum(accuracies(taught(name))[-1]) / 2 for name in ("finetune", method, "joint"))
    assert lower + BARS[family(method)] <= final <= upper + 5


@every_method
def test_learns_every_task_a_little(method: str) -> None:
    _, lines = watched(method)
    assert [line["task"] for line in lines if line["kind"] == "task"] == [0, 1, 2]
    losses = [line["loss"] for line in lines if line["kind"] == "round" and line["loss"] is not None]
    assert losses and all(math.isfinite(loss) for loss in losses)


# -- repeating --------------------------------------------------------------------------------------------------------


@every_file
def test_the_same_seed_gives_the_same_bits(method: str) -> None:
    (one, first), (other, second) = watched(method), finished(method)
    assert timeless(first) == timeless(second)
    assert equal(flatten(one.server.broadcast()), flatten(other.server.broadcast()))
    assert equal(flatten(one.server.state), flatten(other.server.state))


@every_file
def test_another_seed_gives_others(method: str) -> None:
    (one, _), (other, _) = watched(method), finished(method, seed=1, rounds=1, benchmark=replace(TINY, tasks=1))
    assert not equal(flatten(one.server.broadcast()), flatten(other.server.broadcast()))


@every_file
def test_what_a_server_draws_by_itself_is_another_with_another_seed(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = watched(method)
    monkeypatch.setattr("fcil.parts.setting_of", lambda *given: replace(setting_of(*given), seed=1))  # all else has 0
    other, _ = finished(method)
    assert equal(flatten(one.server.state), flatten(other.server.state)) == (method not in SERVER_DRAWS)


@every_file
def test_answers_do_not_depend_on_who_answers_first(method: str) -> None:
    (one, first), (other, second) = watched(method), finished(method, Backwards)
    assert timeless(first) == timeless(second)
    assert equal(flatten(one.server.state), flatten(other.server.state))


@every_file
def test_goes_on_from_its_records_as_if_nothing_had_been(method: str) -> None:
    """After every line a new server, engine and door take over: all they get is state, memories and cursor."""
    _, expected = watched(method)
    parts, lines = parts_of(tiny_plan(method)), []
    while (line := next(learn(parts.scenario, parts.server, parts.door, parts.engine), None)) is not None:
        lines.append(line)
        heir = parts_of(tiny_plan(method))
        heir.server.state = remade(parts.server.state)
        heir.door.cursor = copy.deepcopy(parts.door.cursor)
        heir.transport.memories = {client: remade(memory) for client, memory in parts.transport.memories.items()}
        parts = heir
    assert timeless(lines) == timeless(expected)
    assert equal(flatten(parts.server.state), flatten(watched(method)[0].server.state))


# -- adversity --------------------------------------------------------------------------------------------------------


@every_method
def test_survives_lost_messages(method: str) -> None:
    parts, lines = finished(method, benchmark=replace(TINY, lost=0.4), rounds=4)
    assert sum(line["lost"] for line in lines) > 3
    assert len(accuracies(lines)) == 3 and all_finite(parts)


@every_method
def test_survives_that_every_message_is_lost(method: str) -> None:
    alone = LEARNS_ALONE.get(method, {})
    parts = parts_of(tiny_plan(method, benchmark=replace(TINY, lost=1.0, tasks=2), rounds=1, **alone))
    before = copied(parts.server.state.weights)
    assert len(accuracies(lines_of(parts))) == 2
    assert equal(before, parts.server.state.weights) and parts.transport.memories == {}


@every_method
@pytest.mark.parametrize(("active", "images"), [(10, 10), (1, 4)])
def test_survives_clients_without_images(method: str, active: int, images: int) -> None:
    many = replace(TINY, clients=40, active=active, train_limit=images, tasks=2)
    parts, lines = finished(method, Watching, benchmark=many)
    empty = [seen for seen in parts.transport.seen if len(seen.images) == 0]
    assert len(empty) > 3 and len(accuracies(lines)) == 2 and all_finite(parts)
    first = [seen.reply for seen in empty if seen.task == 0 and hasattr(seen.reply, "count")]
    assert first and all(reply.count == 0 for reply in first)


@every_method
def test_survives_classes_that_nobody_asked_holds_and_one_image_beside_many(method: str) -> None:
    """In each task one client of eight trains: on 19 images of a class and one of the other, then on one class only."""
    uneven = replace(TINY, clients=8, active=1, alpha=0.02, train_limit=80)
    parts, lines = finished(method, Watching, seed=3, benchmark=uneven, rounds=1)
    assert len(accuracies(lines)) == 3 and all_finite(parts)
    asked = {seen.task: seen for seen in parts.transport.seen if seen.handler == "train"}
    held = [torch.bincount(asked[task].labels, minlength=6)[2 * task : 2 * task + 2].tolist() for task in range(3)]
    assert held == [[19, 1], [20, 0], [0, 20]] and all(seen.reply.count > 10 for seen in asked.values())


@every_method
def test_survives_clients_at_different_tasks(method: str) -> None:
    parts, lines = finished(method, Watching, benchmark=replace(TINY, lag=1, clients=6, active=3))
    assert set(parts.scenario.lags.tolist()) == {0, 1} and len(accuracies(lines)) == 3 and all_finite(parts)
    assert {len(seen.images) > 0 for seen in parts.transport.seen if seen.task == 0} == {False, True}


def all_finite(parts: Parts) -> bool:
    """Look at what is broadcast and kept, and at the best score of every test image: some class must have a number."""
    message = parts.server.broadcast()
    flat = [t for rec in (message, *parts.transport.memories.values()) for t in flatten(rec).values()]
    images = torch.cat([parts.scenario.test(task)[0] for task in parts.scenario.tasks])
    with torch.inference_mode():
        flat.append(parts.engine.client.predict(message, images).amax(1))
    return all(t.isfinite().all() for t in flat if t.is_floating_point())


# -- what is sent and kept --------------------------------------------------------------------------------------------


@every_file
def test_no_client_changes_the_message_it_was_sent(method: str) -> None:
    for seen in watched(method)[0].transport.seen:
        assert equal(seen.sent, flatten(seen.message)), (seen.handler, seen.client)


@every_file
def test_only_records_are_sent_and_kept(method: str) -> None:
    parts, _ = watched(method)
    assert is_record(parts.server.state) and is_record(parts.server.broadcast())
    for seen in parts.transport.seen:
        assert is_record(seen.message) and is_record(seen.reply) and (seen.memory is None or is_record(seen.memory))
        for tensor in flatten(seen.reply).values():
            assert not tensor.requires_grad and not tensor.is_inference()


@every_method
def test_keeps_its_byte_budget_and_the_ledger_says_what_is_kept(method: str) -> None:
    parts, lines = watched(method)
    nothing = size_in_bytes(parts.method.memory())
    for line in (line for line in lines if line["kind"] == "task"):
        latest = {seen.client: seen for seen in parts.transport.seen if seen.task <= line["task"]}
        weights = [size_in_bytes(seen.memory) if seen.memory is not None else nothing for seen in latest.values()]
        assert line["kept"] == sum(weights) and line["kept_max"] == max(weights, default=0)
        if family(method) != "bound":
            assert line["kept_max"] <= parts.scenario.budget.at(parts.scenario.tasks[line["task"]])


@every_method
def test_the_ledger_counts_every_byte(method: str) -> None:
    parts, lines = watched(method)
    assert sum(line["up"] for line in lines) == sum(size_in_bytes(seen.reply) for seen in parts.transport.seen)
    assert sum(line["down"] for line in lines) == sum(size_in_bytes(seen.message) for seen in parts.transport.seen)


def leaks(reply: Any, images: Tensor, declared: set[str]) -> list[str]:
    """Return the fields of a reply that have the shape of images or hold one, even scaled or shifted."""
    shape, found = tuple(images.shape[1:]), []
    own = _directions(images.double())
    for field in fields(reply):
        if field.name in declared:
            continue
        for name, tensor in flatten(reply).items():
            if name != field.name and not name.startswith(field.name + "/"):
                continue
            if tensor.ndim >= 3 and tuple(tensor.shape[-3:]) == shape:
                found.append(f"{name} has the shape of images")
            elif len(own) and tensor.numel() and tensor.numel() % math.prod(shape) == 0:
                likeness = _directions(tensor.double().reshape(-1, *shape)) @ own.T
                if likeness.numel() and likeness.abs().max() > 0.99:
                    found.append(f"{name} holds an image")
    return found


def _directions(images: Tensor) -> Tensor:
    """Centre each image and scale it to length one; flat ones have no direction and are left out."""
    rows = images.flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    length = rows.norm(dim=1, keepdim=True)
    return (rows / length.clamp_min(1e-12))[length[:, 0] > 1e-6]


@every_method
def test_no_image_leaves_its_client(method: str) -> None:
    parts, _ = watched(method)
    assert parts.transport.seen
    for seen in parts.transport.seen:
        assert leaks(seen.reply, seen.images, DECLARED.get(method, set())) == [], seen.handler


def test_an_image_that_leaves_would_be_seen() -> None:
    @dataclass
    class Letter:
        weights: Weights
        count: int = 3

    images = tiny_scenario().dataset.train_images[:5]
    hidden = torch.cat([torch.randn(64), (images[2].double().flatten() - 100) / 17])
    assert leaks(Letter({"a": torch.randn(64, 4)}), images, set()) == []
    assert leaks(Letter({"a": hidden.view(16, 8)}), images, set()) == ["weights/a holds an image"]
    assert leaks(Letter({"a": torch.randn(2, 1, 8, 8)}), images, set()) == ["weights/a has the shape of images"]
    assert leaks(Letter({"a": images}), images, {"weights"}) == []


# -- classifying ------------------------------------------------------------------------------------------------------


@every_file
def test_predict_scores_every_class_and_rules_out_those_not_seen(method: str) -> None:
    parts = parts_of(tiny_plan(method, rounds=1, steps=1))
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        if line["kind"] != "task":
            continue
        images, _ = parts.scenario.test(parts.scenario.tasks[0])
        with torch.inference_mode():
            scores = parts.engine.client.predict(parts.server.broadcast(), images)
            one = parts.engine.client.predict(parts.server.broadcast(), images[:1])
        seen = 2 * (line["task"] + 1)
        assert scores.shape == (len(images), parts.setting.capacity) and scores.is_floating_point()
        assert scores[:, :seen].isfinite().all() and (scores[:, seen:] == -math.inf).all()
        assert torch.allclose(one, scores[:1], atol=1e-5), "an image's scores do not depend on those beside it"


@every_file
def test_predicting_changes_nothing(method: str) -> None:
    parts, _ = watched(method)
    before = copied(flatten(parts.server.state))
    images, _ = parts.scenario.test(parts.scenario.tasks[0])
    first, again = (parts.engine.classify(parts.server.broadcast(), images) for _ in range(2))
    assert torch.equal(first, again) and equal(before, flatten(parts.server.state))
