"""What `fcil bench` compares: the same work on fcil, Flower and pfl-research. No time is asserted here."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from fcil.bench import flower, pfl, task
from fcil.bench.task import Rounds, joined
from fcil.errors import UserError
from fcil.federation.engine import threads
from fcil.federation.loop import learn

SMALL, HEAVY = 98_052, 98_052 + 45_000_000  # bytes of a message


@pytest.mark.parametrize("heavy", [False, True])
def test_fcil_learns_what_a_plain_loop_learns(heavy: bool) -> None:
    parts = task._assembled(heavy, 2, 0)
    lines = learn(parts.scenario, parts.server, parts.door, parts.engine)
    weights = {name: tensor.clone() for name, tensor in parts.server.state.weights.items()}
    data = task.shares()
    for round in range(2):
        line, trained = next(lines), []
        with threads(1):
            for client in parts.scenario.sample(parts.scenario.tasks[0], "train", round):
                w = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
                for index in task.rows(client, round):
                    x = F.conv2d(data[client].images[index] / 255, w["layers.0.weight"], w["layers.0.bias"], padding=1)
                    x = F.conv2d(F.max_pool2d(x.relu(), 2), w["layers.3.weight"], w["layers.3.bias"], padding=1)
                    x = F.linear(F.max_pool2d(x.relu(), 2).flatten(1), w["layers.7.weight"], w["layers.7.bias"])
                    x = F.linear(x.relu(), w["layers.9.weight"], w["layers.9.bias"])
                    learning = [name for name in w if name != "ballast"]
                    slopes = torch.autograd.grad(
                        F.cross_entropy(x, data[client].labels[index]), [w[n] for n in learning]
                    )
                    for name, slope in zip(learning, slopes, strict=True):
                        w[name] = (w[name].detach() - task.LR * slope).requires_grad_()
                trained.append({name: tensor.detach() for name, tensor in w.items()})
        before, weights = weights, {name: sum(w[name] for w in trained) / 5 for name in weights}
        assert (line["clients"], line["down"]) == (5, 5 * (HEAVY if heavy else SMALL))
        assert not torch.equal(weights["layers.0.weight"], before["layers.0.weight"])
    for name, tensor in parts.server.state.weights.items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-7)


def test_every_client_has_as_many_images_and_takes_each_once_a_round() -> None:
    assert len(task.shares()) == 50 and {len(share.labels) for share in task.shares()} == {100}
    assert task.rows(3, 0).shape == (5, 20) and sorted(task.rows(3, 0).flatten().tolist()) == list(range(100))
    assert not torch.equal(task.rows(3, 0), task.rows(3, 1)) and not torch.equal(task.rows(3, 0), task.rows(4, 0))
    assert len(set(task.cohort(0))) == 5 and task.cohort(0) != task.cohort(1)


def test_ours_gives_a_round_and_its_bare_steps_for_each_round_asked() -> None:
    took = task.ours(False, 2)
    assert len(took.seconds) == len(took.bare) == 2 and min(took.seconds + took.bare) > 0 and took.processes >= 1


@pytest.mark.skipif(find_spec("ray") is None or find_spec("flwr") is None, reason="needs the extra simulation")
@pytest.mark.parametrize("heavy", [False, True])
def test_flower_computes_the_same(heavy: bool) -> None:
    theirs = flower.measure(heavy, 1)
    assert len(theirs.seconds) == len(theirs.bare) == 1
    assert task.difference(task.ours(heavy, 1), theirs) < 1e-5


@pytest.mark.skipif(find_spec("pfl") is None, reason="needs pfl")
@pytest.mark.parametrize("heavy", [False, True])
def test_pfl_research_computes_the_same(heavy: bool) -> None:
    theirs = pfl.measure(heavy, 1)
    assert theirs is not None and len(theirs.seconds) == len(theirs.bare) == 1 and theirs.processes == 1
    assert task.difference(task.ours(heavy, 1), theirs) < 1e-5


@pytest.mark.parametrize("missing", ["flwr", "ray"])
def test_without_flower_or_ray_the_user_is_told_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(UserError, match=rf"needs the package {missing}; .*constraints.txt -e '\.\[simulation\]'"):
        flower.measure(False, 1)


def test_without_pfl_there_is_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfl, "find_spec", lambda name: None)
    assert pfl.measure(False, 1) is None


def test_the_overhead_is_what_a_round_takes_beyond_its_own_bare_steps() -> None:
    took = Rounds("two", seconds=[5.0, 9.0, 6.0], bare=[2.0, 4.0, 4.0], processes=2)
    assert took.median == 6.0  # the busiest of two processes has three of the five clients
    assert took.overheads == pytest.approx([5 - 1.2, 9 - 2.4, 6 - 2.4]) and took.overhead == pytest.approx(3.8)
    assert Rounds("one", [3.0], [1.0], 1).overheads == [2.0]
    both = joined(took, Rounds("two", [1.0], [0.5], 2))
    assert both.seconds == [5.0, 9.0, 6.0, 1.0] and both.bare == [2.0, 4.0, 4.0, 0.5] and both.processes == 2


def test_weights_of_other_networks_are_not_compared() -> None:
    one, other = (Rounds(name, [1.0], [1.0], 1, {name: torch.ones(2)}) for name in "ab")
    assert task.difference(one, Rounds("c", [1.0], [1.0], 1, {"a": torch.tensor([1.0, 3.0])})) == 2
    with pytest.raises(ValueError, match="a and b did not learn the same network"):
        task.difference(one, other)


# -- a runtime in a process of its own --------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for a runtime that is no package of anyone; it is run with its files in a folder of the test."""
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "runtime_of_a_test.py"


