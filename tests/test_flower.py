"""The same method in process and over Flower's own messages and ClientApp: bit for bit the same server."""

from collections.abc import Iterable

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from fcil.experiment import Parts, assemble
from fcil.federation.clients import Door
from fcil.federation.flower import OverFlower, client_app
from fcil.federation.loop import learn
from fcil.records import flatten
from tests.conftest import FILES, tiny_plan


class LoopbackGrid:
    """A grid that hands each message to the ClientApp of its node; what a node keeps is in its Context alone."""

    def __init__(self, app: ClientApp, nodes: int):
        self.app = app
        self.contexts = {100 + i: Context(1, 100 + i, {"partition-id": i}, RecordDict(), {}) for i in range(nodes)}
        self.delivered: list[Message] = []

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        mail = list(messages)
        self.delivered += mail
        return [self.app(m, self.contexts[m.metadata.dst_node_id]) for m in reversed(mail)]  # in no promised order


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_id", "node_id", "task_id"):  # set by Flower's runtime in a real deployment
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def over_flower(method: str) -> tuple[Parts, LoopbackGrid]:
    made = tiny_plan(method)
    parts = assemble(made, "cpu")
    grid = LoopbackGrid(client_app(parts.engine, parts.scenario, type(parts.method.memory())), 4)
    parts.door = Door(OverFlower(grid), parts.scenario, made.protocol, made.seed)
    return parts, grid


@pytest.mark.parametrize("method", FILES)
def test_flower_gives_the_same_weights_bytes_and_ledger(method: str) -> None:
    here, (there, _) = assemble(tiny_plan(method), "cpu"), over_flower(method)
    lines = [
        [{**line, "seconds": None} for line in learn(parts.scenario, parts.server, parts.door, parts.engine)]
        for parts in (here, there)
    ]
    assert lines[0] == lines[1]
    one, other = flatten(here.server.broadcast()), flatten(there.server.broadcast())
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_message_delivered_twice_changes_the_memory_once() -> None:
    parts, grid = over_flower("joint")
    for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
        if line["kind"] == "task":
            break
    remembered = [m for m in grid.delivered if m.metadata.message_type == "query.remember"]
    before = {n: flatten_state(c) for n, c in grid.contexts.items()}
    for message in remembered:
        grid.app(message, grid.contexts[message.metadata.dst_node_id])
    assert len(remembered) == 4 and before == {n: flatten_state(c) for n, c in grid.contexts.items()}


def flatten_state(context: Context) -> dict[str, list]:
    return {k: v.tolist() for k, v in context.state["memory"].to_torch_state_dict().items()}


def test_a_node_that_fails_is_a_reply_that_did_not_come() -> None:
    parts, grid = over_flower("finetune")
    answer = grid.send_and_receive
    grid.send_and_receive = lambda messages, timeout=None: [
        m for m in answer(messages) if m.metadata.src_node_id != 101
    ]
    lines = [line for line in learn(parts.scenario, parts.server, parts.door, parts.engine) if line["kind"] == "round"]
    assert sum(line["lost"] for line in lines) > 0
    assert all(torch.isfinite(t).all() for t in parts.server.state.weights.values())
