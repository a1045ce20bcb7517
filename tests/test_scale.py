"""What a run holds is bounded by the clients it asks and by what they keep, however many clients and tasks."""

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fcil import experiment
from fcil.bench.growth import Cost, Row, Size, apart, cost, growth
from fcil.errors import UserError
from fcil.federation import in_process
from fcil.federation.loop import learn
from fcil.federation.store import Checkpoints, packed, unpacked
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.records import flatten, size_in_bytes
from fcil.results import gallery
from fcil.scenario.benchmarks import BENCHMARKS
from fcil.scenario.datasets import load
from fcil.scenario.scenario import Scenario
from tests.conftest import TINY, tiny_plan

SMALL = replace(
    BENCHMARKS["scale-1000x100"], name="small-scale", dataset="synthetic-24x120", tasks=12, clients=60, active=4
)
FEW = {"rounds": 2, "steps": 1, "batch_size": 8}


def lines_of(parts: Parts) -> Any:
    return learn(parts.scenario, parts.server, parts.door, parts.engine)


# -- made-up images ---------------------------------------------------------------------------------------------------


def test_made_up_images_are_the_same_everywhere() -> None:
    data = load("synthetic-3x5")
    assert data.train_images.shape == (15, 1, 8, 8) and data.train_images.dtype == torch.uint8
    assert data.test_images.shape == (30, 1, 8, 8) and data.train_labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert data.class_names == ("pattern 0", "pattern 1", "pattern 2") and data.skipped == 0
    assert data.train_images[0, 0, 0].tolist() == [191, 147, 138, 156, 163, 193, 143, 140]
    assert int(data.train_images.sum()) + int(data.test_images.sum()) == 355198


def test_a_class_does_not_depend_on_the_others_nor_its_test_images_on_how_many_it_trains_on() -> None:
    one, other = load("synthetic-6x5"), load("synthetic-2x40")
    assert torch.equal(one.train_images[:5], other.train_images[:5])
    assert torch.equal(one.test_images[:20], other.test_images)
    assert not torch.equal(one.train_images[:5], one.train_images[5:10])
    assert not torch.equal(one.train_images[:5], one.test_images[:5])


def test_made_up_classes_can_be_told_apart() -> None:
    data = load("synthetic-200x20")
    means = torch.stack([data.train_images[data.train_labels == j].float().mean(0).flatten() for j in range(200)])
    nearest = torch.cdist(data.test_images.float().flatten(1), means).argmin(1)
    assert (nearest == data.test_labels).all()


def test_a_network_learns_made_up_images() -> None:
    benchmark = replace(SMALL, dataset="synthetic-8x40", tasks=1, classes_per_task=8, clients=4, active=4)
    parts = assemble(plan("finetune", benchmark, protocol="quick", settings={"rounds": 10}), "cpu")
    *_, last = lines_of(parts)
    assert last["correct"][0] > 0.9 * last["total"][0]


def test_made_up_images_have_the_side_that_is_asked_for() -> None:
    assert load("synthetic-2x3", 13).train_images.shape == (6, 1, 13, 13)
    assert load("synthetic-2x3", 1).train_images.shape == (6, 1, 1, 1)


@pytest.mark.parametrize("name", ["synthetic-", "synthetic-5", "synthetic-0x5", "synthetic-5x0", "synthetic-5x5x5"])
def test_a_wrong_number_of_made_up_images_is_told(name: str) -> None:
    with pytest.raises(UserError, match=f"^dataset={name} is not allowed; write synthetic-CLASSESxIMAGES") as said:
        load(name)
    assert "\n" not in str(said.value)


def test_more_made_up_images_than_a_machine_holds_are_refused() -> None:
    with pytest.raises(UserError, match="^synthetic-9999x999999 at 8x8 pixels would take 596.0 GiB; at most 4 are"):
        load("synthetic-9999x999999")


def test_too_few_made_up_classes_are_told() -> None:
    with pytest.raises(UserError, match="12 tasks of 2 classes need 24 classes, but synthetic-5x9 has 5"):
        Scenario(replace(SMALL, dataset="synthetic-5x9"), 0)


# -- a long run of many clients ---------------------------------------------------------------------------------------


def test_the_benchmark_has_a_thousand_clients_and_a_hundred_tasks() -> None:
    scenario = Scenario(BENCHMARKS["scale-1000x100"], 0)
    assert len(scenario.tasks) == 100 and scenario.capacity == 200 and scenario.warnings == []
    assert len(scenario.present(scenario.tasks[99])) == 1000 and scenario.budget.per_client == 128
    assert (scenario.share(scenario.tasks[99]).sum(axis=1) == 4).all()
    assert scenario.holdings(scenario.tasks[99]).sum() == 400_000


