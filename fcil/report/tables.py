"""Tables: many runs side by side, and the one a newcomer sees at the end of a run.

A comparison has a section for each benchmark and protocol, and in it a row for each method and its settings, averaged
over seeds. The same rows are drawn for the terminal, for Markdown, for LaTeX and as CSV.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fcil.errors import UserError
from fcil.report.paper import PAPER_FINAL, Claim, claim, paper_name
from fcil.results.metrics import forgotten, mean_and_sem
from fcil.results.runs import Run
from fcil.scenario.benchmarks import Benchmark

BOUNDS = {"finetune": "lower", "joint": "upper"}

_PAPER_ORDER = list(PAPER_FINAL["cifar100-10x10"])
# Settings of the benchmark under which the paper's number still speaks of the same experiment.
_SAME_EXPERIMENT = {"partition_seed", "sampling_seed", "memory_scope"}
_OTHER_EXPERIMENT = {f.name for f in fields(Benchmark)} - _SAME_EXPERIMENT


@dataclass(frozen=True)
class Measured:
    """A mean over seeds and its standard error, which one seed does not have."""

    mean: float
    sem: float | None

    def __str__(self) -> str:
        """Say the value so that nobody takes one seed for more."""
        return f"{_number(self.mean)} (1 seed)" if self.sem is None else f"{_number(self.mean)} ± {_number(self.sem)}"


@dataclass(frozen=True)
class Row:
    """A method with its settings, over its seeds."""

    method: str
    settings: dict[str, Any]
    seeds: tuple[int, ...]
    final: Measured
    average: Measured
    forgetting: Measured
    bwt: Measured
    memory_bytes: float
    seconds: float
    paper: Claim | None

    @property
    def label(self) -> str:
        """Return the method and what was set beyond its defaults."""
        name = shown_name(self.method)
        return f"{name} ({_settings_text(self.settings)})" if self.settings else name


@dataclass(frozen=True)
class Section:
    """All rows of one benchmark under one protocol."""

    benchmark: str
    protocol: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Name the benchmark and the protocol."""
        return f"{self.benchmark}, {self.protocol} protocol"

    @property
    def best(self) -> Row | None:
        """Return the method with the highest final accuracy, bounds and changed settings aside."""
        rivals = [row for row in self.rows if not row.settings and row.method not in BOUNDS]
        return max(rivals, key=lambda row: row.final.mean) if len(rivals) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    sections: tuple[Section, ...]


def compare(runs: Iterable[Run]) -> Comparison:
    """Group runs by benchmark, protocol, method and settings, and average each group over its seeds."""
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        section = groups.setdefault((run.result["benchmark"], run.result["protocol"]), {})
        section.setdefault((run.result["method"], json.dumps(run.settings, sort_keys=True)), []).append(run)
    return Comparison(
        tuple(
            Section(benchmark, protocol, tuple(sorted((_row(alike) for alike in rows.values()), key=_place)))
            for (benchmark, protocol), rows in sorted(groups.items())
        )
    )


def as_rich(comparison: Comparison, width: int = 80) -> Group:
    """Draw a comparison for a terminal, leaving out the least telling columns where it is narrow."""
    return Group(*(_rich_section(section, width) for section in comparison.sections))


def as_markdown(comparison: Comparison) -> str:
    """Write a comparison as Markdown tables."""
    return "\n".join(_markdown_section(section) for section in comparison.sections)


def as_latex(comparison: Comparison) -> str:
    """Write a comparison as LaTeX tables that need booktabs."""
    return "\n".join(_latex_section(section) for section in comparison.sections)


def as_csv(comparison: Comparison) -> str:
    """Write a comparison as one flat CSV, unrounded."""
    text = io.StringIO()
    measures = ("final", "average", "forgetting", "bwt")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ["benchmark", "protocol", "method", "settings", "seeds"]
        + [column for name in measures for column in (name, f"{name}_sem")]
        + ["memory_bytes", "seconds", "paper_final", "paper_sem"]
    )
    for section in comparison.sections:
        for row in section.rows:
            measured = [getattr(row, name) for name in measures]
            writer.writerow(
                [section.benchmark, section.protocol, row.method, _settings_text(row.settings), len(row.seeds)]
                + [value for m in measured for value in (m.mean, m.sem)]
                + [row.memory_bytes, row.seconds, *(row.paper or (None, None))]
            )
    return text.getvalue()