def left(runtime: Path) -> list[Path]:
    return list((runtime.parent / "files").iterdir())


def test_a_runtime_leaves_neither_files_nor_processes(runtime: Path) -> None:
    runtime.write_text(
        "import os, subprocess\n"
        "from fcil.bench.task import Rounds\n"
        "import torch\n"
        "def work(heavy, rounds, folder):\n"
        "    print('litter')\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    place = float(os.environ['PLACE'] == folder + '/x')\n"
        "    return Rounds('it', [place] * rounds, [float(heavy)] * rounds, 3, {'pid': torch.tensor([child.pid])})\n"
    )
    took = task.apart("runtime_of_a_test", "it", True, 2, {"PLACE": "FOLDER/x"})
    assert (took.name, took.seconds, took.bare, took.processes) == ("it", [1.0, 1.0], [1.0, 1.0], 3)
    assert left(runtime) == [] and not runs(int(took.weights["pid"]))


def runs(pid: int) -> bool:
    """Tell whether a process is there and not merely waiting to be forgotten by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "body, said", [("raise OSError('no room for ray')", "no room for ray"), ("os._exit(7)", "code 7")]
)
def test_a_runtime_that_fails_says_why(runtime: Path, body: str, said: str) -> None:
    runtime.write_text(f"import os\ndef work(heavy, rounds, folder):\n    {body}\n")
    with pytest.raises(UserError, match=f"^it failed: .*{said}$"):
        task.apart("runtime_of_a_test", "it", False, 1)
    assert left(runtime) == []


def test_a_runtime_that_hangs_is_ended(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = runtime.parent / "pid"
    runtime.write_text(
        "import os, pathlib, signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(told)!r}).write_text(str(os.getpid()))\n"
        "def work(heavy, rounds, folder):\n"
        "    signal.pause()\n"
    )
    monkeypatch.setattr(task, "LONGEST", 8)
    monkeypatch.setattr(task, "PATIENCE", 0)
    with pytest.raises(UserError, match="it did not finish 1 rounds in 8 seconds"):
        task.apart("runtime_of_a_test", "it", False, 1)
    assert left(runtime) == [] and not runs(int(told.read_text()))
    assert os.getpid() != int(told.read_text())
