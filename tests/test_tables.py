"""Tables, drawn as a person would see them."""

import csv
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from fcil.errors import UserError
from fcil.report.comparison import Measured, compare
from fcil.report.evidence import gather
from fcil.report.outcome import accuracy_table
from fcil.report.paper import PAPER_FINAL, PAPER_SEM, claim
from fcil.report.tables import as_csv, as_latex, as_markdown, as_rich
from fcil.results.metrics import summary
from fcil.results.runs import Run, find
from fcil.scenario.benchmarks import BENCHMARKS


def run(
    method: str, seed: int = 0, right: int = 60, benchmark: str = "cifar100-10x10", tasks: int = 3, **settings: Any
) -> Run:
    correct = [[100 if j == t else right for j in range(t + 1)] for t in range(tasks)]
    result = {
        "format": 1, "method": method, "benchmark": benchmark, "protocol": "short", "seed": seed,
        **summary(correct, [100] * tasks), "seconds": {"train": 90.0, "total": 90.0}, "memory_bytes": 122880,
        "settings": settings,
    }  # fmt: skip
    return Run(Path("runs", benchmark, method, str(seed)), result)


def drawn(table: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


SUMS = [1202.28, 1108.23, 1052.39, 972.58, 1075.68]  # of the columns of paper.tex, 21 methods each


def test_table_2_of_the_paper() -> None:
    assert len(PAPER_FINAL) == 5 and set(PAPER_FINAL) <= set(BENCHMARKS)
    assert all(len(methods) == 21 for methods in PAPER_FINAL.values())
    assert PAPER_FINAL["cifar100-10x10"]["hr"] == 65.84 and PAPER_SEM["cifar100-10x10"]["hr"] == 0.57
    assert PAPER_FINAL["imagenet-subset-20x10"]["icarl"] == 42.71
    assert PAPER_FINAL["tinyimagenet-10x5"]["hr-rfa"] == 57.81 and PAPER_SEM["tinyimagenet-10x5"]["hr-rfa"] == 0.63
    assert [round(sum(column.values()), 2) for column in PAPER_FINAL.values()] == SUMS
    assert all(0.2 <= sem <= 0.65 for column in PAPER_SEM.values() for sem in column.values())


def test_claims_are_found_by_our_names() -> None:
    assert claim("cifar100-10x10", "hr-literal") == claim("cifar100-10x10", "hr") == (65.84, 0.57)
    assert claim("cifar100-20x5", "hr-literal-no-kd") == (58.13, 0.41)
    assert claim("digits", "hr") is None and claim("cifar100-10x10", "joint") is None


def test_runs_are_grouped_and_averaged() -> None:
    runs = [run("hr", 0, 60), run("hr", 1, 70), run("hr", 2, 80), run("icarl", 0, 50), run("hr", 0, 40, memory=4)]
    runs += [run("hr", 0, 60, benchmark="digits")]
    cifar, digits = compare(runs).sections
    assert (cifar.benchmark, cifar.protocol, digits.benchmark) == ("cifar100-10x10", "short", "digits")
    assert [row.label for row in cifar.rows] == ["icarl", "hr", "hr (memory=4)"]
    icarl, hr, less = cifar.rows
    assert hr.seeds == (0, 1, 2)
    assert hr.final.mean == pytest.approx((100 + 70 + 70) / 3) and hr.final.sem == pytest.approx(3.8490018)
    assert (hr.forgetting.mean, hr.bwt.mean, hr.memory_bytes, hr.seconds) == (30.0, -30.0, 122880, 90.0)
    assert icarl.final.sem is None and str(icarl.final) == "66.7 (1 seed)"
    assert icarl.paper == (50.25, 0.53) and hr.paper == (65.84, 0.57)
    assert less.paper is None and digits.rows[0].paper is None


def in_folder(place: Path, seed: int, toml: str) -> Run:
    (folder := place / str(seed)).mkdir()
    (folder / "config.toml").write_text(toml)
    return Run(folder, run("hr", seed, 60 + seed).result)


def test_runs_of_one_name_that_are_not_the_same_have_rows_of_their_own(tmp_path: Path) -> None:
    mine = "[benchmark]\nname = 'mine'\nalpha = {}\n[protocol]\nname = 'short'\n[config]\nlr = 0.1\n{}"
    known = "tied = 128"
    runs = [
        in_folder(tmp_path, seed, mine.format(alpha, knobs))
        for seed, (alpha, knobs) in enumerate([(0.1, known), (0.1, known), (1, known), (1, ""), (1, "tied = 0")])
    ]
    rows = {row.label: row for row in compare(runs).sections[0].rows}
    assert {label: row.seeds for label, row in rows.items()} == {
        "hr (alpha=0.1, tied=128)": (0, 1),
        "hr (alpha=1, tied=128)": (2,),
        "hr (alpha=1, tied=unset)": (3,),
        "hr (alpha=1, tied=0)": (4,),
    }
    assert all(row.paper is None for row in rows.values())
    assert [row.label for row in compare(runs[:2]).sections[0].rows] == ["hr"]


def test_another_file_of_a_method_of_ones_own_is_another_method(tmp_path: Path) -> None:
    runs = []
    for seed, (folder, source) in enumerate([("a", "1234567890"), ("b", "1234567890"), ("a", "abcdefghij")]):
        one = in_folder(tmp_path, seed, f"source = '{source}'\n[config]\nlr = 0.1")
        runs.append(Run(one.folder, {**one.result, "method": f"/{folder}/mine.py"}))
    rows = {row.label: row.seeds for row in compare(runs).sections[0].rows}
    assert rows == {"mine.py (source=12345678)": (0, 1), "mine.py (source=abcdefgh)": (2,)}
    assert [row.label for row in compare(runs[:2]).sections[0].rows] == ["mine.py"]


def test_a_knob_that_came_later_is_told_of_the_runs_before_it_alone(tmp_path: Path) -> None:
    runs = [in_folder(tmp_path, seed, f"[config]\nlr = 0.1\n{knob}") for seed, knob in enumerate(["", "tied = 0"])]
    rows = {row.label: row.seeds for row in compare(runs).sections[0].rows}
    assert rows == {"hr (tied=unset)": (0,), "hr": (1,)}


def test_a_knob_that_has_gone_is_told_of_the_runs_that_had_it(tmp_path: Path) -> None:
    knobs = ["whole = 0.0", "whole = 0.0\ntied = 0", "tied = 0"]
    runs = [in_folder(tmp_path, seed, f"[config]\nlr = 0.1\n{knob}") for seed, knob in enumerate(knobs)]
    rows = {row.label: row.seeds for row in compare(runs).sections[0].rows}
    assert rows == {"hr (tied=unset, whole=0.0)": (0,), "hr (whole=0.0)": (1,), "hr": (2,)}


@pytest.mark.parametrize("config", ["benchmark = 3\n", "[config]\nlr = 2026-11-16\n", "[config\n", "\x00"])
def test_a_config_of_another_kind_stops_no_table(config: str, tmp_path: Path) -> None:
    runs = [in_folder(tmp_path, 0, config), in_folder(tmp_path, 1, "[config]\nlr = 0.1\n")]
    rows = compare(runs).sections[0].rows
    assert sorted(seed for row in rows for seed in row.seeds) == [0, 1]


def test_what_protocols_got_later_leaves_older_runs_as_they_were(tmp_path: Path) -> None:
    older, newer = "[protocol]\nrounds = 60\n", "[protocol]\nrounds = 60\nwarmup = 0.0\n"
    [row] = compare([in_folder(tmp_path, 0, older), in_folder(tmp_path, 1, newer)]).sections[0].rows
    assert row.seeds == (0, 1) and row.label == "hr"


def test_only_the_same_experiment_stands_beside_the_papers_number() -> None:
    runs = [
        run("hr", memory_scope="client"),
        run("hr", rounds=9),
        run("hr", train_limit=2),
        run("hr", protocol="paper"),
    ]
    rows = compare(runs).sections[0].rows
    assert {row.label: row.paper is not None for row in rows} == {
        "hr": True, "hr (memory_scope=client)": True, "hr (rounds=9)": True, "hr (train_limit=2)": False,
    }  # fmt: skip


def test_rows_stand_in_the_papers_order_between_the_bounds() -> None:
    names = ["joint", "hr-mini", "hr", "hr-literal-mini", "hr-literal", "mfcl", "icarl", "ewc", "finetune"]
    runs = (
        [run(name) for name in names] + [run("hr", memory=m) for m in ("16", "4", "128")] + [run("hr", partition="x")]
    )
    assert [row.label for row in compare(runs).sections[0].rows] == [
        "finetune", "ewc", "icarl", "mfcl", "hr-literal", "hr-literal-mini",
        "hr", "hr (memory=4)", "hr (memory=16)", "hr (memory=128)", "hr (partition=x)", "hr-mini", "joint",
    ]  # fmt: skip


def test_a_seed_counts_once() -> None:
    [row] = compare([run("hr", 0, 60), run("hr", 0, 60), run("hr", 1, 70)]).sections[0].rows
    assert row.seeds == (0, 1)
    with pytest.raises(UserError, match="both hr on cifar100-10x10 with seed 0, but differ"):
        compare([run("hr", 0, 60), run("hr", 0, 61)])


def test_small_negative_numbers_have_no_sign() -> None:
    assert str(Measured(-0.01, 0.0)) == "0.0 ± 0.0"
    assert str(Measured(-0.06, None)) == "-0.1 (1 seed)"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_terminal_table_fits(width: int) -> None:
    runs = [run("hr", s, 60 + s) for s in range(2)] + [run("joint", 0, 95), run("hr-literal-no-latents", 0, 30)]
    runs += [run("hr", 0, 44, learning_rate=0.05, weight_of_everything=1e-4)]
    lines = drawn(as_rich(compare(runs), width), width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for piece in ("hr-literal-no-latents", "73.7 ± 0.3", "53.3 (1 seed)", "joint is the upper bound"):
        assert piece in text
    assert ("Too narrow for: BWT" in text) == (width < 120)
    assert ("paper is the final accuracy it claims" in text) == (width > 60) == ("65.84" in text)


def test_markup_in_names_is_text() -> None:
    text = "\n".join(drawn(as_rich(compare([run("hr", benchmark="[red]x[/red]", note="[bold]")]))))
    assert "[red]x[/red]" in text and "note=[bold]" in text
    assert "[red]x[/red]" in "\n".join(drawn(accuracy_table(run("hr", benchmark="[red]x[/red]").result)))


def test_markdown() -> None:
    text = as_markdown(compare([run("hr", s, 60 + s) for s in range(2)] + [run("icarl", note="a|b_c"), run("joint")]))
    lines = text.splitlines()
    assert lines[0] == "### cifar100-10x10, short protocol"
    assert lines[2] == "| method | seeds | final | average | forgetting | BWT | KB | min | paper |"
    assert lines[4].startswith(r"| icarl (note=a\|b\_c) | 1 | 73.3 (1 seed) |")
    assert "| hr | 2 | 73.7 ± 0.3 | 84.6 ± 0.2 | 39.5 | -39.5 | 122.9 | 1.5 | 65.84 ± 0.57 |" in lines
    assert any(line.startswith("| *joint* | 1 |") for line in lines)


def test_the_best_method_is_marked() -> None:
    runs = [run("hr", 0, 70), run("icarl", 0, 50), run("joint", 0, 90), run("hr", 0, 80, memory=64)]
    text = as_markdown(compare(runs))
    assert text.count("**") == 2 and "| hr | 1 | **80.0 (1 seed)** |" in text
    assert "**" not in as_markdown(compare(runs[:1]))


def test_latex_is_escaped() -> None:
    text = as_latex(compare([run("hr", 0, 60, note="50%_&#$~^\\{}"), run("finetune", 0, 5), run("hr", 1)]))
    assert r"hr (note=50\%\_\&\#\$\textasciitilde{}\textasciicircum{}\textbackslash{}\{\})" in text
    assert r"\textit{finetune}" in text and r"65.84 $\pm$ 0.57" in text and "$-$40.0" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 4 and {line.replace(r"\&", "").count("&") for line in rows} == {8}
    for line in (r"\toprule", r"\midrule", r"\bottomrule", r"\begin{tabular}{@{}lrrrrrrrr@{}}"):
        assert line in text
    assert text.isascii()


def test_csv_is_unrounded() -> None:
    runs = [run("hr", s, 60 + s) for s in range(2)] + [run("icarl", alpha=0.1, memory=4)]
    other, hr = csv.DictReader(io.StringIO(as_csv(compare(runs))))
    assert (hr["method"], hr["settings"], hr["seeds"]) == ("hr", "", "2")
    assert float(hr["final"]) == pytest.approx((100 + 121) / 3) and float(hr["final_sem"]) == pytest.approx(1 / 3)
    assert (hr["paper_final"], hr["paper_sem"]) == ("65.84", "0.57")
    assert other["settings"] == "alpha=0.1, memory=4"
    assert other["final_sem"] == other["paper_final"] == ""


@pytest.mark.parametrize("tasks", [1, 2, 5, 10])
def test_one_runs_table_shows_every_task(tasks: int) -> None:
    result = run("hr", tasks=tasks, right=100, benchmark="digits").result  # 100.0 is the widest number
    lines = drawn(accuracy_table(result))
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert lines[0].strip() == "hr on digits, short protocol, seed 0"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    for t in range(tasks):
        assert rows[str(t + 1)] == ["100.0"] * (t + 2)
    assert rows["final"] == rows["average"] == ["100.0"]
    assert rows["forgetting"] == ["0.0"] * tasks


def test_one_runs_table_is_shortened_for_many_tasks() -> None:
    result = run("hr", tasks=20, right=60).result
    lines = drawn(accuracy_table(result))
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert rows["20"] == ["60.0", "100.0", "62.0"]  # first, newest, all
    assert rows["forgetting"] == ["40.0", "40.0"]
    wide = drawn(accuracy_table(result, 150), 150)
    assert max(map(len, wide)) <= 150
    assert len(next(line for line in wide if line.startswith("20 ")).split()) == 22


def test_one_runs_table_shows_the_metrics() -> None:
    correct = [[8], [6, 7], [5, 4, 9]]
    result = {**run("hr").result, **summary(correct, [10, 10, 10])}
    rows = {line.split()[0]: line.split()[1:] for line in drawn(accuracy_table(result)) if line.strip()}
    assert rows["2"] == ["60.0", "70.0", "65.0"] and rows["3"] == ["50.0", "40.0", "90.0", "60.0"]
    assert (rows["final"], rows["average"], rows["forgetting"]) == (["60.0"], ["68.3"], ["30.0", "30.0", "30.0"])
    del result["overall"]  # then only the last is known
    rows = {line.split()[0]: line.split()[1:] for line in drawn(accuracy_table(result)) if line.strip()}
    assert rows["2"] == ["60.0", "70.0"] and rows["3"][-1] == "60.0"


def test_a_page_keeps_them_apart_too(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        shutil.copytree(Path(__file__).parent.parent / "results" / "digits" / "finetune" / seed, tmp_path / seed)
    config = tmp_path / "1" / "config.toml"
    config.write_text(config.read_text().replace("alpha = 1.0", "alpha = 0.1"))
    [evidence], left_out = gather([tmp_path])
    assert {group.label: [trial.seed for trial in group.trials] for group in evidence.groups} == {
        "finetune (alpha=0.1)": [1], "finetune (alpha=1.0)": [0],
    }  # fmt: skip
    assert left_out == []


def test_a_page_keeps_them_apart_where_they_have_one_seed(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        shutil.copytree(Path(__file__).parent.parent / "results" / "digits" / "finetune" / "0", tmp_path / folder)
    config = tmp_path / "b" / "config.toml"
    config.write_text(config.read_text().replace("alpha = 1.0", "alpha = 0.1"))
    [evidence], left_out = gather([tmp_path])
    assert {group.label: [trial.run.folder.name for trial in group.trials] for group in evidence.groups} == {
        "finetune (alpha=0.1)": ["b"], "finetune (alpha=1.0)": ["a"],
    }  # fmt: skip
    [section] = compare(find([tmp_path])).sections
    assert left_out == [] and [row.label for row in section.rows] == [group.label for group in evidence.groups]
