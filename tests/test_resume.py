"""A run that is killed, at any yield or any moment, ends as if nothing had happened."""

import json
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fcil import experiment
from fcil.errors import UserError
from fcil.experiment import execute
from fcil.federation.store import Checkpoints, unpacked
from fcil.plan import Plan
from fcil.records import read_tensors
from fcil.results.ledger import read, verify
from tests.conftest import FILES, tiny_plan

# Children are forked from a server that has torch loaded and nothing started: a second each is saved.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["fcil.experiment", "sklearn.datasets", "tests.conftest"])


def work(wanted: Plan, folder: Path, kill_at: int | None) -> None:
    """Run in a process of its own; die by SIGKILL when the line `kill_at` has been written."""
    for number, _ in enumerate(execute(wanted, folder, "cpu", every=0.0)):
        if number == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_process(wanted: Plan, folder: Path, kill_at: int | None = None) -> int | None:
    process = processes.Process(target=work, args=(wanted, folder, kill_at))
    process.start()
    process.join()
    return process.exitcode


def outcome(folder: Path) -> tuple[list[dict], dict[str, torch.Tensor], dict]:
    """All that must not depend on interruptions: the ledger and the result but for times, and the model."""
    lines = [{k: v for k, v in line.items() if k != "seconds"} for line in read(folder / "ledger.jsonl")]
    result = json.loads((folder / "result.json").read_text())
    for varies in ("seconds", "ledger_sha256", "peak_memory_bytes"):
        del result[varies]
    return lines, read_tensors(folder / "model.safetensors")[0], result


def assert_same(one: Path, other: Path) -> None:
    lines, model, result = outcome(one)
    assert outcome(other)[0] == lines and outcome(other)[2] == result
    assert outcome(other)[1].keys() == model.keys()
    assert all(torch.equal(tensor, model[name]) for name, tensor in outcome(other)[1].items())
    assert verify(one) == [] and verify(other) == []
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", FILES)
def test_killed_again_and_again(method: str, tmp_path: Path) -> None:
    wanted = tiny_plan(method, tasks=2, rounds=2)
    list(execute(wanted, tmp_path / "whole", "cpu"))
    lines = read(tmp_path / "whole" / "ledger.jsonl")[1:]
    protocols = [line for line in lines if line["kind"] == "round" and line["stage"] == "train"]
    assert len(protocols) == 2 * 2 and sum(line["kind"] == "task" for line in lines) == 2
    folder, kills = tmp_path / "killed", 0
    while in_a_process(wanted, folder, kill_at=1) == -signal.SIGKILL:  # after its second line: the first one is saved
        assert not (folder / "result.json").exists()
        kills += 1
        assert kills <= len(lines), "a life gets no farther than the one before"
    assert kills >= len(lines) // 2 - 1
    assert_same(tmp_path / "whole", folder)


@pytest.mark.parametrize("method", FILES)
def test_stopped_at_every_yield_where_everything_moves(method: str, tmp_path: Path) -> None:
    moves = {"joining": 2, "leaving": 1, "staying": 0.5, "lost": 0.3, "weighting": "samples", "evaluate_every": 2}
    wanted = tiny_plan(method, rounds=2, **moves)
    lines = list(execute(wanted, tmp_path / "whole", "cpu"))
    seen: set[tuple[object, ...]] = set()
    while not (tmp_path / "stopped" / "result.json").exists():  # each life ends with the first line that is new
        for line in (life := execute(wanted, tmp_path / "stopped", "cpu", every=0.0)):
            if (where := tuple(line.get(key) for key in ("kind", "task", "stage", "round"))) not in seen:
                seen.add(where)
                break
        life.close()
    assert len(seen) == len(lines)
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_killed_at_random_moments(tmp_path: Path) -> None:
    wanted = tiny_plan("joint", rounds=30, evaluate_every=7)
    list(execute(wanted, tmp_path / "whole", "cpu"))
    folder, draw, kills = tmp_path / "torn", random.Random(7), 0
    while not (folder / "result.json").exists():
        process = processes.Process(target=work, args=(wanted, folder, None))
        process.start()
        process.join(draw.uniform(0.1, 1 + kills))  # more patience each time, so that it ends
        kills += process.is_alive()
        process.kill()
        process.join()
    assert kills > 0
    assert_same(tmp_path / "whole", folder)


