"""The paper's tables: which runs they take, what happens where data is missing, and our numbers above its claims."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fcil.bench.page import made_up_run
from fcil.cli import main
from fcil.errors import UserError
from fcil.methods import METHODS
from fcil.plan import plan
from fcil.report.comparison import compare
from fcil.report.paper import PAPER_FINAL, PAPER_TABLE_3, claim, kept_in_table_3
from fcil.report.paper_curves import MEMORIES
from fcil.report.paper_runs import RATES, TABLES, advice, runs_of
from fcil.report.paper_tables import as_csv, as_latex, as_markdown, paper_tables
from fcil.results.runs import find
from tests.test_datasets import write_parquet


def run(*words: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["fcil", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@pytest.mark.parametrize("table", TABLES)
def test_every_run_of_a_table_can_be_planned(table: str) -> None:
    wanted = runs_of(table)
    plans = {plan(run.method, run.benchmark, settings=run.settings).folder() for run in wanted}
    assert len(plans) == len(wanted) and {run.method for run in wanted} <= set(METHODS)
    assert {"finetune", "joint", "hr", "hr-literal"} <= {run.method for run in wanted}


def test_table_2_has_every_method_of_the_paper_on_each_of_its_benchmarks() -> None:
    wanted = {(run.benchmark, run.method) for run in runs_of("table2")}
    assert {(b, m) for b, cells in PAPER_FINAL.items() for m in cells} < wanted and len(wanted) == 5 * 24
    assert {run.benchmark for run in runs_of("table2", ["cifar100-20x5"])} == {"cifar100-20x5"}


def test_who_starts_a_run_with_another_rate_than_did_best_is_told() -> None:
    assert advice(plan("dde", "cifar100-10x10")) == (
        "dde runs with lr=0.1; on held-out images of cifar100-10x10 lr=0.01 did best: --set lr=0.01"
    )
    assert advice(plan("icarl", "cifar100-10x10", settings={"exemplar_codec": "webp:300"}))
    known = [("dde", "digits", {}), ("hr", "cifar100-10x10", {}), ("dde", "cifar100-10x10", {"lr": 0.02})]
    known.append(("dde", "cifar100-10x10", {"holdout": 0.1}))
    other_loss = ("icarl", "cifar100-10x10", {"over": "all"})
    assert not any(advice(plan(*what, settings=settings)) for *what, settings in [*known, other_loss])


def test_the_memory_sweep_has_every_memory_but_for_what_keeps_nothing() -> None:
    wanted = runs_of("memory", ["cifar100-10x10"])
    swept = {run.method for run in wanted if run.settings}
    assert swept == {"hr", "hr-literal", "glfc", "geodl", "remind-plus", "ictrl"}
    assert len(wanted) == 2 + 2 + 6 * 8
    assert [run.settings["memory"] for run in wanted if run.method == "glfc"] == [str(n) for n in MEMORIES]


def test_table_3_takes_the_decoder_from_hybrid_replay() -> None:
    by_method = {run.method: run.settings for run in runs_of("table3", ["cifar100-10x10"])}
    assert (
        by_method["hr"] == by_method["hr-literal"] == {"memory_share": "0.75", "rounds": "50"}
    )  # 150 of 200, 50 of 60
    assert by_method["glfc"] == {"lr": "0.6"} and set(by_method) == {
        "finetune",
        "joint",
        "hr",
        "hr-literal",
        "geodl",
        "ssil",
        "glfc",
    }
    long = {run.method: run.settings for run in runs_of("table3", ["imagenet-subset-10x20"], "paper")}
    assert long["hr"] == {"memory_share": "0.95", "rounds": "88"}  # of 100, as 70 epochs of 80


def test_a_wrong_table_or_benchmark_is_one_sentence() -> None:
    with pytest.raises(UserError, match="there is no table 'table4'.*table2, table3, memory"):
        runs_of("table4")
    with pytest.raises(UserError, match="--paper table2 is not about digits; it takes cifar100-10x10, cifar100-20x5"):
        runs_of("table2", ["digits"])
    with pytest.raises(UserError, match="not about cifar100-20x5; it takes cifar100-10x10, imagenet[^,]*, digits"):
        runs_of("table3", ["cifar100-20x5"])


def test_digits_stand_in_for_table_3_only_where_they_are_asked_for() -> None:
    assert "digits" not in {run.benchmark for run in runs_of("table3")}
    by_method = {run.method: run.settings for run in runs_of("table3", ["digits"])}
    assert by_method["hr"] == {"memory_share": "0.75", "rounds": "17"} and by_method["glfc"] == {}  # 50 of 60, of 20
    assert set(by_method) == {run.method for run in runs_of("table3", ["cifar100-10x10"])}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs of two seeds and of one, under the settings of all three tables."""
    for benchmark, method, seeds, settings in (
        ("cifar100-10x10", "hr", 2, {}), ("cifar100-10x10", "glfc", 1, {}), ("tinyimagenet-10x5", "icarl", 1, {}),
        ("cifar100-10x10", "hr", 1, {"memory_share": "0.75", "rounds": "50"}),
        ("cifar100-10x10", "hr", 1, {"memory": "4"}), ("cifar100-10x10", "mfcl", 1, {}), ("digits", "hr", 1, {}),
    ):  # fmt: skip
        for seed in range(seeds):
            wanted = plan(method, benchmark, None, seed, settings)
            folder = wanted.folder(tmp_path)
            made_up_run(folder, method, seed, tasks=3, settings=settings, benchmark=benchmark, protocol="short")
    return tmp_path


