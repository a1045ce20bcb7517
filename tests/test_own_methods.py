"""A method file of the user's own: what is wrong with it is said when it is read."""

import re
from pathlib import Path
from traceback import extract_tb

import pytest

from fcil.cli import main
from fcil.deploy.plans import deployed
from fcil.errors import UserError
from fcil.experiment import run
from fcil.methods import method
from fcil.plan import plan
from fcil.run_folder import finished
from tests.test_readme import blocks
from tests.typed import typed

(CODE,) = [block for block in blocks("python") if "METHOD = Method(" in block]


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (" -> Training[Update]:", ":", r"Client\.train says no type for its return"),
        ("message: Model) ->", "message) ->", r"Client\.train says no type for its message"),
        ("def broadcast(self) -> Model:", "def broadcast(self):", r"Server\.broadcast says no type for its return"),
        ("Client, Nothing)", "Client, dict)", "its memory is a dict; it must be a record"),
        ("Client, Nothing)", "Client, None)", "its memory cannot be made .* it must be a record with defaults"),
        ("@dataclass(frozen=True)", "", "its Config is a Config; it must be a record"),
        ("lr: float = knob(", "more: int; lr: float = knob(", "its Config cannot be made .*more"),
        ("def broadcast(", "def brodcast(", "its Server has no broadcast; it needs learn_task and broadcast"),
        ("def networks(", "def networkz(", "its Client has no networks; it needs networks and predict"),
        (
            "from dataclasses import",
            "import sys; sys.exit(3)\nfrom dataclasses import",
            "cannot be loaded: SystemExit: 3",
        ),
    ],
)
def test_records_that_cannot_be_found_are_named(right: str, wrong: str, says: str, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(CODE)
    assert method(str(own)).config().lr == 0.01
    assert right in CODE
    own.write_text(CODE.replace(right, wrong))
    with pytest.raises(UserError, match=says):
        method(str(own))


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ('load={"net"', 'load={"nett"', "a Fit loads nett; this client's networks are net"),
        ("return Update(trained.weights, trained.count)", "return {}", "answers with a dict; it must be a record"),
        ("yield from fedavg(", "fedavg(", "learn_task never yields, as it must after each round"),
    ],
)
def test_answers_that_go_wrong_are_said_plainly(right: str, wrong: str, says: str, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    assert right in CODE
    own.write_text(CODE.replace(right, wrong))
    with pytest.raises(UserError, match=re.escape(says)):
        run(str(own), settings={"rounds": 1, "steps": 1}, out=tmp_path / "run", device="cpu")


def test_a_mistake_in_it_is_shown_from_there_and_mended_where_it_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, words = tmp_path / "own.py", ["--set", "rounds=1", "--set", "steps=1", "--workers", "1", "--out", "run"]
    monkeypatch.chdir(tmp_path)
    own.write_text(CODE.replace("return cross_entropy(", "return cross_entropi("))
    monkeypatch.setattr("sys.argv", ["fcil", "run", "own.py", *words])
    with pytest.raises(NameError, match="cross_entropi") as caught:
        main()
    files = [Path(frame.filename).name for frame in extract_tb(caught.value.__traceback__)]
    assert "own.py" in files and "engine.py" not in files and len(files) < 6
    own.write_text(CODE)
    assert typed(f"run own.py {' '.join(words)}").code == 0
    own.write_text(CODE + "\n")
    said = typed(f"run own.py {' '.join(words)}")
    assert said.code == 2 and "own.py has changed since run was begun" in said.err


def test_a_run_has_a_copy_of_it_and_goes_on_wherever_the_file_is(tmp_path: Path) -> None:
    own, moved, folder = tmp_path / "own.py", tmp_path / "elsewhere/own.py", tmp_path / "run"
    own.write_text(CODE)
    words = f"--set rounds=1 --set steps=1 --workers 1 --out {folder}"
    assert typed(f"run {own} {words}").code == 0
    weights = (folder / "model.safetensors").read_bytes()

    def goes_on(command: str) -> None:
        for name in ("result.json", "model.safetensors"):
            (folder / name).unlink()
        assert typed(command).code == 0 and (folder / "model.safetensors").read_bytes() == weights

    own.write_text(CODE + "# another\n")
    goes_on(f"run --resume {folder}")
    own.unlink()
    goes_on(f"run --resume {folder}")
    moved.parent.mkdir()
    moved.write_text(CODE)
    goes_on(f"run {moved} {words}")
    (folder / "own.py").write_text(CODE + "# another\n")
    (folder / "result.json").unlink()
    said = typed(f"run --resume {folder}")
    assert said.code == 2 and "own.py has changed since" in said.err and "put it back as it was" in said.err
    (folder / "own.py").unlink()
    assert f"run is a run of {own}, which is not there; put it back" in typed(f"run --resume {folder}").err


def test_a_deployment_that_waits_for_nodes_is_not_replaced(tmp_path: Path) -> None:
    own, folder = tmp_path / "own.py", tmp_path / "run"
    own.write_text(CODE)
    folder.mkdir()
    (folder / "config.toml").write_text(deployed("finetune", None, 0, {}, 10, "fcil serve it.toml").to_toml())
    (folder / "deploy.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds another run \(fcil serve it\.toml\)"):
        finished(folder, plan(str(own)))