def test_resuming_does_not_start_over(tmp_path: Path) -> None:
    wanted = tiny_plan("joint")
    lines = execute(wanted, tmp_path, "cpu")
    for line in lines:
        if line["kind"] == "task" and line["task"] == 1:
            lines.close()
    left = list(execute(wanted, tmp_path, "cpu"))
    assert {line["task"] for line in left} == {2}


@pytest.mark.parametrize("damage", ["torn manifest", "torn state", "lost file", "torn ledger line"])
def test_a_torn_checkpoint_is_passed_over(damage: str, tmp_path: Path) -> None:
    wanted = tiny_plan("joint")
    list(execute(wanted, tmp_path / "whole", "cpu"))
    folder = tmp_path / "torn"
    for number, _ in enumerate(lines := execute(wanted, folder, "cpu", every=0.0)):
        if number == 6:
            lines.close()
    newest = max(int(p.stem) for p in (folder / "checkpoint").glob("*.json"))
    state = folder / "checkpoint" / f"state-{newest}.safetensors"
    if damage == "torn manifest":
        manifest = folder / "checkpoint" / f"{newest}.json"
        manifest.write_text(manifest.read_text()[:-40])
    elif damage == "torn state":
        state.write_bytes(state.read_bytes()[:-7])
    elif damage == "lost file":
        state.unlink()
    else:
        with (folder / "ledger.jsonl").open("a") as file:
            file.write('{"kind": "round", "ta')
    list(execute(wanted, folder, "cpu"))
    assert_same(tmp_path / "whole", folder)


def test_a_folder_without_a_usable_checkpoint_starts_over(tmp_path: Path) -> None:
    wanted = tiny_plan("finetune")
    list(execute(wanted, tmp_path / "whole", "cpu"))
    lines = execute(wanted, tmp_path / "torn", "cpu")
    next(lines)
    lines.close()
    shutil.rmtree(tmp_path / "torn" / "checkpoint", ignore_errors=True)
    list(execute(wanted, tmp_path / "torn", "cpu"))
    assert_same(tmp_path / "whole", tmp_path / "torn")


def test_a_checkpoint_of_another_version_is_refused_in_a_sentence_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tiny_plan("finetune", tasks=2)
    assert in_a_process(wanted, tmp_path / "run", kill_at=3) == -signal.SIGKILL
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    def other(cls: type, flat: dict[str, torch.Tensor]) -> object:
        raise KeyError("something_new")

    monkeypatch.setattr(experiment, "unflatten", other)
    with pytest.raises(UserError, match=r"not one of finetune \(KeyError\('something_new'\)\), perhaps of another"):
        list(execute(wanted, tmp_path / "run", "cpu"))
    assert all(path.read_bytes() == content for path, content in before.items() if path.name != "lock")


def test_only_changed_memories_are_written_and_nothing_piles_up(tmp_path: Path) -> None:
    saves = Checkpoints(tmp_path, every=0.0)
    memories = {c: {"codes": torch.full((3,), float(c))} for c in range(40)}
    for n in range(60):
        memories[n % 40] = {"codes": torch.full((3,), float(100 + n))}
        changed = {n % 40: memories[n % 40]}
        saves.save(
            {"n": n}, {"w": torch.tensor([float(n)])}, lambda everything, c=changed: dict(memories) if everything else c
        )
        saves.wait()
        assert len(list(tmp_path.iterdir())) < 60
    saved = Checkpoints(tmp_path).latest()
    assert saved is not None and saved.facts == {"n": 59} and saved.state["w"].item() == 59
    assert {c: m["codes"].tolist() for c, m in saved.memories.items()} == {
        c: m["codes"].tolist() for c, m in memories.items()
    }
    sizes = [len(unpacked(read_tensors(p)[0])) for p in tmp_path.glob("memories-*.safetensors")]
    assert min(sizes) == 1 and max(sizes) == 40


def test_a_failing_write_is_reported_and_the_last_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = Checkpoints(tmp_path, every=0.0)
    saves.save({"n": 1}, {"w": torch.ones(2)}, lambda _: {})
    saves.wait()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fcil.federation.store.write_tensors", full)
    saves.save({"n": 2}, {"w": torch.zeros(2)}, lambda _: {})
    with pytest.raises(OSError, match="No space left"):
        saves.wait()
    saved = Checkpoints(tmp_path).latest()
    assert saved is not None and saved.facts == {"n": 1}


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    wanted = tiny_plan("finetune")
    lines = execute(wanted, tmp_path, "cpu")
    next(lines)
    with pytest.raises(UserError, match="another process"):
        next(execute(wanted, tmp_path, "cpu"))
    lines.close()
