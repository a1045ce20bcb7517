"""Finding runs on disk."""

import errno
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fcil.errors import UserError
from fcil.plan import Plan, plan
from fcil.results.runs import find, read_audit, read_result, unfinished

RESULT: dict[str, Any] = {
    "format": 1, "method": "hr", "benchmark": "digits", "protocol": "quick", "seed": 0, "final": 60.0, "average": 70.0,
    "forgetting": 3.0, "bwt": -3.0, "matrix": [[60.0]], "seconds": {"train": 1.0, "total": 1.0}, "memory_bytes": 640,
}  # fmt: skip


def finish(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.toml", "ledger.jsonl"):
        (folder / name).touch()
    (folder / "result.json").write_text(json.dumps({**RESULT, **changes}))
    return folder


def begin(folder: Path, *files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in files or ("config.toml", "ledger.jsonl"):
        (folder / name).touch()
    return folder


def test_what_is_damaged_is_named_and_the_others_are_found(tmp_path: Path) -> None:
    good, torn = finish(tmp_path / "good"), finish(tmp_path / "torn")
    (torn / "result.json").write_bytes(b'{"format"')
    (tmp_path / "empty").mkdir()
    said: list[str] = []
    paths = [tmp_path / name for name in ("nowhere", "empty", "torn", "good")]
    assert [run.folder for run in find(paths, said)] == [good]
    assert [sentence for sentence in said if "no folder" in sentence or "holds no run" in sentence] == said[:2]
    assert len(said) == 3 and f"{torn / 'result.json'} is not readable" in said[2]
    with pytest.raises(UserError, match="is not readable"):
        find([good, torn])
    with pytest.raises(UserError, match="there is no folder .*nowhere.*; .*empty holds no run"):
        find(paths[:2], [])


def test_runs_are_found_at_any_depth_and_once(tmp_path: Path) -> None:
    one = finish(tmp_path / "digits" / "hr" / "0")
    two = finish(tmp_path / "digits" / "icarl" / "1", method="icarl", seed=1)
    waiting = begin(tmp_path / "digits" / "icarl" / "2")
    runs = find([tmp_path, one, tmp_path / "digits" / "icarl"])
    assert [run.folder for run in runs] == [one, two]
    assert runs[1].result["method"] == "icarl" and runs[1].settings == {}
    assert unfinished([tmp_path, waiting]) == [waiting]
    assert unfinished([one]) == []


def test_a_runs_own_folders_are_not_searched(tmp_path: Path) -> None:
    run = finish(tmp_path / "run")
    finish(run / "checkpoint")
    waiting = begin(tmp_path / "waiting")
    begin(waiting / "checkpoint")
    begin(tmp_path / ".cache" / "run")
    assert [run.folder for run in find([tmp_path])] == [run]
    assert unfinished([tmp_path]) == [waiting]


def test_a_config_alone_is_unfinished_but_hides_no_runs(tmp_path: Path) -> None:
    begun = begin(tmp_path / "begun", "config.toml")
    inner = finish(begun / "inner")
    assert unfinished([tmp_path]) == [begun]
    assert [run.folder for run in find([tmp_path])] == [inner]


def test_settings_are_kept(tmp_path: Path) -> None:
    [run] = find([finish(tmp_path / "run", settings={"memory": 4})])
    assert run.settings == {"memory": 4}


def test_paths_without_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no .*nowhere"):
        find([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="there is no .*nowhere"):
        unfinished([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="holds no run"):
        find([finish(tmp_path / "run"), begin(tmp_path / "empty", "notes.txt")])
    with pytest.raises(UserError, match=r"no run has finished yet; continue with: fcil run --resume .*begun"):
        find([begin(tmp_path / "begun")])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not readable"),
        ("\x00", "is not readable"),
        ("[1]", "names no format"),
        ("{}", "names no format"),
        (json.dumps({**RESULT, "format": 2}), "has format 2; this fcil reads format 1"),
        (json.dumps({**RESULT, "final": "high"}), "'final' is missing or of the wrong kind"),
        (json.dumps({**RESULT, "seed": True}), "'seed' is missing"),
        (json.dumps({k: v for k, v in RESULT.items() if k != "protocol"}), "'protocol' is missing"),
        (json.dumps({**RESULT, "seconds": {}}), "'seconds' is missing"),
        (json.dumps({**RESULT, "settings": []}), "'settings' is missing or of the wrong kind"),
        (json.dumps({**RESULT, "matrix": []}), "'matrix' is missing or of the wrong kind"),
        (json.dumps({**RESULT, "matrix": [[60.0], [60.0]]}), "'matrix' is missing or of the wrong kind"),
        (json.dumps({**RESULT, "matrix": [["high"]]}), "'matrix' is missing or of the wrong kind"),
        (json.dumps({**RESULT, "overall": [None]}), "'overall' is missing or of the wrong kind"),
        (json.dumps({**RESULT, "per_class": ["high"]}), "'per_class' is missing or of the wrong kind"),
        (json.dumps({**RESULT, "classes": [0]}), "'classes' is missing or of the wrong kind"),
        (json.dumps({**RESULT, "engine": None}), "'engine' is missing or of the wrong kind"),
        (json.dumps({**RESULT, "measured": None}), "'measured' is missing or of the wrong kind"),
    ],
)
def test_a_result_that_cannot_be_used_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UserError, match=says) as error:
        find([tmp_path])
    assert str(tmp_path / "result.json") in str(error.value)
    with pytest.raises(UserError, match=says):
        read_result(tmp_path)


def test_what_may_not_be_read_is_not_to_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> bytes:  # root may read everything, so chmod would test nothing here
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refused)
    for read, name in ((read_result, "result.json"), (read_audit, "audit.json")):
        with pytest.raises(UserError) as error:
            read(tmp_path)
        assert str(error.value) == f"{tmp_path / name} cannot be read (Permission denied)"


def test_a_run_from_before_a_knob_is_still_the_same_run() -> None:
    folder = Path(__file__).parent.parent / "results" / "digits" / "ewc" / "0"
    assert "lag" not in (folder / "config.toml").read_text()
    assert Plan.read(folder).same_as(plan("ewc")) and not Plan.read(folder).same_as(plan("ewc", seed=1))
    assert not Plan.read(folder).same_as(plan("ewc", settings={"lag": 1}))


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    known, placed = plan("ewc"), replace(plan("ewc"), nodes=("/a/anna", "/b/berta"), images="12ab")
    for wanted in (known, placed):
        (tmp_path / "config.toml").write_text(wanted.to_toml())
        assert asdict(Plan.read(tmp_path)) == asdict(wanted)
    assert "\nnodes = " not in known.to_toml() and "\nimages = " not in known.to_toml()
    assert not known.same_as(placed) and known.same_as(replace(placed, nodes=()))


def test_another_run_is_told_by_what_is_other() -> None:
    one = replace(plan("ewc", command="fcil run ewc"), nodes=("/a/anna", "/a/berta"))
    assert one.other_than(replace(one, seed=3)) == ": seed was 0, now 3"
    assert one.other_than(plan("lwf")) == " (fcil run ewc)"
    assert one.other_than(plan("ewc")) == " (nodes anna, berta)"
    assert one.other_than(replace(one, nodes=("/b/anna", "/b/berta"))) == " (nodes /a/anna, /a/berta)"
    assert plan("ewc", command="fcil run ewc").other_than(one) == " (fcil run ewc)"
    many = plan("ewc", "cifar100-5x4", "short").other_than(plan("ewc", "digits", "quick"))
    assert many.startswith(": ") and many.count(" was ") == 4 and many.endswith(" more")