def fields(runs: Path, table: str) -> dict[tuple[str, str], tuple[str, str]]:
    text = as_csv(paper_tables(compare(find([runs])), table))
    rows = [row for row in csv.DictReader(io.StringIO(text)) if "tinyimagenet" not in row["table"]]
    return {(row["method"], row["column"]): (row["ours"], row["paper"]) for row in rows}


def finals(runs: Path, where: str) -> list[float]:
    return [json.loads(path.read_text())["final"] for path in sorted(runs.glob(f"{where}/*/result.json"))]


def test_table_2_has_ours_above_the_papers(runs: Path) -> None:
    found = fields(runs, "table2")
    one, two = finals(runs, "cifar100-10x10/hr")
    ours, paper = found["hr", "cifar100-10x10"]
    assert ours == f"{(one + two) / 2:.1f} ± {abs(one - two) / 2:.1f}" and paper == "65.84 ± 0.57"
    (single,) = finals(runs, "cifar100-10x10/glfc")
    assert found["glfc", "cifar100-10x10"] == (f"{single:.1f} (1 seed)", "61.83 ± 0.59")
    assert found["icarl", "tinyimagenet-10x5"][0].endswith("(1 seed)") and found["icarl", "cifar100-10x10"][0] == ""
    assert found["joint", "cifar100-10x10"] == ("", "") and ("hr", "digits") not in found
    assert found["hr-literal", "cifar100-20x5"] == ("", "60.48 ± 0.47")


def test_a_baseline_has_the_rate_chosen_for_natural_images_or_else_its_default(runs: Path) -> None:
    assert {run.settings["lr"] for run in runs_of("table2") if run.method == "icarl"} == {RATES["icarl"]}
    assert not any("lr" in run.settings for run in runs_of("table3", ["digits"]))
    folder = plan("glfc", "cifar100-10x10", None, 0, {"lr": RATES["glfc"]}).folder(runs)
    made_up_run(folder, "glfc", 7, 3, settings={"lr": RATES["glfc"]}, benchmark="cifar100-10x10", protocol="short")
    (chosen,), (default,) = (finals(runs, f"cifar100-10x10/{name}") for name in (folder.parent.name, "glfc"))
    assert chosen != default
    assert fields(runs, "table2")["glfc", "cifar100-10x10"][0] == f"{chosen:.1f} (1 seed)"
    assert fields(runs, "table3")["glfc", "final"][0] == f"{chosen:.1f} (1 seed)"


def test_table_3_has_the_runs_of_its_budget(runs: Path) -> None:
    found = fields(runs, "table3")
    (budgeted,) = finals(runs, "cifar100-10x10/hr,memory_share=0.75,rounds=50")
    assert found["hr", "final"] == (f"{budgeted:.1f} (1 seed)", "65.43 ± 0.93")
    assert found["hr", "length"] == ("50 rounds", "50 epochs") and found["glfc", "exemplars"][1] == "20 raw"
    assert all(c.final < claim(b, m).final + 0.5 for b, cells in PAPER_TABLE_3.items() for m, c in cells.items())  # type: ignore[union-attr]


def test_times_of_table_3_are_compared_where_one_code_made_them(runs: Path) -> None:
    digits = runs / "alike"
    budget = {"memory_share": "0.75", "rounds": "17"}
    for method, settings in (("hr", budget), ("glfc", {}), ("ssil", {})):
        made_up_run(digits / method, method, 0, tasks=3, settings=settings, benchmark="digits")
        result = json.loads((digits / method / "result.json").read_text())
        result |= {"commit": "b" if method == "ssil" else "a", "device": "cpu", "engine": "eager"}
        (digits / method / "result.json").write_text(json.dumps(result))
    (table,) = paper_tables(compare(find([digits])), "table3")
    assert table.title.endswith("digits, quick protocol; the paper's times are those of cifar100-10x10")
    found = fields(digits, "table3")
    hr, glfc = (json.loads((digits / name / "result.json").read_text())["seconds"]["total"] for name in ("hr", "glfc"))
    assert found["hr", "to HR"] == ("1.00", "1.00") and found["hr", "minutes"] == (f"{hr / 60:.2f}", "682")
    assert found["glfc", "to HR"] == (f"{glfc / hr:.2f}", "1.16") and found["glfc", "length"][1] == "60 epochs"
    assert found["ssil", "to HR"] == ("", "1.06"), "another code made it"
    assert found["hr", "final"][1] == found["hr", "kept"][1] == "" and ("hr", "decoder") not in found, (
        "the paper says nothing of digits but by its times"
    )


