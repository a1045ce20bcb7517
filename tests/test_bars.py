"""The long checks behind RESULTS.md: `make bars`. Real data, whole runs; not part of `make test`."""

import os
from pathlib import Path

import pytest

from fcil.experiment import run
from fcil.methods import METHODS
from tests.conftest import run_apart

pytestmark = pytest.mark.bars
needs_data = pytest.mark.skipif("FCIL_DATA" not in os.environ, reason="FCIL_DATA names no folder of datasets")


@pytest.mark.parametrize("seed", range(3))
def test_digits_have_wide_bounds(seed: int, tmp_path: Path) -> None:
    joint = run("joint", seed=seed, out=tmp_path / "joint", device="cpu")
    finetune = run("finetune", seed=seed, out=tmp_path / "finetune", device="cpu")
    assert joint["final"] > 94 and finetune["final"] < 30
    assert joint["forgetting"] < 5 and finetune["forgetting"] > 90


@pytest.mark.parametrize("seed", range(3))
def test_hybrid_replay_as_printed_forgets_less_than_fine_tuning_on_digits(seed: int, tmp_path: Path) -> None:
    names = ("finetune", "hr-literal", "hr-literal-no-global", "hr-literal-no-latents", "hr-literal-perfect")
    final = {name: run(name, seed=seed, out=tmp_path / name, device="cpu")["final"] for name in names}
    assert final["hr-literal"] > final["finetune"] + 30
    assert final["hr-literal-perfect"] > 90 > max(final["hr-literal-no-global"], final["hr-literal-no-latents"])


@pytest.mark.parametrize("seed", range(3))
def test_hybrid_replay_is_near_joint_training_on_digits(seed: int, tmp_path: Path) -> None:
    """In 640 bytes a client, with codes of 12 of an image's 64."""
    result = run("hr", seed=seed, out=tmp_path, device="cpu")
    assert result["final"] > 94 and result["forgetting"] < 5 and result["memory_bytes"] <= 640


BARS = {"exemplars": 30, "hybrid": 30, "data-free": 15}  # points above fine-tuning
BASELINES = [name for name, entry in METHODS.items() if entry.family in BARS and name not in ("hr", "hr-literal")]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", [name for name in BASELINES if name != "fedftg-plain"])
def test_baselines_forget_less_than_fine_tuning_on_digits(method: str, seed: int, tmp_path: Path) -> None:
    names = (method, "finetune", "joint")
    final = {name: run(name, seed=seed, out=tmp_path / name, device="cpu")["final"] for name in names}
    assert final["finetune"] + BARS[METHODS[method].family] < final[method] < final["joint"] + 2


@needs_data
@pytest.mark.parametrize("seed", range(3))
def test_hybrid_replay_is_near_joint_training_on_natural_images(seed: int, tmp_path: Path) -> None:
    """A fifth of CIFAR-100 on a CPU; the softmax beside the pull is part of why."""
    runs = {
        "hr": ("hr", {}), "pull": ("hr", {"contrast": 0}), "joint": ("joint", {"lr": 0.03}),
        "finetune": ("finetune", {"lr": 0.03}),
    }  # fmt: skip
    final = {
        name: run(method, "cifar100-5x4", seed=seed, settings=settings, out=tmp_path / name, device="cpu")["final"]
        for name, (method, settings) in runs.items()
    }
    assert final["finetune"] + 20 < final["pull"] + 1 < final["hr"] and final["joint"] < final["hr"] + 5


@needs_data
def test_cifar100_runs_on_the_cpu_in_four_gibibytes(tmp_path: Path) -> None:
    few = {"rounds": 1, "steps": 1, "test_limit": 10}
    result = run_apart("joint", "cifar100-10x10", few, tmp_path)
    assert len(result["matrix"]) == 10 and result["peak_memory_bytes"] < 4 * 2**30


@needs_data
def test_tinyimagenet_runs_on_the_cpu_in_four_gibibytes(tmp_path: Path) -> None:
    few = {"tasks": 2, "rounds": 1, "steps": 1, "active": 5}
    result = run_apart("joint", "tinyimagenet-10x5", few, tmp_path)
    assert len(result["matrix"]) == 2 and result["peak_memory_bytes"] < 4 * 2**30
