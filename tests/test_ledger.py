"""The ledger: what is appended is read back, whatever happens to the end of the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcil.errors import UserError
from fcil.files import sha256
from fcil.results.ledger import Ledger, read, result_of, verify

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)
lines_of_any_kind = st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=6)


def task_line(task: int, correct: list[int], total: list[int], seconds: dict[str, float]) -> dict[str, Any]:
    return {
        "kind": "task", "task": task, "correct": correct, "total": total, "per_class": [], "per_client": [],
        "seconds": seconds, "down": 1000, "up": 300, "kept": 50 * (task + 1), "kept_max": 30 - task, "clients": 2,
    }  # fmt: skip


def whole_run() -> list[dict[str, Any]]:
    total = [100, 100, 100]
    tasks = [
        task_line(0, [80], total[:1], {"train": 2.0, "evaluate": 0.5}),
        task_line(1, [60, 70], total[:2], {"train": 3.0}),
        task_line(2, [50, 40, 90], total, {"train": 4.0, "remember": 1.0}),
    ]
    first = {"kind": "run", "format": 1, "method": "hr", "benchmark": "digits", "seed": 0}
    trained = {"kind": "round", "task": 0, "seconds": {"train": 0.25}, "down": 7, "up": 5}
    tested = {"kind": "evaluation", "task": 0, "round": 0, "correct": [1], "total": [100]}
    return [first, trained, tested, *(dict(line) for line in tasks)]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.unlink(missing_ok=True)
    with Ledger.open(path) as ledger:
        for line in lines:
            ledger.append(line)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger") / "ledger.jsonl"


@given(lines_of_any_kind)
def test_what_is_appended_is_read_back(path: Path, lines: list[dict[str, Any]]) -> None:
    write(path, lines)
    assert read(path) == lines
    assert path.read_bytes().count(b"\n") == len(lines)


@given(lines_of_any_kind, st.data())
def test_cut_at_any_byte_it_is_a_prefix(path: Path, lines: list[dict[str, Any]], data: st.DataObject) -> None:
    write(path, lines)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = whole[:cut].count(b"\n")
    assert read(path) == lines[:kept]
    with Ledger(path) as ledger:  # going on after the cut spoils nothing
        ledger.append({"kind": "later"})
    assert read(path) == [*lines[:kept], {"kind": "later"}]


@given(lines_of_any_kind, st.data())
def test_resuming_drops_what_came_after_the_checkpoint(
    path: Path, lines: list[dict[str, Any]], data: st.DataObject
) -> None:
    path.unlink(missing_ok=True)
    with Ledger(path) as ledger:
        offsets = [ledger.offset]
        for line in lines:
            ledger.append(line)
            offsets.append(ledger.offset)
    assert offsets[-1] == path.stat().st_size
    kept = data.draw(st.integers(0, len(lines)))
    with Ledger.open(path, offset=offsets[kept]) as ledger:
        assert ledger.offset == offsets[kept]
        ledger.append({"again": True})
    assert read(path) == [*lines[:kept], {"again": True}]


@pytest.mark.parametrize("offset", [-1, 3, 1000])
def test_a_ledger_of_another_checkpoint_is_refused(tmp_path: Path, offset: int) -> None:
    write(tmp_path / "ledger.jsonl", [{"a": 1}, {"b": 2}])
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(UserError, match=f"no line that ends at byte {offset}"):
        Ledger.open(tmp_path / "ledger.jsonl", offset=offset)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_every_line_is_on_disk_before_the_next(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for n in range(3):
            ledger.append({"n": n, "text": "x" * 20_000})
            assert len(read(ledger.path)) == n + 1
        ledger.sync()
        assert ledger.offset == ledger.path.stat().st_size


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    write(
        tmp_path / "ledger.jsonl", [{"loss": float("nan"), "seconds": {"train": float("inf")}, "list": [1.5, -1e999]}]
    )
    assert read(tmp_path / "ledger.jsonl") == [{"loss": None, "seconds": {"train": None}, "list": [1.5, None]}]
    assert b"NaN" not in (tmp_path / "ledger.jsonl").read_bytes()


@pytest.mark.parametrize("tail", [b'{"a"', b'{"a": 1}', b"\x00\x00\x00", b'{"a": \n', b"\xff\n", b"3\n", b"\n"])
def test_a_torn_last_line_is_skipped(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"n": 1}\n' + tail)
    assert read(path) == [{"n": 1}]


@pytest.mark.parametrize("broken", [b'{"a"', b"\xff", b"3", b"", b"[" * 100_000])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"n": 1}\n' + broken + b'\n{"n": 3}\n')
    for reader in (read, Ledger):
        with pytest.raises(UserError, match=r"ledger\.jsonl is broken at line 2"):
            reader(path)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no ledger"):
        read(tmp_path / "ledger.jsonl")
    with pytest.raises(UserError, match="there is no ledger"):
        Ledger.open(tmp_path / "ledger.jsonl", offset=0)
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        Ledger(tmp_path / "missing" / "ledger.jsonl")


def test_a_result_is_computed_from_all_lines() -> None:
    assert result_of(whole_run()) == {
        "final": 60.0,
        "average": pytest.approx(205 / 3),
        "forgetting": 30.0,
        "bwt": -30.0,
        "overall": [80.0, 65.0, 60.0],
        "matrix": [[80.0], [60.0, 70.0], [50.0, 40.0, 90.0]],
        "seconds": {"train": 9.25, "evaluate": 0.5, "remember": 1.0, "total": 10.75},
        "down": 3007,
        "up": 905,
        "per_class": [],
        "per_client": [],
        "memory_bytes": 30,
    }


def broken_task(**changes: Any) -> list[dict[str, Any]]:
    return [*whole_run()[:-1], {**whole_run()[-1], **changes}]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "no task line"),
        (whole_run()[:3], "no task line"),
        ([{"kind": "run", "format": 2}, *whole_run()[1:]], "format 2; this fcil reads format 1"),
        (whole_run()[:3] + whole_run()[4:], "they end the tasks 1, 2"),
        (broken_task(total=[100, 90, 100]), "the number of test images changes after task 1"),
        (broken_task(correct=[50, 40]), "after task 2 are on 2 tasks"),
        (broken_task(correct=[50, 40, 101]), "101 right answers"),
        (broken_task(correct=None), "do not fit together"),
        (broken_task(seconds=3.0), "do not fit together"),
        ([{k: v for k, v in line.items() if k != "kept_max"} for line in whole_run()], "lacks 'kept_max'"),
        ([{"kind": "round", "down": 1, "up": 1}, *whole_run()], "lacks 'seconds'"),
    ],
)
def test_a_ledger_without_a_result_says_why(lines: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        result_of(lines)


def finished(folder: Path, **changes: Any) -> Path:
    write(folder / "ledger.jsonl", whole_run())
    result = {
        "format": 1, "method": "hr", "benchmark": "digits", "protocol": "quick", "seed": 0,
        **result_of(whole_run()), "ledger_sha256": sha256(folder / "ledger.jsonl"), **changes,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_a_true_result_is_verified(tmp_path: Path) -> None:
    assert verify(finished(tmp_path)) == []
    assert verify(finished(tmp_path, final=60.0 + 1e-12)) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"final": 60.1}, "final is 60.1 in result.json, but the ledger gives 60.0"),
        ({"average": 68.3}, "average is 68.3 in result.json"),
        ({"seed": 1}, "seed is 1 in result.json, but the ledger gives 0"),
        ({"method": "icarl"}, "method is icarl in result.json, but the ledger gives hr"),
        ({"matrix": [[80.0], [60.0, 70.0], [50.0, 40.0, 91.0]]}, "matrix in result.json is not what the ledger gives"),
        ({"seconds": {"total": 10.5}}, "seconds in result.json is not what the ledger gives"),
        ({"memory_bytes": 29}, "memory_bytes is 29 in result.json"),
        ({"ledger_sha256": "0" * 64}, "SHA-256"),
    ],
)
def test_a_false_result_is_found(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    [sentence] = verify(finished(tmp_path, **changes))
    assert says in sentence and str(tmp_path) in sentence


def test_a_changed_ledger_is_found(tmp_path: Path) -> None:
    finished(tmp_path)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.append({"kind": "note"})
    [sentence] = verify(tmp_path)
    assert "not the file that result.json was made from" in sentence


def test_what_cannot_be_verified_is_a_sentence_too(tmp_path: Path) -> None:
    assert "there is no" in verify(tmp_path)[0]
    finished(tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    assert "there is no ledger" in verify(tmp_path)[0]
    (tmp_path / "ledger.jsonl").write_text("")
    assert "no task line" in verify(tmp_path)[0]