def accuracy_table(result: Mapping[str, Any], width: int = 80) -> Table:
    """Draw one run: accuracy on each task after each task, and the metrics, each under what it is made of."""
    matrix: list[list[float]] = result["matrix"]
    tasks = len(matrix)
    # The accuracy on all classes is no mean of a row where tasks differ in size, so what is not given stays empty.
    everything: list[float | None] = result.get("overall") or [None] * (tasks - 1) + [result["final"]]
    falls = [*forgotten(matrix), None]
    columns: list[tuple[str, list[float | None], float | None]] = [
        (f"task\n{j + 1}", [row[j] if j < len(row) else None for row in matrix], falls[j]) for j in range(tasks)
    ]
    if len("forgetting") + 6 * tasks + len(" so far") > width:
        columns = [
            ("first\ntask", [row[0] for row in matrix], falls[0]),
            ("newest\ntask", [row[-1] for row in matrix], None),
        ]
    names = (
        f"{shown_name(result['method'])} on {result['benchmark']}, {result['protocol']} protocol, seed {result['seed']}"
    )
    table = Table(
        title=Text.assemble((names, "bold"), "\ntest accuracy in percent"), title_style="", title_justify="left",
        caption="average: mean of the last column; forgetting: fall from each task's best",
        caption_style="dim", caption_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False,
    )  # fmt: skip
    # Title and caption are folded to the table's width, so a table of few tasks is widened at its first column.
    table.add_column("after\ntask", no_wrap=True, min_width=max(10, min(width, 48) - 6 * len(columns) - 7))
    for header, _, _ in columns:
        table.add_column(header, justify="right", no_wrap=True, min_width=5)
    table.add_column("all\nso far", justify="right", style="bold", no_wrap=True)
    for t in range(tasks):
        cells = [_percent(values[t]) for _, values, _ in columns]
        table.add_row(str(t + 1), *cells, _percent(everything[t]), end_section=t == tasks - 1)
    blank = [""] * len(columns)
    table.add_row("final", *blank, _percent(result["final"]))
    table.add_row("average", *blank, _percent(result["average"]))
    table.add_row("forgetting", *(_percent(fall) for _, _, fall in columns), _percent(result["forgetting"]))
    return table


def shown_name(method: str) -> str:
    """Return what a method is called: its name, or that of the user's own file."""
    return PurePath(method).name if method.endswith(".py") else method


def spread(result: Mapping[str, Any], classes: Sequence[str]) -> str:
    """Say how far classes and clients lie apart at the end of a run."""
    by_class = [
        (accuracy, name) for accuracy, name in zip(result["per_class"], classes, strict=False) if accuracy is not None
    ]
    by_client = sorted(accuracy for accuracy in result["per_client"] if accuracy is not None)
    parts = []
    if by_class:
        (low, worst), (high, best) = min(by_class), max(by_class)
        parts.append(f"classes from {low:.1f} ({worst}) to {high:.1f} ({best})")
    if by_client:
        parts.append(f"clients from {by_client[0]:.1f} to {by_client[-1]:.1f}, each on the classes it has held")
    return "; ".join(parts)


def _row(alike: Sequence[Run]) -> Row:
    runs = _one_per_seed(alike)
    results = [run.result for run in runs]
    first = results[0]
    same_experiment = not _OTHER_EXPERIMENT & runs[0].settings.keys()
    return Row(
        method=first["method"],
        settings=runs[0].settings,
        seeds=tuple(result["seed"] for result in results),
        final=_measured(results, "final"),
        average=_measured(results, "average"),
        forgetting=_measured(results, "forgetting"),
        bwt=_measured(results, "bwt"),
        memory_bytes=mean_and_sem([result["memory_bytes"] for result in results])[0],
        seconds=mean_and_sem([result["seconds"]["total"] for result in results])[0],
        paper=claim(first["benchmark"], first["method"]) if same_experiment else None,
    )


def _one_per_seed(runs: Sequence[Run]) -> list[Run]:
    # A repeated seed is no further evidence: counted twice, it would shrink the standard error.
    kept: dict[int, Run] = {}
    for run in runs:
        other = kept.setdefault(run.result["seed"], run)
        if other.result["matrix"] != run.result["matrix"]:
            raise UserError(
                f"{other.folder} and {run.folder} are both {run.result['method']} on {run.result['benchmark']} "
                f"with seed {run.result['seed']}, but differ in their results; leave one of them out"
            )
    return [kept[seed] for seed in sorted(kept)]


def _measured(results: Sequence[Mapping[str, Any]], name: str) -> Measured:
    return Measured(*mean_and_sem([result[name] for result in results]))


def _place(row: Row) -> tuple[Any, ...]:
    """Sort the lower bound first, then what the paper lacks, its methods in its order, ours, and the upper bound."""
    settings = [
        (name, (0, value, "") if isinstance(value, int | float) else (1, 0, str(value)))
        for name, value in sorted(row.settings.items())
    ]
    return (_rank(row.method), row.method, settings)


def _rank(method: str) -> int:
    if method in BOUNDS:
        return -2 if BOUNDS[method] == "lower" else 1000
    if method.startswith("hr-literal"):
        return 100 + _PAPER_ORDER.index(paper_name(method)) if paper_name(method) in _PAPER_ORDER else 199
    if method == "hr" or method.startswith("hr-"):
        return 200 + _PAPER_ORDER.index(method) if method in _PAPER_ORDER else 299
    return _PAPER_ORDER.index(method) if method in _PAPER_ORDER else -1


def _settings_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_setting(value)}" for name, value in sorted(settings.items()))


def _setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kilobytes(row: Row) -> str:
    return f"{row.memory_bytes / 1000:,.1f}" if row.memory_bytes else "0"


