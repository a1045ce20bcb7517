"""What many tests need: a tiny scenario on real digits, and runs that do not touch the user's folders."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from fcil.federation.engine import threads
from fcil.methods import METHODS
from fcil.plan import Plan, plan
from fcil.scenario.benchmarks import BENCHMARKS, Benchmark

settings.register_profile("fcil", deadline=None)  # a busy machine is no failure
settings.load_profile("fcil")

TINY = replace(BENCHMARKS["digits"], name="tiny", tasks=3, clients=4, active=2)
FILES = [name for name, entry in METHODS.items() if not entry.preset]  # one method of each file, ablations aside
NEED_BATCH_NORM = ("mfcl", "target")  # they make images from its statistics, and refuse networks without
GROUPED = [name for name in FILES if name not in NEED_BATCH_NORM]
SHORT = {"rounds": 3, "steps": 3, "batch_size": 16}
QUICK: dict[str, dict[str, float]] = {  # what servers do by themselves, as short
    "fedftg": {"latent": 16, "iterations": 2, "fakes": 8, "student_steps": 2},
    "fedftg-plain": {"latent": 16, "iterations": 2, "fakes": 8, "student_steps": 2},
    "mfcl": {"latent": 16, "synthetic": 16, "generator_steps": 5, "generator_batch": 16},
    "target": {
        "latent": 16, "synthetic": 16, "batches": 4, "batch_made": 8, "generator_steps": 3, "warm_up": 2,
        "student_steps": 3,
    },
    "hr": {"lifelike": 0.0},  # so short a run knows no made-up image, and would never use one
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(
        "FCIL_CACHE", str(Path(os.environ.get("PYTEST_FCIL_CACHE", tmp_path_factory.getbasetemp() / "cache")))
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield


@pytest.fixture(autouse=True)
def _no_workers_unasked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep runs in this process, where tests watch them: on a busy machine workers would soon seem to pay."""
    if request.module.__name__ != "tests.test_workers":
        monkeypatch.setattr("fcil.federation.adaptive.cores", lambda: 1)


@pytest.fixture
def in_double() -> Iterator[None]:
    """Compute in float64, with one thread."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with threads(1):
        yield
    torch.set_default_dtype(before)


def tiny_plan(method: str, benchmark: Benchmark = TINY, seed: int = 0, **settings: object) -> Plan:
    """A plan on three tasks of two digits each, with three short rounds, unless set otherwise."""
    return plan(method, benchmark, seed=seed, settings={**SHORT, **QUICK.get(method, {}), **settings})


def run_apart(method: str, benchmark: str, settings: dict[str, object], out: Path) -> dict:
    """Run in a process of its own, for the memory it takes: this one still holds what other tests took."""
    changes = [f"--set={key}={value}" for key, value in settings.items()]
    words = ["run", method, "--benchmark", benchmark, *changes, "--out", str(out), "--device", "cpu"]
    done = subprocess.run([sys.executable, "-m", "fcil", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "result.json").read_text())
