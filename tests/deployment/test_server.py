"""A deployment on nodes in this process: tasks as classes come, resuming, growing, and what nodes refuse."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fcil.deploy.asking import Rules
from fcil.deploy.growth import grown
from fcil.deploy.local import LocalWire, nodes_of
from fcil.deploy.messages import ASK, Reply, Request
from fcil.deploy.plans import deployed
from fcil.deploy.server import serve
from fcil.errors import UserError
from fcil.federation.loop import Line
from fcil.methods import METHODS
from fcil.model import predict
from fcil.plan import Plan
from fcil.records import flatten, read_tensors
from fcil.results.ledger import read, verify
from fcil.results.runs import read_result
from tests.conftest import QUICK
from tests.deployment.conftest import digits_into

SHORT = {"rounds": 2, "steps": 3, "batch_size": 16, "image_size": 8, "classes_per_task": 2, "memory": 20}
RULES = Rules(min_nodes=3, ends=True, pause=0.01, look_every=0.01)
LESS = QUICK | {"glfc": {"inversion_steps": 3, "inversion_inner": 2, "iterates": 2, "perturb_steps": 2}}
FILES = [name for name, entry in METHODS.items() if not entry.preset]


class Stopped(Exception):
    """The server's machine has crashed."""


class Losing(LocalWire):
    """A wire to nodes of which some do not answer, answer nonsense, or take the server down with them."""

    def __init__(self, nodes: Any, at: Mapping[int, str]):
        super().__init__(nodes)
        self.at, self.asked = dict(at), 0

    def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
        if next(iter(mail.values())).kind != ASK:
            return super().exchange(mail)
        self.asked += 1
        replies = super().exchange(mail)
        what = self.at.get(self.asked, "")
        if what == "crash":
            raise Stopped
        if what == "one is gone":
            del replies[max(replies)]
        if what in WRONG:
            last = max(replies)
            replies[last] = WRONG[what](replies[last])
        if what == "twice":
            replies = super().exchange(mail)
        return replies


class Rogue(LocalWire):
    """A wire to nodes of which the last answers as it likes."""

    def __init__(self, nodes: Any, twist: Callable[[Request, Reply], Reply]):
        super().__init__(nodes)
        self.twist = twist

    def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
        replies = super().exchange(mail)
        return {a: self.twist(mail[a], r) if a == len(self.nodes) - 1 else r for a, r in replies.items()}


def telling(kind: str, **facts: Any) -> Callable[[Request, Reply], Reply]:
    """Return what lets a node tell other facts when it is asked for `kind`."""
    return lambda asked, r: Reply({**r.facts, **facts}, r.tensors) if asked.kind == kind else r


def changed(reply: Reply, **tensors: torch.Tensor) -> Reply:
    return Reply(reply.facts, {**reply.tensors, **tensors})


WRONG: dict[str, Callable[[Reply], Reply]] = {
    "not finite": lambda r: changed(r, **{n: torch.full_like(t, torch.nan) for n, t in list(r.tensors.items())[:1]}),
    "of shape (7,)": lambda r: changed(r, **{n: torch.zeros(7) for n in list(r.tensors)[:1]}),
    "which is no part of": lambda r: changed(r, surprise=torch.zeros(1)),
    "less than nothing": lambda r: changed(r, count=torch.tensor(-3)),
    "answers question": lambda r: Reply({**r.facts, "step": 1}, r.tensors),
    "of another experiment": lambda r: Reply({**r.facts, "experiment": "other"}, r.tensors),
    "is of fcil 0.0": lambda r: Reply({**r.facts, "version": "0.0"}, r.tensors),
    "cannot be read": lambda r: Reply({}, r.tensors),
}


def plan_of(method: str = "hr", capacity: int = 8, **settings: object) -> Plan:
    return deployed(method, None, 0, {**SHORT, **LESS.get(method, {}), **settings}, capacity)


def run(
    wanted: Plan, place: Path, folders: list[Path], capacity: int = 8, wire: type = LocalWire, rules: Rules = RULES,
    **more: Any,
) -> Iterator[Line]:  # fmt: skip
    log: list[str] = LOGS.setdefault(str(place), [])
    nodes = nodes_of(folders, place / "nodes", "cpu")
    return serve(wanted, place, wire(nodes, **more), rules, log.append, capacity)


LOGS: dict[str, list[str]] = {}