def _minutes(row: Row) -> str:
    minutes = row.seconds / 60
    return f"{minutes:.1f}" if minutes < 100 else f"{minutes:,.0f}"


def _claimed(row: Row) -> str:
    return f"{row.paper.final:.2f} ± {row.paper.sem:.2f}" if row.paper else ""


def _claimed_final(row: Row) -> str:
    return f"{row.paper.final:.2f}" if row.paper else ""


def _number(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}"  # the sum turns -0.0 into 0.0


def _percent(value: float | None) -> str:
    return "" if value is None else _number(value)


@dataclass(frozen=True)
class _Column:
    header: str
    cell: Callable[[Row], str]
    dropped: int = 0  # in which order narrow terminals leave it out; 0 is never


_COLUMNS = (
    _Column("method", lambda row: row.label),
    _Column("seeds", lambda row: str(len(row.seeds)), dropped=4),
    _Column("final", lambda row: str(row.final)),
    _Column("average", lambda row: str(row.average)),
    _Column("forgetting", lambda row: _number(row.forgetting.mean), dropped=6),
    _Column("BWT", lambda row: _number(row.bwt.mean), dropped=1),
    _Column("KB", _kilobytes, dropped=3),
    _Column("min", _minutes, dropped=2),
    _Column("paper", _claimed, dropped=5),
)


def _columns(section: Section) -> list[_Column]:
    return [column for column in _COLUMNS if column.header != "paper" or any(row.paper for row in section.rows)]


def _notes(section: Section, columns: Sequence[_Column]) -> str:
    shown = {column.header for column in columns}
    notes = ["Accuracies in percent"]
    if any(len(row.seeds) > 1 for row in section.rows):
        notes.append("± is the standard error over seeds")
    if "KB" in shown:
        notes.append("KB is the largest memory of a client")
    notes += dict.fromkeys(f"{m} is the {BOUNDS[m]} bound" for m in (row.method for row in section.rows) if m in BOUNDS)
    if "paper" in shown:
        notes.append("paper is the final accuracy it claims under its own protocol")
    return "; ".join(notes) + "."


def _rich_section(section: Section, width: int) -> Group:
    columns = [replace(c, cell=_claimed_final) if c.header == "paper" else c for c in _columns(section)]
    label = 24  # longer labels are folded
    left_out = []
    for column in sorted((c for c in columns if c.dropped), key=lambda c: c.dropped):
        widths = [max(len(c.header), *(len(c.cell(row)) for row in section.rows)) for c in columns]
        if min(widths[0], label) + sum(widths[1:]) + 2 * (len(widths) - 1) <= width:
            break
        columns.remove(column)
        left_out.append(column.header)
    table = Table(
        title=Text(section.title, style="bold"), title_justify="left",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False,
    )  # fmt: skip
    for column in columns:
        if column.header == "method":
            table.add_column(column.header, max_width=label, overflow="fold")
        else:
            table.add_column(column.header, justify="right", no_wrap=True)
    for row in section.rows:
        style = "dim" if row.method in BOUNDS else "bold" if row is section.best else ""
        table.add_row(*(Text(column.cell(row)) for column in columns), style=style)
    notes = _notes(section, columns) + (f" Too narrow for: {', '.join(left_out)}." if left_out else "")
    return Group(table, Text(notes, style="dim"), Text())


def _markdown_section(section: Section) -> str:
    columns = _columns(section)

    def cell(column: _Column, row: Row) -> str:
        text = _markdown(column.cell(row))
        if column.header == "method" and row.method in BOUNDS:
            return f"*{text}*"
        return f"**{text}**" if column.header == "final" and row is section.best else text

    lines = [
        [column.header for column in columns],
        ["---" if column.header == "method" else "---:" for column in columns],
        *([cell(column, row) for column in columns] for row in section.rows),
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### {_markdown(section.title)}\n\n{table}\n\n{_notes(section, columns)}\n"


def _markdown(text: str) -> str:
    return "".join(f"\\{c}" if c in "\\`*_|[]<>" else c for c in text)


def _latex_section(section: Section) -> str:
    columns = _columns(section)

    def cell(column: _Column, row: Row) -> str:
        text = _latex(column.cell(row))
        if column.header == "method":
            return rf"\textit{{{text}}}" if row.method in BOUNDS else text
        text = f"$-${text[1:]}" if text.startswith("-") else text
        return rf"\textbf{{{text}}}" if column.header == "final" and row is section.best else text

    rows = []
    for i, row in enumerate(section.rows):
        if i and (row.method in BOUNDS) != (section.rows[i - 1].method in BOUNDS):
            rows.append(r"\midrule")
        rows.append(" & ".join(cell(column, row) for column in columns) + r" \\")
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(section.title)}. {_latex(_notes(section, columns))}}}",
            rf"\begin{{tabular}}{{@{{}}l{'r' * (len(columns) - 1)}@{{}}}}",
            r"\toprule",
            " & ".join(column.header for column in columns) + r" \\",
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "<": r"\textless{}", ">": r"\textgreater{}", **{c: f"\\{c}" for c in "&%$#_{}"},
}  # fmt: skip


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in text)
