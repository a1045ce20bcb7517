"""A method that reaches for images which are not its own is stopped, wherever its code runs."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from fcil.federation.calls import Call
from fcil.federation.loop import learn
from fcil.parts import Parts, assemble
from fcil.scenario.datasets import load
from fcil.scenario.reach import DataGone, at_work, handing_over, within_reach
from tests.conftest import tiny_plan

REACHES: dict[str, Callable[[Parts], Any]] = {
    "what client 1 holds": lambda parts: parts.scenario.local(1, parts.scenario.tasks[0]),
    "test images": lambda parts: parts.scenario.test(parts.scenario.tasks[0]),
    "what all clients hold": lambda parts: parts.scenario.trained(),
    "the dataset digits": lambda parts: load("digits"),
}


@pytest.fixture
def parts() -> Parts:
    return assemble(tiny_plan("finetune"), "cpu")


def lines(parts: Parts) -> int:
    return len(list(learn(parts.scenario, parts.server, parts.door, parts.engine)))


@pytest.mark.parametrize("what", REACHES)
@pytest.mark.parametrize("trained", [False, True], ids=["before training", "after training"])
def test_a_client_has_its_own_images_only(
    parts: Parts, what: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = type(parts.engine.client).train

    @wraps(honest)
    def train(client: Any, memory: Any, data: Any, message: Any) -> Any:
        if not trained:
            REACHES[what](parts)
        reply = yield from honest(client, memory, data, message)
        REACHES[what](parts)
        return reply

    monkeypatch.setattr(type(parts.engine.client), "train", train)
    with pytest.raises(DataGone, match=rf"client \d+ asks for {what}; a method has what its answers are handed"):
        lines(parts)


@pytest.mark.parametrize("what", REACHES)
def test_a_loss_has_its_batch_only(parts: Parts, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcil.methods.finetune.loss", lambda nets, batch, seen: REACHES[what](parts))
    with pytest.raises(DataGone, match=rf"client \d+ asks for {what}"):
        lines(parts)


def test_what_a_client_shows_it_shows_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = assemble(tiny_plan("icarl"), "cpu")
    task = parts.scenario.tasks[0]

    def look(*handed: Any) -> Any:
        return REACHES["test images"](parts)

    monkeypatch.setattr(type(parts.engine.client), "look", look)
    own, call = parts.scenario.local(0, task), Call(0, 0, 0)
    with pytest.raises(DataGone, match="client 0 asks for test images"):
        parts.engine.look(0, parts.method.memory(), own, parts.server.broadcast(), call, task.new)


@pytest.mark.parametrize("what", REACHES)
def test_a_server_has_no_images(parts: Parts, what: str) -> None:
    honest = parts.server.learn_task

    def learn_task(task: Any, clients: Any) -> Any:
        yield from honest(task, clients)
        REACHES[what](parts)

    parts.server.learn_task = learn_task  # type: ignore[method-assign]
    with pytest.raises(DataGone, match=f"the server asks for {what}"):
        lines(parts)


@pytest.mark.parametrize("what", REACHES)
def test_a_model_has_the_images_that_it_is_shown(parts: Parts, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = type(parts.engine.client).predict

    def predict(client: Any, message: Any, images: Any) -> Any:
        REACHES[what](parts)
        return honest(client, message, images)

    monkeypatch.setattr(type(parts.engine.client), "predict", predict)
    with pytest.raises(DataGone, match=f"a model asks for {what}"):
        lines(parts)


def test_whoever_is_honest_and_whoever_looks_from_outside_is_not_stopped(parts: Parts) -> None:
    assert lines(parts) > 3
    for reach in REACHES.values():
        parts.scenario.begin(parts.scenario.tasks[0])
        reach(parts)


def test_images_are_handed_over_inside_and_out_of_reach_again_after() -> None:
    with at_work("the server"):
        with handing_over():
            within_reach("anything")
        with pytest.raises(DataGone, match="the server asks for anything"):
            within_reach("anything")
    within_reach("anything")
