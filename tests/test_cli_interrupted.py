"""Runs that are stopped, killed, doubled or out of room: what was saved is whole, and the rest is done later."""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcil.experiment import _place
from fcil.federation.clients import Cursor
from fcil.methods import finetune
from tests.typed import TINY, class_folders, done, ended, fingerprint, lines_in, matrix, start, typed, wait_for

SLOW = "--set tasks=2 --set rounds=25 --set steps=3"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done(f"run joint {SLOW} --out {folder}")
    return folder


def test_a_run_belongs_to_one_process_and_ctrl_c_says_how_to_go_on(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    process = start(f"run joint {SLOW} --out run", tmp_path)
    wait_for(process, lambda: lines_in(folder) > 3)
    process.send_signal(signal.SIGSTOP)  # it must not finish while the second one starts
    second = typed(f"run joint {SLOW} --out {folder}")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    said = ended(process)
    assert second.code == 2
    assert (
        second.err == f"fcil: {folder} is being written by another process; wait for it, or choose a different --out\n"
    )
    assert said.code == 130
    assert said.err == "fcil: stopped; the same command goes on, and so does: fcil run --resume run\n"
    assert not (folder / "result.json").exists()
    assert "saved in" in done(f"run --resume {folder}").out
    assert matrix(folder) == matrix(whole)
    assert done(f"table {folder} --verify").code == 0


def test_a_run_that_is_stopped_before_it_began_is_not_said_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*how: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fcil.parts.Scenario", stopped)
    said = typed(f"run finetune {TINY} --out {tmp_path}/run")
    assert (said.code, said.err) == (130, "fcil: stopped before the run had begun; the same command begins it\n")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_sweep_does_the_rest(tmp_path: Path, whole: Path) -> None:
    line = f"sweep --methods joint --seeds 0-2 {SLOW} --out"
    folders = [tmp_path / "runs/digits/joint,rounds=25,steps=3,tasks=2" / str(seed) for seed in range(3)]
    process = start(f"{line} runs", tmp_path)
    wait_for(process, lambda: lines_in(folders[1]) > 3)
    process.kill()
    ended(process)
    assert not (folders[1] / "result.json").exists()
    first = fingerprint(folders[0])
    said = done(f"{line} {tmp_path}/runs")
    assert "3 runs, 1 of them finished before" in said.out and "run 1 of 2: " in said.out
    assert fingerprint(folders[0]) == first
    assert matrix(folders[0]) == matrix(whole)
    done(f"run joint {SLOW} --seed 1 --out {tmp_path}/alone")
    assert matrix(folders[1]) == matrix(tmp_path / "alone")
    assert "3 runs verified" in done(f"table {tmp_path}/runs --verify").out


@pytest.fixture
def little_room(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    try:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "fcil-test", place], capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk(little_room: Path, tmp_path: Path, whole: Path) -> None:
    filler = little_room / "filler"
    filler.write_bytes(bytes(300_000))
    folder = little_room / "run"
    said = typed(f"run joint {SLOW} --out {folder}")
    assert said.code == 2 and said.err.count("\n") == 1
    assert f"the disk is full; what was saved is whole, go on with: fcil run --resume {folder}" in said.err
    filler.unlink()
    moved = shutil.copytree(folder, tmp_path / "moved")  # where there is room for all of it
    done(f"run --resume {moved}")
    assert matrix(moved) == matrix(whole)


def test_no_room_at_all(little_room: Path) -> None:
    filler = little_room / "filler"
    with pytest.raises(OSError), filler.open("wb") as file:
        file.write(bytes(600_000))
    said = typed(f"run joint {SLOW} --out {little_room}/run")
    assert said.code == 2 and said.err.count("\n") == 1 and "the disk is full" in said.err


def test_files_may_not_grow(tmp_path: Path) -> None:
    said = ended(start(f"run finetune {TINY} --out run", tmp_path, before="ulimit -f 64;"))
    assert said.code == 2 and said.err.count("\n") == 1
    assert "the disk is full; what was saved is whole, go on with: fcil run --resume run" in said.err
    done(f"run --resume {tmp_path}/run")
    done(f"run finetune {TINY} --out {tmp_path}/other")
    assert matrix(tmp_path / "run") == matrix(tmp_path / "other")


def test_an_export_that_finds_no_room_leaves_the_old_file(tmp_path: Path) -> None:
    done(f"run finetune {TINY} --out {tmp_path}/run")
    for kind in ("safetensors", "onnx"):
        (tmp_path / f"old.{kind}").write_text("old")
    before = fingerprint(tmp_path)
    said = ended(start("export run --safetensors old.safetensors", tmp_path, before="ulimit -f 16;"))
    assert said.code == 2 and said.err.count("\n") == 1 and "cannot write old.safetensors: " in said.err
    said = ended(start("export run --onnx old.onnx", tmp_path, before="ulimit -f 16;"))
    assert said.code == 2 and said.err.count("\n") == 1 and "cannot write old.onnx: " in said.err
    assert fingerprint(tmp_path) == before


@pytest.fixture
def stopped(tmp_path: Path, whole: Path) -> Path:
    """A run that has come to the end of its first task, as the checkpoints of a whole one show it."""
    folder = shutil.copytree(whole, tmp_path / "stopped")
    (folder / "result.json").unlink()
    (folder / "model.safetensors").unlink()
    newest, older = sorted((folder / "checkpoint").glob("*.json"), key=lambda path: -int(path.stem))[:2]
    newest.unlink()
    facts = json.loads(older.read_text())["facts"]
    ledger = folder / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[: facts["ledger"]])
    return folder


