"""Every method behind the Flower app, in one process: the messages, the ClientApp and the wire are the real ones."""

import io
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fcil.deploy import flower
from fcil.deploy.asking import Rules
from fcil.deploy.flower import FlowerWire, client_app
from fcil.deploy.local import LocalWire, nodes_of
from fcil.deploy.messages import Request
from fcil.deploy.server import serve
from fcil.federation import versions
from fcil.records import Weights
from fcil.results.ledger import read
from fcil.results.runs import read_result
from tests.deployment.test_server import FILES, plan_of, same

RULES = Rules(3, ends=True, pause=0.01)


class LoopbackGrid:
    """A grid that hands each message to the app of its node, and the replies back in no promised order."""

    def __init__(self, folders: list[Path], state: Path):
        self.app, self.replies = client_app(), dict[str, Message]()
        configs = [{"name": f.name, "data": str(f), "state": str(state / f.name), "device": "cpu"} for f in folders]
        self.contexts = {900 - n: Context(1, 900 - n, config, RecordDict(), {}) for n, config in enumerate(configs)}

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node_id=id, name="") for id in self.contexts]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for number, message in enumerate(messages):
            ids.append(f"{id(message)}-{number}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.replies[ids[-1]] = self.app(message, self.contexts[message.metadata.dst_node_id])
        return ids

    def pull_messages(self, ids: list[str]) -> list[Message]:
        return [self.replies.pop(id) for id in reversed(ids) if id in self.replies]


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_id", "node_id", "task_id"):  # set by Flower's runtime in a real deployment
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


@pytest.mark.parametrize("method", FILES)
def test_every_method_ends_with_the_same_weights_and_ledger_behind_flower(
    tmp_path: Path, three: list[Path], method: str
) -> None:
    wanted = plan_of(method, rounds=1)
    here, there = tmp_path / "here", tmp_path / "there"
    for _ in serve(wanted, here, LocalWire(nodes_of(three, here / "nodes", "cpu")), RULES, lambda _: None, 8):
        pass
    grid = LoopbackGrid(three, tmp_path / "state")
    for _ in serve(wanted, there, FlowerWire(grid, 60), RULES, lambda _: None, 8):
        pass
    assert same(here, there)
    lines = [[{**line, "seconds": 0} for line in read(run / "ledger.jsonl")[1:]] for run in (here, there)]
    assert lines[0] == lines[1], "the same bytes, losses and answers"


def test_what_goes_wrong_on_a_node_is_told_in_a_sentence(tmp_path: Path, three: list[Path]) -> None:
    grid = LoopbackGrid(three, tmp_path / "state")
    wire = FlowerWire(grid, 60)
    (reply,) = wire.exchange({900: Request("look", {"version": 99}, {})}).values()
    assert "version 99 of fcil's messages" in reply.error and reply.tensors == {}
    (reply,) = wire.exchange({899: Request("ask", {"version": 1}, {})}).values()
    assert reply.error.startswith("KeyError")


def test_a_node_with_a_full_disk_is_done_without_and_keeps_what_it_had(
    tmp_path: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = versions.write_tensors

    def onto_a_full_disk(path: Path, flat: Weights) -> None:
        if "carla" in str(path) and path.stem != "memory-2":  # there was room in the first task
            raise OSError(28, "No space left on device", str(path))
        written(path, flat)

    monkeypatch.setattr(versions, "write_tensors", onto_a_full_disk)
    log: list[str] = []
    grid, run = LoopbackGrid(three, tmp_path / "state"), tmp_path / "run"
    for _ in serve(plan_of("icarl", rounds=1), run, FlowerWire(grid, 60), Rules(2, ends=True), log.append, 8):
        pass
    refused = [sentence for sentence in log if sentence.startswith("refused a reply of node carla")]
    assert refused and all("No space left" in sentence for sentence in refused)
    (kept,) = (tmp_path / "state" / "carla").glob("*/memory")
    assert versions.Versions(kept).before(10**9) is not None
    assert read_result(run)["final"] >= 0


def test_a_node_that_flower_gives_up_is_left_out(tmp_path: Path, three: list[Path]) -> None:
    grid = LoopbackGrid(three, tmp_path / "state")
    answer = grid.app
    grid.app = lambda message, context: (  # type: ignore[assignment]
        Message(Error(5, "gone"), reply_to=message) if context.node_id == 899 else answer(message, context)
    )
    asked = {address: Request("look", {"version": 1}, {}) for address in grid.contexts}
    assert set(FlowerWire(grid, 60).exchange(asked)) == {900, 898}


def test_an_answer_that_never_comes_is_not_waited_for_for_ever(tmp_path: Path, three: list[Path]) -> None:
    grid = LoopbackGrid(three, tmp_path / "state")
    grid.pull_messages = lambda ids: []  # type: ignore[method-assign]
    assert FlowerWire(grid, 0.5).exchange({900: Request("look", {"version": 1}, {})}) == {}


def header(kind: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


BROKEN = {
    "nothing": b"",
    "a torn zip": b"PK\x03\x04junk",
    "room for 10**14 numbers": header("<f4", (10**14,)),
    "a shape below nothing": header("<f4", (3, -1)),
    "too few bytes": header("<f4", (2,)) + bytes(4),
    "too many bytes": header("<f4", (2,)) + bytes(12),
    "complex numbers": header("<c8", (1,)) + bytes(8),
    "objects": header("|O", (1,)) + bytes(8),
}


def opened(text: str, **arrays: bytes) -> str:
    tensors = ArrayRecord({n: Array("float32", (1,), "numpy.ndarray", data) for n, data in arrays.items()})
    message = SimpleNamespace(content={"facts": {"json": text}, "tensors": tensors})
    return flower._opened(message).error  # type: ignore[arg-type]


@pytest.mark.parametrize("what", BROKEN)
def test_an_array_that_is_not_what_it_says_is_a_sentence(what: str) -> None:
    assert opened("{}", x=BROKEN[what]).startswith("its reply cannot be read (")


def test_facts_that_are_none_are_a_sentence() -> None:
    assert "RecursionError" in opened("[" * 200_000)
    assert "AttributeError" in opened("3") and "JSONDecodeError" in opened("")
    assert opened('{"error": "a\\nb"}') == "a?b"


def test_a_reply_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = header("<f4", (2,)) + bytes(8)
    assert opened("{}", x=whole) == ""
    monkeypatch.setattr(flower, "MOST_BYTES", len(whole))
    assert "and at most" in opened("{}", x=whole)


def test_a_message_that_flower_cannot_read_takes_no_other_along(tmp_path: Path, three: list[Path]) -> None:
    grid = LoopbackGrid(three, tmp_path / "state")
    pull = grid.pull_messages

    def torn(ids: list[str]) -> list[Message]:
        found = pull(ids)
        if any(message.metadata.src_node_id == 899 for message in found):
            raise ValueError("no such object")
        return found

    grid.pull_messages = torn  # type: ignore[method-assign]
    came = FlowerWire(grid, 60).exchange({a: Request("look", {"version": 1}, {}) for a in grid.contexts})
    assert came[899].error == "its reply cannot be read (ValueError: no such object)"
    assert came[900].facts["name"] == "anna" and came[898].facts["name"] == "carla"


def test_a_superlink_that_is_gone_is_no_reply(tmp_path: Path, three: list[Path]) -> None:
    grid = LoopbackGrid(three, tmp_path / "state")

    def gone(ids: list[str]) -> list[Message]:
        raise ConnectionError("gone")

    grid.pull_messages = gone  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        FlowerWire(grid, 60).exchange({900: Request("look", {"version": 1}, {})})


def test_who_one_is_must_be_said_soon_and_a_training_may_take_its_time(
    tmp_path: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, clock = LoopbackGrid(three, tmp_path / "state"), [0.0]
    grid.pull_messages = lambda ids: []  # type: ignore[method-assign]
    monkeypatch.setattr("fcil.deploy.flower.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("fcil.deploy.flower.time.sleep", lambda s: clock.__setitem__(0, clock[0] + s))
    for kind, most in (("look", 121.0), ("ask", 1801.0)):
        clock[0] = 0.0
        assert FlowerWire(grid, 1800).exchange({900: Request(kind, {"version": 1}, {})}) == {}
        assert most - 2 < clock[0] < most
