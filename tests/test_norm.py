"""Whole runs with group normalisation: as every method learns, repeats, is stopped and goes on with batches."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fcil.experiment import execute
from fcil.federation import engine
from fcil.records import read_tensors
from tests.conftest import GROUPED, TINY, tiny_plan
from tests.test_every_method import accuracies
from tests.test_resume import assert_same


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(engine.os, "cpu_count", lambda: 1)  # evaluation takes all cores; others are at work here
    yield


@pytest.mark.parametrize("method", GROUPED)
def test_every_method_learns_with_groups(method: str, tmp_path: Path) -> None:
    wanted = tiny_plan(method, norm="group", stop_after=1, rounds=8, steps=6, batch_size=32)
    lines = list(execute(wanted, tmp_path, "cpu", workers=1))
    assert accuracies(lines)[0][0] > 75, "chance is 50"


@pytest.mark.parametrize("method", GROUPED)
def test_every_method_resumes_with_groups_to_the_same_bits(method: str, tmp_path: Path) -> None:
    wanted = tiny_plan(method, norm="group", tasks=2)
    lines = list(execute(wanted, tmp_path / "whole", "cpu", workers=1))
    begun = execute(wanted, tmp_path / "stopped", "cpu", every=0.0, workers=1)
    for _ in range(2):
        next(begun)
    begun.close()
    left = list(execute(wanted, tmp_path / "stopped", "cpu", workers=1))
    assert len(left) == len(lines) - 2
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    model = read_tensors(tmp_path / "whole" / "model.safetensors")[0]
    assert not [name for name in model if "running" in name or "tracked" in name]


def test_groups_reach_clients_in_processes_of_their_own(tmp_path: Path) -> None:
    wanted = tiny_plan("joint", norm="group", tasks=2, rounds=2)
    for workers in (1, 2):
        list(execute(wanted, tmp_path / str(workers), "cpu", workers=workers))
    one, two = (read_tensors(tmp_path / str(workers) / "model.safetensors")[0] for workers in (1, 2))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    assert wanted.benchmark != TINY and "norm=group" in str(wanted.folder())
