"""The same runs on a GPU: deterministic there, resumable there, and as good as on the CPU."""

from pathlib import Path

import pytest
import torch

from fcil.experiment import assemble, execute
from fcil.federation.loop import learn
from fcil.methods import METHODS
from fcil.records import read_tensors
from fcil.results.runs import read_result
from tests.conftest import tiny_plan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_the_gpu_is_deterministic_and_resumes(method: str, tmp_path: Path) -> None:
    wanted = tiny_plan(method)
    list(execute(wanted, tmp_path / "one", "cuda"))
    for number, _ in enumerate(lines := execute(wanted, tmp_path / "other", "cuda", every=0.0)):
        if number == 5:
            lines.close()
    list(execute(wanted, tmp_path / "other", "cuda"))
    one, other = (read_tensors(tmp_path / name / "model.safetensors")[0] for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_whole_run_lives_on_the_gpu() -> None:
    parts = assemble(tiny_plan("joint"), "cuda")
    for _ in learn(parts.scenario, parts.server, parts.door, parts.engine):
        assert all(t.is_cuda for t in parts.server.state.weights.values())
    assert all(t.is_cuda for memory in parts.transport.memories.values() for t in memory.images.values())


def test_joint_training_is_as_good_as_on_the_cpu(tmp_path: Path) -> None:
    finals = []
    for device in ("cpu", "cuda"):
        list(execute(tiny_plan("joint", rounds=15, steps=10), tmp_path / device, device))
        finals.append(read_result(tmp_path / device)["final"])
    assert min(finals) > 90 and abs(finals[0] - finals[1]) < 5
