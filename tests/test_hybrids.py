"""Table 1: what the hybrid methods are, from their code; their lines, counted; the paper's words beside it."""

import csv
import io
from dataclasses import replace

import pytest
from rich.console import Console

from fcil.methods import METHODS, method
from fcil.report import hybrids as table_1
from fcil.report.hybrids import (
    COLUMNS,
    HYBRIDS,
    hybrids,
    hybrids_as_csv,
    hybrids_as_latex,
    hybrids_as_markdown,
    hybrids_as_rich,
)
from fcil.report.paper import PAPER_TABLE_1


def test_there_is_a_row_for_every_hybrid_method_that_is_registered() -> None:
    rows = hybrids()
    registered = {name for name, entry in METHODS.items() if entry.family == "hybrid"}
    assert {row.method for row in rows} == registered <= HYBRIDS.keys()
    assert {"hr", "hr-literal", "ictrl"} <= registered
    for row in rows:
        assert all(row.cells) and len(row.cells) == len(COLUMNS) and len(row.paper) == len(COLUMNS) - 1
        assert row.lines.own > 60 and row.lines.used > 60
        assert str(row.lines.own) in row.cells[-1] and str(row.lines.used) in row.cells[-1]


def test_cells_follow_the_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row.method: row for row in hybrids()}
    assert rows["hr-literal"].quantisation == f"codes of {method('hr-literal').config().code_bits} bits a number"
    assert "klt" in rows["hr"].quantisation and rows["ictrl"].quantisation == "none: floats"
    assert rows["ictrl"].classification == "latent space: nearest subspace" and rows["ictrl"].learning == "offline"
    made = method("ictrl")
    by_means = made._replace(config=lambda: replace(made.config(), classifier="nearest_mean"))
    monkeypatch.setattr(table_1, "method", lambda name: by_means if name == "ictrl" else method(name))
    assert {row.method: row for row in hybrids()}["ictrl"].classification == "latent space: nearest mean"


@pytest.mark.parametrize(("single_pass", "said"), [(True, "online"), (False, "offline; online: single_pass=true")])
def test_a_method_that_can_learn_online_says_so(single_pass: bool, said: str) -> None:
    class Config:
        pass

    config = Config()
    config.single_pass, config.centres, config.part = single_pass, 256, 16  # type: ignore[attr-defined]
    assert table_1._learning(config) == said
    assert table_1._quantisation(config) == "product quantisation: 256 centres, a byte for 16 channels"


def test_the_papers_words_are_its_own() -> None:
    assert PAPER_TABLE_1.keys() == {"hr", "remind", "remind-plus", "ictrl"}
    assert [words[2] for words in PAPER_TABLE_1.values()] == ["offline", "online", "online", "offline"]
    assert [words[4].split()[0] for words in PAPER_TABLE_1.values()] == ["clean", "ad", "ad", "clean"]
    rows = {row.method: row for row in hybrids()}
    assert rows["hr"].paper == rows["hr-literal"].paper == PAPER_TABLE_1["hr"]


def test_every_form_says_the_same() -> None:
    rows = hybrids()
    console = Console(file=io.StringIO(), width=80, color_system=None, legacy_windows=False)
    console.print(hybrids_as_rich(rows))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in drawn.splitlines()) <= 80
    markdown, latex = hybrids_as_markdown(rows), hybrids_as_latex(rows)
    assert len([line for line in markdown.splitlines() if line.startswith("|")]) == 2 + 2 * len(rows)
    assert latex.count(r" \\") == 1 + 2 * len(rows) and latex.startswith(r"\begin{table*}")
    for row in rows:
        assert row.method in drawn and row.cells[-1] in " ".join(drawn.split())
        assert row.cells[-1] in markdown and row.cells[-1] in latex and row.paper[-1] in latex
    found = list(csv.DictReader(hybrids_as_csv(rows).splitlines()))
    assert [line["method"] for line in found] == [row.method for row in rows]
    assert [int(line["lines"]) for line in found] == [row.lines.own for row in rows]
    assert [line["paper_simplicity"] for line in found] == [row.paper[-1] for row in rows]