def weights(place: Path) -> dict[str, torch.Tensor]:
    return read_tensors(place / "model.safetensors")[0]


def same(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_new_names_make_tasks_and_the_result_is_that_of_any_run(tmp_path: Path, three: list[Path]) -> None:
    lines = list(run(plan_of(rounds=10), tmp_path / "run", three))
    tasks = [line for line in lines if line["kind"] == "task"]
    result = read_result(tmp_path / "run")
    assert len(tasks) == 2 and result["classes"] == ["drei", "eins", "null", "zwei"]
    assert verify(tmp_path / "run") == []
    assert result["final"] > 60
    assert tasks[-1]["clients"] == 3 and all(n > 0 for n in tasks[-1]["total"])
    assert predict(tmp_path / "run", [next((three[0] / "drei").iterdir())], 1)[0][0][0] in result["classes"]


def test_only_names_counts_and_what_the_method_sends_leave_a_node(tmp_path: Path, three: list[Path]) -> None:
    class Listening(LocalWire):
        said: list[Reply] = []

        def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
            replies = super().exchange(mail)
            self.said += replies.values()
            return replies

    for _ in run(plan_of("finetune"), tmp_path / "run", three, wire=Listening):
        pass
    allowed = {
        "name", "classes", "fcil", "correct", "total", "held", "kept", "loss", "images", "experiment", "version",
        "step", "answer",
    }  # fmt: skip
    assert Listening.said and all(set(reply.facts) <= allowed for reply in Listening.said)
    assert not any(t.dtype == torch.uint8 for reply in Listening.said for t in reply.tensors.values())
    assert not any(str(tmp_path) in json.dumps(reply.facts) for reply in Listening.said)


@pytest.mark.parametrize(
    ("method", "at"), [*(("hr", at) for at in range(1, 10)), *(("icarl", at) for at in range(1, 7))]
)
def test_a_server_that_crashes_at_any_question_ends_with_the_same_weights(
    tmp_path: Path, three: list[Path], method: str, at: int
) -> None:
    wanted = plan_of(method)
    for _ in run(wanted, tmp_path / "whole", three):
        pass
    with pytest.raises(Stopped):
        list(run(wanted, tmp_path / "run", three, wire=Losing, at={at: "crash"}))
    for _ in run(wanted, tmp_path / "run", three):
        pass
    assert same(tmp_path / "whole", tmp_path / "run")
    without = [[{**line, "seconds": 0} for line in read(tmp_path / p / "ledger.jsonl")[1:]] for p in ("whole", "run")]
    assert without[0] == without[1]


def test_a_message_delivered_twice_changes_nothing(tmp_path: Path, three: list[Path]) -> None:
    wanted = plan_of("icarl")
    for _ in run(wanted, tmp_path / "whole", three):
        pass
    for _ in run(wanted, tmp_path / "run", three, wire=Losing, at={n: "twice" for n in range(1, 30)}):
        pass
    assert same(tmp_path / "whole", tmp_path / "run")


def test_a_late_message_is_refused_and_leaves_the_memory(tmp_path: Path, three: list[Path]) -> None:
    class Recording(LocalWire):
        asked: list[Request] = []

        def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
            self.asked += [request for request in mail.values() if request.kind == ASK]
            return super().exchange(mail)

    wanted = plan_of("icarl")
    for _ in run(wanted, tmp_path / "run", three, wire=Recording):
        pass
    node = nodes_of(three, tmp_path / "run" / "nodes", "cpu")[0]
    memory = sorted((p.name, p.read_bytes()) for p in (tmp_path / "run" / "nodes").rglob("memory/*"))
    ghost = next(request for request in Recording.asked if request.facts["client"] == 0)
    with pytest.raises(UserError, match="comes too late"):
        node.answer(ghost)
    assert sorted((p.name, p.read_bytes()) for p in (tmp_path / "run" / "nodes").rglob("memory/*")) == memory


def test_a_node_of_another_version_says_so(tmp_path: Path, three: list[Path]) -> None:
    node = nodes_of(three, tmp_path / "run", "cpu")[0]
    with pytest.raises(UserError, match="version 99 of fcil's messages"):
        node.answer(Request("look", {"version": 99}, {}))


def test_only_answers_can_be_called(tmp_path: Path, three: list[Path]) -> None:
    from fcil.deploy.node import Made

    made = Made.of(plan_of().to_toml(), 8, "cpu")
    for name in ("predict", "__init__", "networks", "nothing"):
        with pytest.raises(UserError, match="has no answer"):
            made.handler(name)
    assert made.handler("train").__name__ == "train"


def test_below_min_nodes_a_question_is_asked_again(tmp_path: Path, three: list[Path]) -> None:
    wanted = plan_of("finetune")
    for _ in run(wanted, tmp_path / "whole", three):
        pass
    for _ in run(wanted, tmp_path / "run", three, wire=Losing, at={2: "one is gone"}):
        pass
    assert same(tmp_path / "whole", tmp_path / "run")
    assert any("asking again: carla" in said for said in LOGS[str(tmp_path / "run")])


def test_a_round_goes_on_without_a_node_that_is_gone(tmp_path: Path, three: list[Path]) -> None:
    rules = replace(RULES, min_nodes=2)
    at = {n: "one is gone" for n in range(1, 30)}
    lines = list(run(plan_of("finetune"), tmp_path / "run", three, wire=Losing, rules=rules, at=at))
    assert all(line["lost"] == 1 for line in lines if line["kind"] == "round")
    assert any("no answer of node carla" in said for said in LOGS[str(tmp_path / "run")])
    assert read_result(tmp_path / "run")["final"] >= 0


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_reply_is_refused_by_name_and_the_round_goes_on(tmp_path: Path, three: list[Path], why: str) -> None:
    rules = replace(RULES, min_nodes=2)
    list(run(plan_of("finetune"), tmp_path / "run", three, wire=Losing, rules=rules, at={2: why}))
    (said,) = [said for said in LOGS[str(tmp_path / "run")] if "refused" in said]
    assert said.startswith("refused a reply of node carla") and why in said
    seen = json.loads((tmp_path / "run" / "nodes.json").read_text())["nodes"]
    assert [node["refused"] for node in seen] == [0, 0, 1] and why in seen[2]["why"]
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run").values() if t.is_floating_point())


UNREADABLE: dict[str, tuple[str, dict[str, Any]]] = {
    "endless memory": ("ask", {"kept": float("inf")}),
    "endless images": ("ask", {"images": float("inf")}),
    "more images than can be": ("ask", {"images": 10**8}),
    "a loss beyond numbers": ("ask", {"loss": 10**400}),
    "no step": ("ask", {"step": None}),
    "endless right answers": ("evaluate", {"correct": [float("inf")] * 2}),
    "more held out than can be": ("evaluate", {"total": [10**8] * 2}),
    "fewer than nothing": ("evaluate", {"held": [-1] * 2}),
    "no counts": ("evaluate", {"held": None}),
    "endless classes": ("evaluate", {"classes": {"x": float("inf")}}),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_facts_that_cannot_be_are_refused_and_the_server_goes_on(tmp_path: Path, three: list[Path], what: str) -> None:
    kind, facts = UNREADABLE[what]
    rules, wanted = replace(RULES, min_nodes=2), plan_of("finetune", rounds=1, tasks=1)
    list(run(wanted, tmp_path / "run", three, wire=Rogue, rules=rules, twist=telling(kind, **facts)))
    seen = json.loads((tmp_path / "run" / "nodes.json").read_text())["nodes"]
    assert [node["refused"] > 0 for node in seen] == [False, False, True]


def test_complex_numbers_are_refused(tmp_path: Path, three: list[Path]) -> None:
    def twist(asked: Request, reply: Reply) -> Reply:
        return Reply(reply.facts, {name: t.to(torch.complex64) for name, t in reply.tensors.items()})

    rules, wanted = replace(RULES, min_nodes=2), plan_of("icarl", rounds=1, tasks=1)
    list(run(wanted, tmp_path / "run", three, wire=Rogue, rules=rules, twist=twist))
    refused = [said for said in LOGS[str(tmp_path / "run")] if "refused" in said]
    assert refused and all("carla" in said and "is complex" in said for said in refused)


STRANGERS: dict[str, dict[str, Any]] = {
    "allowed are 0 to 10,000,000": {"classes": {"x": float("inf")}},
    "counts -5": {"classes": {"x": -5}},
    "counts 10000001": {"classes": {"x": 10_000_001}},
    "'' is no class": {"classes": {"": 3}},
    "' ' is no class": {"classes": {" ": 3}},
    "is no class; a name has 1 to 200 letters": {"classes": {"x" * 201: 3}},
    "tells of 10,001 classes": {"classes": {str(j): 1 for j in range(10_001)}},
    "'' is no name of a node": {"name": ""},
    "is no name of a node; it has 1 to 200 letters": {"name": "x" * 201},
    "has no attribute": {"classes": "none"},
}


@pytest.mark.parametrize("why", STRANGERS)
def test_who_says_what_cannot_be_is_left_out(tmp_path: Path, three: list[Path], why: str) -> None:
    rules, wanted = replace(RULES, min_nodes=2), plan_of("finetune", rounds=1, tasks=1)
    twist = telling("look", **STRANGERS[why])
    lines = list(run(wanted, tmp_path / "run", three, wire=Rogue, rules=rules, twist=twist))
    (said,) = LOGS[str(tmp_path / "run")][:1]
    assert said.startswith("the node at 2 did not say who it is: ") and why.removeprefix("has no") in said
    assert [line["clients"] for line in lines if line["kind"] == "task"] == [2]


def test_what_nodes_write_is_shown_as_one_short_line(tmp_path: Path, three: list[Path]) -> None:
    def twist(asked: Request, reply: Reply) -> Reply:
        if asked.kind == "look":
            return Reply({**reply.facts, "name": "carla\x1b[2J\n"}, {})
        return Reply({}, {}, "x" * 2_000_000 + "\x1b[2J") if asked.kind == ASK else reply

    rules, wanted = replace(RULES, min_nodes=2), plan_of("finetune", rounds=1, tasks=1)
    list(run(wanted, tmp_path / "run", three, wire=Rogue, rules=rules, twist=twist))
    seen = json.loads((tmp_path / "run" / "nodes.json").read_text())["nodes"][2]
    assert seen["name"] == "carla?[2J?" and seen["why"] == "x" * 300
    assert all(said.isprintable() and len(said) < 400 for said in LOGS[str(tmp_path / "run")])


def test_one_address_is_one_node_whatever_it_calls_itself(tmp_path: Path, three: list[Path]) -> None:
    from fcil.deploy.server import Federation

    names, log, place = iter(["carla", "dora", "emma", "frieda"]), list[str](), tmp_path / "run"
    place.mkdir()
    wire = Rogue(nodes_of(three, place / "nodes", "cpu"), lambda q, r: Reply({**r.facts, "name": next(names)}, {}))
    made = Federation(plan_of(), place, wire, RULES, log.append, 8)
    made.asking.gather(3)
    for _ in range(3):
        made.asking.look(made.roster.addresses.values())
    assert [node.name for node in made.roster.nodes] == ["anna", "berta", "carla"]
    assert made.roster.addresses == {0: 0, 1: 1, 2: 2}
    assert log == ["node 'carla' now calls itself 'dora', and is not listened to as that"]


def test_a_stranger_that_says_nothing_is_asked_more_and_more_rarely(
    tmp_path: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcil.deploy.server import Federation

    class Silent(LocalWire):
        asked: list[float] = []

        def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
            if 2 in mail:
                self.asked.append(clock[0])
            return super().exchange({a: request for a, request in mail.items() if a != 2})

    (tmp_path / "run").mkdir()
    nodes, clock = nodes_of(three, tmp_path / "run" / "nodes", "cpu"), [0.0]
    made = Federation(plan_of(), tmp_path / "run", Silent(nodes), RULES, lambda _: None, 8)
    monkeypatch.setattr("fcil.deploy.asking.time.monotonic", lambda: clock[0])
    for second in range(1, 1001):
        clock[0] = float(second)
        made.asking.gather(2)
    assert Silent.asked == [1, 62, 183, 424, 905]


def test_a_memory_over_its_budget_stops_a_simulation_and_is_not_kept(
    tmp_path: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcil.deploy.node import Made

    Made.of.cache_clear()
    monkeypatch.setattr("fcil.deploy.node.family", lambda name: "own")  # no longer exempt, as a bound is
    with pytest.raises(
        UserError, match="anna would keep .* bytes after remember of task 1; the experiment allows 192 "
    ):
        list(run(plan_of("joint", memory=1), tmp_path / "run", three))
    Made.of.cache_clear()
    assert not list((tmp_path / "run").rglob("memory-*.safetensors"))


def trained_on(place: Path, node: str) -> list[dict[str, int]]:
    """Return how many images of each class a node trained on, by task."""
    (images,) = (place / "nodes" / node).glob("*/images")
    return [json.loads(path.read_text())["held"] for path in sorted(images.glob("[0-9].json"))]


def test_a_known_class_at_a_new_node_is_ordinary_data(tmp_path: Path) -> None:
    first = digits_into(tmp_path / "data" / "anna", (0, 1), 0)
    second = digits_into(tmp_path / "data" / "berta", (1, 2), 20)
    list(
        run(
            plan_of("finetune", classes_per_task=1),
            tmp_path / "run",
            [first, second],
            rules=replace(RULES, min_nodes=2),
        )
    )
    assert read_result(tmp_path / "run")["classes"] == ["eins", "null", "zwei"]
    assert [set(task) for task in trained_on(tmp_path / "run", "anna")] == [{"0"}, {"1"}, set()]
    assert [set(task) for task in trained_on(tmp_path / "run", "berta")] == [{"0"}, set(), {"2"}]


def test_a_known_class_that_arrives_later_is_trained_on_where_it_arrives(tmp_path: Path) -> None:
    first = digits_into(tmp_path / "data" / "anna", (0, 1), 0)
    second = digits_into(tmp_path / "data" / "berta", (0,), 20)
    rules, wanted = replace(RULES, min_nodes=2), plan_of("finetune", classes_per_task=10)
    list(run(wanted, tmp_path / "run", [first, second], rules=rules))
    (tmp_path / "run" / "result.json").unlink()
    digits_into(second, (1, 2), 40)  # one that anna has had, and one that nobody has
    list(run(wanted, tmp_path / "run", [first, second], rules=rules))
    assert trained_on(tmp_path / "run", "berta")[0].keys() == {"1"}
    assert trained_on(tmp_path / "run", "berta")[1].keys() == {"0", "2"}
    assert trained_on(tmp_path / "run", "anna")[1] == {}


def test_classes_that_come_later_make_a_new_task_and_old_images_are_gone(tmp_path: Path, three: list[Path]) -> None:
    wanted = plan_of("icarl", classes_per_task=10)
    for _ in run(wanted, tmp_path / "run", three):
        pass
    (tmp_path / "run" / "result.json").unlink()
    digits_into(three[0], (7,), 0)
    shutil.rmtree(three[1] / "drei")
    for _ in run(wanted, tmp_path / "run", three):
        pass
    result = read_result(tmp_path / "run")
    assert result["classes"] == ["drei", "eins", "null", "zwei", "sieben"]
    assert len(result["matrix"]) == 2
    for node in ("anna", "berta", "carla"):
        first, second = trained_on(tmp_path / "run", node)
        assert first.keys() == {"0", "1", "2", "3"} and second.keys() == ({"4"} if node == "anna" else set())
        (images,) = (tmp_path / "run" / "nodes" / node).glob("*/images")
        assert [path.name for path in images.glob("train-*")] == ["train-1.safetensors"]


def test_a_run_that_starts_over_is_another_experiment_to_its_nodes(tmp_path: Path, three: list[Path]) -> None:
    wanted, place = plan_of("icarl"), tmp_path / "run"
    list(run(wanted, tmp_path / "whole", three))
    list(run(wanted, place, three))
    before = json.loads((place / "experiment.json").read_text())["experiment"]
    (place / "result.json").unlink()
    shutil.rmtree(place / "checkpoint")
    list(run(wanted, place, three))
    after = json.loads((place / "experiment.json").read_text())
    assert after["experiment"] != before and after["life"] == 1
    assert {path.name for path in (place / "nodes" / "anna").iterdir()} == {before, after["experiment"]}
    assert same(tmp_path / "whole", place) and (place / "ledger.jsonl.lost").exists()
    assert [said for said in LOGS[str(place)] if "starts over" in said] and verify(place) == []


class Late(LocalWire):
    """A wire to nodes of which the last comes when some questions have been asked; it may take the server down."""

    def __init__(self, nodes: Any, after: int, crash: int = 0):
        super().__init__(nodes)
        self.after, self.crash, self.asked = after, crash, 0

    def online(self) -> dict[int, str]:
        there = super().online()
        return there if self.asked >= self.after else {a: key for a, key in there.items() if a < len(there) - 1}

    def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
        replies = super().exchange(mail)
        if any(request.kind == ASK for request in mail.values()):
            self.asked += 1
            if self.asked == self.crash:
                raise Stopped
        return replies


@pytest.mark.parametrize("method", FILES)
def test_a_node_that_comes_in_a_task_takes_part_from_its_next_round(
    tmp_path: Path, three: list[Path], method: str
) -> None:
    rules, wanted = replace(RULES, min_nodes=2), plan_of(method, rounds=3, tasks=1)
    list(run(wanted, tmp_path / "run", three, wire=Late, rules=rules, after=1))
    lines = read(tmp_path / "run" / "ledger.jsonl")
    assert lines[-1]["kind"] == "task" and lines[-1]["clients"] == 3
    assert any("node carla takes part in task 1 from the next round on" in said for said in LOGS[str(tmp_path / "run")])
    assert trained_on(tmp_path / "run", "carla") != [{}]
    assert all(torch.isfinite(t).all() for t in weights(tmp_path / "run").values() if t.is_floating_point())


@pytest.mark.parametrize("at", range(2, 8))
def test_a_server_that_crashes_after_a_node_has_come_goes_on_with_it(
    tmp_path: Path, three: list[Path], at: int
) -> None:
    rules, wanted = replace(RULES, min_nodes=2), plan_of("hr", rounds=4, tasks=1)
    list(run(wanted, tmp_path / "whole", three, wire=Late, rules=rules, after=1))
    with pytest.raises(Stopped):
        list(run(wanted, tmp_path / "run", three, wire=Late, rules=rules, after=1, crash=at))
    list(run(wanted, tmp_path / "run", three, rules=rules))
    assert same(tmp_path / "whole", tmp_path / "run")
    without = [[{**line, "seconds": 0} for line in read(tmp_path / p / "ledger.jsonl")[1:]] for p in ("whole", "run")]
    assert without[0] == without[1] and without[0][-1]["clients"] == 3


def test_enough_nodes_must_report_new_classes(tmp_path: Path, three: list[Path]) -> None:
    from fcil.deploy.server import Federation

    digits_into(three[0], (8,), 0)
    nodes = nodes_of(three, tmp_path / "run" / "nodes", "cpu")
    (tmp_path / "run").mkdir()
    due = []
    for rules in (Rules(3, 1), Rules(3, 3), Rules(3, 4), Rules(3, 4, every=3600)):
        made = Federation(plan_of(), tmp_path / "run", LocalWire(nodes), rules, lambda _: None, 8)
        made.asking.gather(3)
        due.append(made._due())
    assert due == [True, True, False, False]
    made.begun -= 3600  # an hour after the server began
    assert made._due()


def test_tables_double_and_what_was_learned_stays(tmp_path: Path, three: list[Path]) -> None:
    lines = list(run(plan_of("icarl", 2, rounds=10), tmp_path / "run", three, capacity=2))
    assert any("room for 4 classes in place of 2" in said for said in LOGS[str(tmp_path / "run")])
    assert read_result(tmp_path / "run")["final"] > 60
    assert [line["task"] for line in lines if line["kind"] == "task"] == [0, 1]


@pytest.mark.parametrize("method", FILES)
def test_growing_leaves_every_score_of_a_known_class_as_it_was(tmp_path: Path, three: list[Path], method: str) -> None:
    from fcil.deploy.node import Made
    from fcil.deploy.server import Federation

    wanted = plan_of(method, 2, classes_per_task=2, tasks=1)
    nodes = nodes_of(three, tmp_path / "run" / "nodes", "cpu")
    (tmp_path / "run").mkdir()
    made = Federation(wanted, tmp_path / "run", LocalWire(nodes), RULES, lambda _: None, 2)
    for _ in made.run():
        pass
    before = made.server.broadcast()
    made.capacity = 4
    _, fresh = made._made()
    wider = grown(made.server.state, fresh.state)
    fresh.state = wider
    images = torch.randint(0, 255, (64, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    narrow, wide = (Made.of(wanted.to_toml(), n, "cpu").engine for n in (2, 4))
    old, new = narrow.scores(before, images), wide.scores(fresh.broadcast(), images)
    assert new.shape[1] == 4 and torch.allclose(old, new[:, :2], atol=1e-5)
    assert new.argmax(1).max() < 2  # nothing is taken for a class that has not come
    assert flatten(wider).keys() == flatten(made.server.state).keys()


def test_two_folders_of_one_name_cannot_be_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="are called 'x'"):
        nodes_of([tmp_path / "a" / "x", tmp_path / "b" / "x"], tmp_path, "cpu")
