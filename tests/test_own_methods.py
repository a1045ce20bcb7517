"""A method file of the user's own: what is wrong with it is said when it is read."""

import re
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
import pytest

from fcil import experiment
from fcil.cli import main
from fcil.deploy.plans import deployed
from fcil.errors import UserError
from fcil.experiment import run
from fcil.methods import method
from fcil.parts import Parts, assemble
from fcil.plan import Plan, plan
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


@pytest.mark.parametrize(
    ("knob", "says"),
    [
        ("lr: float | None = None", "the knob lr is of type float | None; a knob is bool, int, float or str"),
        ("lr: tuple[int, ...] = (1,)", "the knob lr is of type tuple[int, ...]; a knob is"),
        ("lr: list = field(default_factory=list)", "the knob lr is of type list; a knob is"),
        ("lr: dict = field(default_factory=dict)", "the knob lr is of type dict; a knob is"),
        ("lr: Path = Path()", "the knob lr is of type Path; a knob is"),
        ("lr: Literal['a'] = 'a'", "the knob lr is of type typing.Literal['a']; a knob is"),
        ("lr: Nothing = field(default_factory=Nothing)", "the knob lr is of type Nothing; a knob is"),
        ("lr: 'Nowhere' = 1", "its Config has no such type (name 'Nowhere' is not defined); a knob is"),
        ("lr: int = 0.5", "the default lr=0.5 is not allowed; lr takes whole numbers"),
        ("lr: float = float('inf')", "the default lr=inf is not allowed; lr takes numbers"),
        ("lr: float = knob(2.0, 'mine', most=1)", "the default lr=2.0 is not allowed; lr takes numbers at most 1"),
        ("lr: str = knob('c', 'mine', choices=('a', 'b'))", "the default lr=c is not allowed; lr takes a, b"),
        ("rounds: int = 3", "the knob rounds is called like a setting of every run; give it another name"),
        ("tasks: int = 3", "the knob tasks is called like a setting of every run; give it another name"),
    ],
)
def test_a_knob_that_no_run_could_keep_is_refused(knob: str, says: str, tmp_path: Path) -> None:
    own, types = tmp_path / "own.py", ("dataclasses import field", "pathlib import Path", "typing import Literal")
    code = re.sub(r"lr: float = knob\(.*", "KNOB", CODE).replace("KNOB", knob)
    own.write_text("".join(f"from {name}\n" for name in types) + code)
    with pytest.raises(UserError) as refusal:
        method(str(own))
    assert str(refusal.value).startswith(f"{own}: {says}")


def test_what_a_fit_may_say_may_be_a_knob_and_any_name_is_read_back(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(CODE.replace("    lr: float", "    momentum: float = 0.5\n    größe: int = 3\n    lr: float"))
    wanted = plan(str(own), settings={"größe": 4})
    (tmp_path / "config.toml").write_text(wanted.to_toml())
    assert Plan.read(tmp_path).same_as(wanted) and Plan.read(tmp_path).config.größe == 4


def test_files_of_others_stay_as_they_are(tmp_path: Path) -> None:
    own, site = tmp_path / "own.py", tmp_path / "site"
    own.write_text(CODE)
    site.mkdir()
    words = f"run {own} --set rounds=1 --set steps=1 --workers 1 --out {site}"
    others = {"config.toml": 'title = "x"\n', "own.py": "precious\n", "ledger.jsonl": '{"theirs": 1}\n'}

    def stay(says: str) -> None:
        for name, text in others.items():
            (site / name).write_text(text)
        said = typed(words)
        assert said.code == 2 and says in said.err
        assert all((site / name).read_text() == text for name, text in others.items())

    stay(f"{site} holds other files and no run")
    others["config.toml"] = plan("finetune").to_toml()
    stay(f"{site} holds another run")
    others["config.toml"] = plan(str(own)).to_toml()
    stay(f"{site}/own.py is no copy of {own}, which belongs there; move it away and begin again")


def test_an_edit_while_the_images_are_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.py"
    own.write_text(CODE)

    def slowly(*what: Any, **how: Any) -> Parts:
        own.write_text(CODE + "# edited\n")
        return assemble(*what, **how)

    monkeypatch.setattr(experiment, "assemble", slowly)
    with pytest.raises(UserError, match=r"own\.py has changed since .*run was begun"):
        run(str(own), settings={"rounds": 1, "steps": 1}, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_resuming_takes_a_mended_file_where_nothing_was_done_yet(tmp_path: Path) -> None:
    own, folder = tmp_path / "own.py", tmp_path / "run"
    own.write_text(CODE.replace("return cross_entropy(", "return cross_entropi("))
    with pytest.raises(NameError):
        run(str(own), settings={"rounds": 1, "steps": 1, "lr": 0.5}, out=folder, device="cpu", workers=1)
    own.write_text(CODE)
    assert typed(f"run --resume {folder} --workers 1").code == 0
    assert Plan.read(folder).same_as(plan(str(own), settings={"rounds": 1, "steps": 1, "lr": 0.5}))
    assert (folder / "own.py").read_text() == CODE


def test_resuming_says_that_it_goes_on_with_the_copy(tmp_path: Path) -> None:
    own, folder = tmp_path / "own.py", tmp_path / "run"
    own.write_text(CODE)
    assert typed(f"run {own} --set rounds=1 --set steps=1 --workers 1 --out {folder}").code == 0
    own.write_text(CODE + "# another\n")
    (folder / "result.json").unlink()
    said = typed(f"run --resume {folder}")
    assert said.code == 0 and f"\ngoes on with the copy in {folder}: {own} has changed\n" in said.out


def test_an_edited_copy_is_neither_lost_nor_trusted(tmp_path: Path) -> None:
    own, folder, copy = tmp_path / "own.py", tmp_path / "run", tmp_path / "run/own.py"
    own.write_text(CODE)
    assert typed(f"run {own} --set rounds=1 --set steps=1 --workers 1 --out {folder}").code == 0
    copy.write_text(CODE + "# edited\n")
    result = (folder / "result.json").rename(tmp_path / "result.json")
    said = typed(f"run --resume {folder}")
    assert said.code == 2 and f"{copy} is no copy of {own}" in said.err and copy.read_text().endswith("# edited\n")
    result.rename(folder / "result.json")
    own.unlink()
    for command in (f"predict {folder} image.png", f"export {folder} --safetensors {tmp_path}/model.safetensors"):
        said = typed(command)
        assert said.code == 2 and f"{copy} has changed since {folder} was begun; put it back as it was" in said.err


def test_another_file_of_the_same_name_is_told_from_a_changed_one(tmp_path: Path) -> None:
    one, other = tmp_path / "a/own.py", tmp_path / "b/own.py"
    for path, text in ((one, CODE), (other, CODE + "# another\n")):
        path.parent.mkdir()
        path.write_text(text)
    words = "--set rounds=1 --set steps=1 --workers 1 --out"
    assert typed(f"run {one} {words} {tmp_path}/run").code == 0
    said = typed(f"run {other} {words} {tmp_path}/run")
    assert said.code == 2
    assert f"run is a run of {one}, and {other} is another file of that name; choose a different --out" in said.err


@pytest.mark.parametrize("seed", [1.5, "0", None, -1, np.float64(1)])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(UserError, match="is not allowed; seed takes whole numbers at least 0"):
        plan(seed=seed)  # type: ignore[arg-type]


def test_a_seed_of_numpy_is_written_as_a_number() -> None:
    assert "\nseed = 7\n" in plan(seed=np.int64(7)).to_toml()  # type: ignore[arg-type]