def test_digits_without_the_budget_of_table_3_are_none_of_it(runs: Path) -> None:
    titles = [table.title for table in paper_tables(compare(find([runs])), "table3")]
    assert len(titles) == 1 and "cifar100-10x10" in titles[0]


def test_what_table_3_keeps_is_computed_in_numbers_and_bytes(runs: Path) -> None:
    rows = kept_in_table_3("digits")
    assert [row.numbers for row in rows] == [4_605_000, 6_144_000, 40_223_000, 42_336_000]
    assert all(abs(row.numbers - row.said.memory) < 0.025 * row.said.memory for row in rows)  # as far as it is rounded
    hr, raw = kept_in_table_3("cifar100-10x10")
    assert hr.as_floats == 24_020_000 and raw.as_bytes == 6_144_000  # what a device would hold
    assert raw.methods == "geodl, ssil, glfc"
    found = fields(runs, "table3")
    assert found["hr", "kept"][1] == "4.6M" and found["hr", "decoder"][1] == "1.4M"
    assert found["glfc", "kept"][1] == "6M" and found["glfc", "decoder"][1] == "-"


def test_the_memory_sweep_is_a_line_a_method(runs: Path) -> None:
    found = fields(runs, "memory")
    (swept,), (level,) = finals(runs, "cifar100-10x10/hr,memory=4"), finals(runs, "cifar100-10x10/mfcl")
    assert found["hr", "4"] == (f"{swept:.1f} (1 seed)", "61.75") and found["hr", "8"] == ("", "62.87")
    assert {found["mfcl", str(n)] for n in MEMORIES} == {(f"{level:.1f} (1 seed)", "49.99")}


def test_other_forms_say_the_same(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = paper_tables(compare(find([runs])), "table2")
    markdown, latex = as_markdown(made), as_latex(made)
    assert "| *paper* | *65.84 ± 0.57* |" in markdown and r"\textit{65.84 $\pm$ 0.57}" in latex
    widths = {line.count(" | ") for line in markdown.splitlines() if line.startswith("| ")}
    assert widths == {5} and latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 1
    assert not run("table", str(runs), "--paper", "table2", monkeypatch=monkeypatch)
    shown = capsys.readouterr().out
    assert "65.84±0.57" in shown and "(1)" in shown and max(map(len, shown.splitlines())) <= 80


def test_runs_of_no_table_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_run(tmp_path / "run", "hr", 0, benchmark="digits")
    assert run("table", str(tmp_path), "--paper", "memory", monkeypatch=monkeypatch) == 2
    assert (
        "no run here belongs to memory of the paper; make them with: fcil sweep --paper memory"
        in capsys.readouterr().err
    )


SMALL = "rounds=1 steps=1 clients=2 active=2 network=small stop_after=1 memory=500"


def test_a_benchmark_without_data_is_one_sentence_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCIL_DATA", str(tmp_path / "data"))
    for half in ("train", "test"):
        write_parquet(tmp_path / f"data/cifar100/{half}.parquet", classes=100, count=2, columns=("img", "fine_label"))
    settings = [word for pair in SMALL.split() for word in ("--set", pair)]
    words = ("sweep", "--paper", "table3", "--seeds", "0", "--out", str(tmp_path / "runs"), "--workers", "1", *settings)
    assert not run(*words, monkeypatch=monkeypatch)
    said = capsys.readouterr()
    (sentence,) = [line for line in said.err.splitlines() if "left out" in line]
    assert sentence.startswith("fcil: 7 runs left out: ImageNet is not here") and "Traceback" not in said.err
    done = {path.parent.parent.name.split(",")[0] for path in (tmp_path / "runs").rglob("result.json")}
    assert done == {"finetune", "joint", "hr", "hr-literal", "geodl", "ssil", "glfc"}
    assert "14 runs, 0 of them finished before" in said.out
    assert not run(*words, monkeypatch=monkeypatch)
    assert "14 runs, 7 of them finished before" in capsys.readouterr().out


def test_where_all_data_is_missing_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FCIL_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    words = ("sweep", "--paper", "table2", "--seeds", "0", "--out", str(tmp_path / "runs"))
    assert run(*words, monkeypatch=monkeypatch) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" left out: ")[0] for line in said[:3]] == ["fcil: 48 runs", "fcil: 48 runs", "fcil: 24 runs"]
    assert len(said) == 4 and "120 of 120 runs did not finish" in said[3] and not (tmp_path / "runs").exists()


def test_methods_are_not_asked_for_twice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("sweep", "--paper", "table2", "--methods", "hr", monkeypatch=monkeypatch) == 2
    assert "--paper names the methods itself; leave out --methods" in capsys.readouterr().err