def test_the_same_command_goes_on(stopped: Path, whole: Path) -> None:
    said = done(f"run joint {SLOW} --out {stopped}")
    assert "task 1 of 2 learned" not in said.out and "task 2 of 2 learned" in said.out
    assert "seed 0\ngoes on after round 25 of task 1\n" in said.out or "seed 0\ngoes on after task 1\n" in said.out
    assert matrix(stopped) == matrix(whole)


def test_torn_files_are_not_trusted(stopped: Path, whole: Path) -> None:
    with (stopped / "ledger.jsonl").open("ab") as file:
        file.write(b'{"kind": "round", "task": 1, "lo')
    for path in (stopped / "checkpoint").glob("state-*"):
        path.write_bytes(path.read_bytes()[:-9])
    said = done(f"run --resume {stopped}")
    assert (
        f"\nno checkpoint can be read: the run begins anew, and what it had written is in {stopped}/ledger.jsonl.lost\n"
        in said.out
    )
    assert "task 1 of 2 learned" in said.out
    assert matrix(stopped) == matrix(whole)


def test_what_was_killed_before_anything_was_saved_begins_anew(stopped: Path, whole: Path) -> None:
    for name in ("lost", "lost.2"):
        shutil.rmtree(stopped / "checkpoint")
        (stopped / "result.json").unlink(missing_ok=True)
        written, kept = (stopped / "ledger.jsonl").read_bytes(), stopped / f"ledger.jsonl.{name}"
        said = done(f"run --resume {stopped}").out
        assert f"\nthere is no checkpoint: the run begins anew, and what it had written is in {kept}\n" in said
        assert kept.read_bytes() == written
        assert matrix(stopped) == matrix(whole)
    for name in ("result.json", "ledger.jsonl", "ledger.jsonl.lost", "ledger.jsonl.lost.2"):
        (stopped / name).unlink()
    shutil.rmtree(stopped / "checkpoint")  # as where somebody's config.toml is repeated
    assert "anew" not in done(f"run --resume {stopped}").out


@pytest.mark.parametrize(
    ("cursor", "said"),
    [
        (Cursor(1, rounds={"train": 7}), "round 7 of task 2"),
        (Cursor(0, rounds={"train": 9, "bias": 2}), "bias round 2 of task 1"),
        (Cursor(3), "task 3"),
        (Cursor(), "its beginning"),
    ],
)
def test_where_a_run_goes_on(cursor: Cursor, said: str) -> None:
    assert _place(cursor) == said


def test_ones_own_images_may_not_change_under_a_run(tmp_path: Path) -> None:
    data, run = class_folders(tmp_path / "mine"), f"--clients 3 {SLOW} --out {tmp_path}/run"
    done(f"run joint --data {data} {run}")
    again = data / "class0" / "again.png"
    shutil.copy(data / "class1" / "0.png", again)
    for line in (f"run joint --data {data} {run}", f"audit {tmp_path}/run"):
        said = typed(line)
        assert said.code == 2 and f"images in {data} have changed since {tmp_path}/run was begun; put" in said.err
    assert "is finished" in done(f"run --resume {tmp_path}/run").out
    config, result = (tmp_path / "run" / name for name in ("config.toml", "result.json"))
    before = config.read_text()
    result.unlink()
    for line in (f"run joint --data {data} {run}", f"run --resume {tmp_path}/run"):
        said = typed(line)
        assert said.code == 2 and f"images in {data} have changed since {tmp_path}/run was begun; put" in said.err
    again.unlink()
    done(f"run --resume {tmp_path}/run")
    assert config.read_text() == before and result.exists()

    result.unlink()
    config.write_text("".join(line for line in before.splitlines(True) if not line.startswith("images = ")))
    assert config.read_text() != before
    shutil.copy(data / "class1" / "0.png", again)
    done(f"run --resume {tmp_path}/run")  # one from before there was a digest


def test_ones_own_method_may_not_change_under_a_run_that_is_resumed(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(Path(finetune.__file__).read_text())
    done(f"run {file} {TINY} --out {tmp_path}/run")
    (tmp_path / "run" / "result.json").unlink()
    (tmp_path / "run" / "mine.py").unlink()  # the run's own copy, with which it would go on
    file.write_text(file.read_text() + "# another\n")
    said = typed(f"run --resume {tmp_path}/run")
    assert said.code == 2 and "mine.py has changed since" in said.err and "put it back as it was" in said.err


def test_a_run_without_its_ledger_cannot_go_on(stopped: Path) -> None:
    (stopped / "ledger.jsonl").unlink()
    before = fingerprint(stopped)
    said = typed(f"run --resume {stopped}")
    assert said.code == 2 and said.err.count("\n") == 1
    assert f"there is no ledger {stopped}/ledger.jsonl" in said.err and "start it again in another folder" in said.err
    assert fingerprint(stopped) == before


def test_a_finished_run_shows_its_result_without_its_ledger(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "copy")
    (folder / "ledger.jsonl").write_text("")
    assert "final" in done(f"run --resume {folder}").out
    (folder / "ledger.jsonl").unlink()
    said = done(f"run --resume {folder}")
    assert f"note: there is no ledger {folder}/ledger.jsonl" in said.out and "final" in said.out


def test_a_damaged_result_is_made_again(whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "copy")
    (folder / "result.json").write_text("{")
    assert typed(f"run --resume {folder}").code == 2
    (folder / "result.json").unlink()
    done(f"run --resume {folder}")
    assert matrix(folder) == matrix(whole)
