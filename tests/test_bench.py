"""`fcil bench`: what it measures is there, adds up and is said; nothing here asks how fast it is."""

import json
from pathlib import Path
from statistics import median

import pytest
import torch

from fcil import bench
from fcil.bench import steps, task
from fcil.report.speed import spread, tables, third_quartile
from tests.typed import done, typed


def test_the_engine_against_the_plain_loop(tmp_path: Path) -> None:
    said = done(f"bench --part engine --device cpu --rounds 3 --json {tmp_path / 'speed.json'}")
    assert "ratio" in said.out and "hr-literal" in said.out and "product of matrices" in said.out
    machine, finetune, *others = json.loads((tmp_path / "speed.json").read_text())
    assert [found["method"] for found in others] == ["hr", "hr-literal"]
    assert machine["part"] == "machine" and machine["torch"] == torch.__version__
    for found in (finetune, *others):
        assert len(found["plain"]) == len(found["fast"]) == 3 and min(found["plain"] + found["fast"]) > 0
        assert found["ratio"] == pytest.approx(median(found["plain"]) / median(found["fast"]))
        assert found["rate"] == pytest.approx(5 * 10 * 32 / median(found["fast"]))
    assert 0 < finetune["share"] < 1 and not any("share" in found for found in others)


def test_the_operations_of_the_encoder_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "matrix_rate", lambda device: 1e9)
    most, share = steps.encoder_share("cpu", 10.0)
    # 8x8 to 16 channels, 4x4 to 32, 2x2 to 64: a multiply and an add each; backward twice that, but not to the images
    convolutions, head = [64 * 16 * 9, 16 * 32 * 16 * 9, 4 * 64 * 32 * 9], 64 * 100
    assert most == 1e9 and share == pytest.approx(10 * 2 * (3 * (sum(convolutions) + head) - convolutions[0]) / 1e9)


def a_turn(name: str, seconds: float, processes: int) -> task.Rounds:
    return task.Rounds(name, [seconds] * 2, [0.1] * 2, processes, {"w": torch.ones(1)})


def test_runtimes_have_their_turns_and_the_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    def ours(heavy: bool, rounds: int, workers: int) -> task.Rounds:
        turns.append((heavy, rounds, workers))
        return a_turn("fcil", 0.2, workers)

    monkeypatch.setattr(bench.task, "ours", ours)
    monkeypatch.setattr(bench.flower, "measure", lambda heavy, rounds: a_turn("Flower", 1.0, 2))
    monkeypatch.setattr(bench.pfl, "measure", lambda heavy, rounds: None)
    found = list(bench.bench(("flower", "pfl"), "cpu", 6))
    rows = [f for f in found if f["part"] == "rounds"]
    assert [(f["model"], f["name"]) for f in rows] == [
        (model, name) for model in ("98 KB", "45 MB") for name in ("Flower", "fcil, loop", "fcil, workers")
    ]
    assert all(len(f["seconds"]) == 6 and f["difference"] == 0 for f in rows) and {t[1] for t in turns} == {2}
    assert [f["overhead"] for f in rows[:3]] == pytest.approx([0.94, 0.1, 0.14])
    missing = [f for f in found if f["part"] == "missing"]
    assert len(missing) == 2 and not any(f["needed"] for f in missing)
    shown = tables(found)
    assert "pfl-research is not installed: pip install 'pfl==0.6.*'" in shown
    table = next(t for t in shown if not isinstance(t, str))
    columns = [list(column.cells) for column in table.columns]  # type: ignore[union-attr]
    assert columns[4][:3] == ["5.0", "1.0", "1.0"] and columns[6][:3] == ["9.4", "1.0", "1.4"]


def test_without_flower_the_bench_says_so_and_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.flower, "find_spec", lambda name: None)
    monkeypatch.setattr(bench.pfl, "find_spec", lambda name: None)
    for part, sentence in (("flower", "constraints.txt -e '.[simulation]'"), ("pfl", "pip install 'pfl==0.6.*'")):
        said = typed(f"bench --part {part}")  # at once: our own side is not measured for nothing
        assert said.code == 2 and said.err.count(sentence) == 1 and sentence not in said.out


def test_growth_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = bench.growth.Cost(0.1, 1.0, 2.0, 100), bench.growth.Cost(0.2, 4.0, 2.0, 400)
    row = bench.growth.Row("clients", 5, 50, (low, high))
    monkeypatch.setattr(bench.growth, "growth", lambda: [row])
    _, found = bench.bench(("growth",), "cpu", 3)
    assert found["seconds"] == pytest.approx(2.0) and found["memory"] == pytest.approx(4.0)
    assert json.loads(json.dumps(found))["what"] == "clients" and tables([found])[1] == str(row)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--part flowers", "there is no part 'flowers'; did you mean 'flower'?"),
        ("--rounds 2", "rounds"),
        ("--json /nowhere/at/all.json", "there is no folder /nowhere/at to write all.json to"),
        ("--device tpu", "device=tpu is not allowed; device takes auto, cpu, cuda"),
    ],
)
def test_bad_input_gets_a_sentence(words: str, said: str) -> None:
    ended = typed(f"bench {words}")
    assert ended.code == 2 and said in ended.err and "Traceback" not in ended.err


def test_spreads() -> None:
    assert spread([0.1, 0.2, 0.3, 0.4, 0.5]) == "300 (200..400)" and spread([0.25]) == "250 (250..250)"
    assert third_quartile([0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx(0.4) and third_quartile([2.0]) == 2.0