@pytest.mark.parametrize("clients", [50, 5000])
def test_a_round_touches_only_the_clients_it_asks(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = replace(TINY, tasks=1, clients=clients, active=5)
    parts = assemble(tiny_plan("joint", benchmark, rounds=4), "cpu")
    touched: list[int] = []
    local = Scenario.local
    monkeypatch.setattr(
        Scenario, "local", lambda self, client, task: touched.append(client) or local(self, client, task)
    )
    lines = lines_of(parts)
    for _ in range(4):
        next(lines)
    task = parts.scenario.tasks[0]
    assert len(touched) <= 4 * 5 and set(touched) == {
        client for number in range(4) for client in parts.scenario.sample(task, "train", number)
    }
    assert parts.door.cursor.kept.keys() == set(touched) and parts.transport.caches.keys() == set(touched)
    assert parts.transport.memories == {}


@dataclass
class Seen:
    """What was to be seen at a line of the ledger."""

    line: Any
    caches: int
    sizes: list[int]  # of the memories
    tensors: int  # that live, other than theirs


def seen(parts: Parts, line: Any) -> Seen:
    memories, caches, living = parts.transport.memories.values(), len(parts.transport.caches), set[int]()
    if line["kind"] == "task":
        parts.transport.caches.clear()  # as the next task does
        gc.collect()
        living = {id(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)}
    kept = [tensor for memory in memories for tensor in flatten(memory).values()]
    theirs = {id(t) for tensor in kept for t in (tensor, tensor._base)}  # what a view is a part of lives with it
    return Seen(line, caches, list(map(size_in_bytes, memories)), len(living - theirs))


def rises(counts: list[int]) -> int:
    """Count how often a number has risen: often if every task leaves something behind, seldom if made when needed."""
    return sum(later > earlier for earlier, later in pairwise(counts))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Parts, list[Seen]]:
    """A run of 60 clients and 12 tasks with few caches and a small gallery, watched from line to line.

    It has no workers, and waits for checkpoints: what lives while these are at work depends on how fast the machine is.
    """
    folder, made, save = tmp_path_factory.mktemp("long"), list[Parts](), Checkpoints.save
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process, "MOST_CACHES", 8)
        patch.setattr(gallery, "ROWS", 3)
        patch.setattr(Checkpoints, "save", lambda self, *parts: (save(self, *parts), self.wait()))
        patch.setattr(experiment, "assemble", lambda *a, **k: made.append(assemble(*a, **k)) or made[0])
        lines = experiment.execute(plan("hr-literal", SMALL, settings=FEW), folder, "cpu", workers=1)
        watched = [seen(made[0], line) for line in lines]
    return folder, made[0], watched


def test_memories_stay_within_the_budget_and_few_caches_live(long_run: tuple[Path, Parts, list[Seen]]) -> None:
    _, parts, lines = long_run
    assert max(at.caches for at in lines) == 8
    ends = [at for at in lines if at.line["kind"] == "task"]
    assert len(ends) == 12
    for at in ends:
        assert len(at.sizes) <= 60 and sum(at.sizes) == at.line["kept"]
        assert max(at.sizes) == at.line["kept_max"] <= parts.scenario.budget.per_client
    assert parts.door.cursor.kept.keys() == set(range(60))
    assert parts.door.cursor.asked == {} and parts.door.cursor.once == []


def test_nothing_but_the_memories_grows_with_the_tasks(long_run: tuple[Path, Parts, list[Seen]]) -> None:
    living = [at.tensors for at in long_run[2] if at.line["kind"] == "task"]
    assert rises(living) <= 3


@pytest.mark.parametrize("method", ["finetune", "lwf"])
def test_nothing_grows_with_the_tasks_where_nothing_is_kept(method: str) -> None:
    parts = assemble(plan(method, SMALL, settings=FEW), "cpu", workers=1)
    living = [seen(parts, line).tensors for line in lines_of(parts) if line["kind"] == "task"]
    assert rises(living) <= 3


def test_a_run_says_how_much_memory_it_took_and_its_files_stay_small(long_run: tuple[Path, Parts, list[Seen]]) -> None:
    folder, _, lines = long_run
    result = json.loads((folder / "result.json").read_text())
    assert result["peak_memory_bytes"] > 2**24
    assert result["memory_bytes"] == max(at.line["kept_max"] for at in lines if at.line["kind"] == "task")
    kept = sum(path.stat().st_size for path in (folder / "checkpoint").glob("memories-*"))
    assert 0 < kept < 2**20 and (folder / "ledger.jsonl").stat().st_size < 2**18


