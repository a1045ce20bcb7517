"""Whole runs on the real datasets, cut short: they start from the parquet files and stay small in memory."""

import os
from pathlib import Path

import pytest

from fcil.results.ledger import read
from tests.conftest import run_apart

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("FCIL_DATA" not in os.environ, reason="FCIL_DATA names no folder of datasets"),
]
FEW = {"tasks": 2, "rounds": 1, "steps": 1, "batch_size": 8, "test_limit": 5}


@pytest.mark.parametrize(
    ("benchmark", "settings", "classes"),
    [
        ("cifar100-5x4", {}, 8),
        ("cifar100-10x10", {}, 20),
        ("tinyimagenet-10x5", {"active": 3}, 10),
        ("glfc-cifar100", {"active": 3}, 20),
    ],
)
def test_joint_runs_from_parquet_on_the_cpu(benchmark: str, settings: dict, classes: int, tmp_path: Path) -> None:
    result = run_apart("joint", benchmark, {**FEW, **settings}, tmp_path)
    assert [len(row) for row in result["matrix"]] == [1, 2]
    assert result["peak_memory_bytes"] < 4 * 2**30
    first, *_, last = read(tmp_path / "ledger.jsonl")
    assert len(first["classes"]) == classes == sum(accuracy is not None for accuracy in last["per_class"])
    assert last["kept"] > 0