def test_the_gallery_of_a_long_sequence_stays_small(
    long_run: tuple[Path, Parts, list[Seen]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gallery, "ROWS", 3)
    drawn = gallery.Gallery(long_run[0])
    assert {int(name.split("/")[0]) for name in drawn.pictures} == {3, 7, 11} and len(drawn.owners) == 3
    page = drawn.page(load(SMALL.dataset).class_names, 12)
    assert page.width == gallery.LABELS + 5 * (48 + gallery.GAP)


def test_what_clients_hold_is_counted_at_once() -> None:
    scenario = Scenario(replace(SMALL, staying=0.2, joining=3, leaving=2, stop_after=5), 0)
    had: dict[int, set[bytes]] = {}
    for task in scenario.tasks:
        scenario.begin(task)
        for client in scenario.present(task):
            data = scenario.local(client, task)
            counts = np.bincount(data.labels.numpy(), minlength=scenario.capacity)
            assert np.array_equal(scenario.share(task)[client], counts)
            had.setdefault(client, set()).update(image.numpy().tobytes() for image in data.images)
        assert scenario.holdings(task).sum(axis=1).tolist() == [
            len(had.get(client, ())) for client in range(scenario.schedule.total)
        ]
    gone = set(scenario.present(scenario.tasks[0])) - set(scenario.present(scenario.tasks[4]))
    assert gone and all(len(scenario.local(client, scenario.tasks[4]).labels) == 0 for client in gone)


# -- files ------------------------------------------------------------------------------------------------------------


def test_memories_of_many_clients_are_packed_and_come_back() -> None:
    memories: Mapping[int, dict[str, torch.Tensor]] = {
        3: {"codes/1": torch.arange(6, dtype=torch.uint8).view(2, 3), "scales/1": torch.rand(1), "n": torch.tensor(5)},
        7: {},
        9: {"a": torch.rand(2, 3).t(), "b": torch.rand(3).bfloat16(), "c": torch.zeros(0, 4), "d": torch.tensor(True)},
    }
    flat = packed(memories)
    assert len(flat) == 2 and all(tensor.dtype == torch.uint8 for tensor in flat.values())
    found = unpacked(flat)
    assert list(found) == list(memories)
    for client, mine in memories.items():
        assert list(found[client]) == list(mine)
        for name, tensor in mine.items():
            assert found[client][name].dtype == tensor.dtype and torch.equal(found[client][name], tensor)
    assert unpacked(packed({1: {}})) == {1: {}}


@pytest.mark.parametrize("tasks", [1, 5, 20])
def test_every_task_of_a_short_sequence_is_pictured(tasks: int) -> None:
    assert all(gallery.pictured(task, tasks) for task in range(tasks))


@pytest.mark.parametrize("tasks", [21, 37, 100, 1000])
def test_of_a_long_sequence_about_twenty_tasks_are_pictured_and_the_last(tasks: int) -> None:
    chosen = [task for task in range(tasks) if gallery.pictured(task, tasks)]
    assert 10 <= len(chosen) <= gallery.ROWS + 1 and chosen[-1] == tasks - 1


# -- how cost grows ---------------------------------------------------------------------------------------------------


def test_growth_measures_both_ends() -> None:
    tiny = Size(clients=2, tasks=1, kept=16)
    pairs = (("clients", tiny, 4), ("tasks", tiny, 2), ("kept", tiny, 64))
    rows = growth("hr-literal", pairs, cost)
    assert [(row.what, row.start, row.end) for row in rows] == [("clients", 2, 4), ("tasks", 1, 2), ("kept", 16, 64)]
    for row in rows:
        assert all(c.seconds > 0 and c.mib >= 0 and c.kept > 0 for c in row.costs) and row.seconds_ratio > 0
    few, many = rows[2].costs
    assert few.kept <= 2 * 16 and few.kept < many.kept <= 2 * 64


def test_growth_measures_in_a_process_of_its_own() -> None:
    found = apart("finetune", Size(clients=2, tasks=1))
    assert found.seconds > 0 and found.kept == 0


def test_growth_says_what_it_found() -> None:
    row = Row("clients", 50, 5000, (Cost(0.1, 2.0, 1.0, 128), Cost(0.2, 5.0, 100.0, 12_800)))
    assert row.seconds_ratio == 2.0 and row.mib_ratio == 2.5
    assert str(row).startswith("clients 50 -> 5,000: a round takes x 2.00 (100 -> 200 ms); learning takes 2.0 -> 5.0")
    assert Row("tasks", 1, 2, (Cost(0.1, 0.0, 0.0, 0), Cost(0.1, 1.0, 0.0, 0))).mib_ratio == 256


@pytest.mark.parametrize(
    ("what", "end", "said"),
    [("rounds", 9, "rounds does not grow here; what grows is clients, tasks, kept or each"),
     ("clients", 20, "clients does not grow from 20 to 20; give a larger number")],
)  # fmt: skip
def test_what_cannot_grow_is_told(what: str, end: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        growth(pairs=((what, Size(), end),))
