"""Tables: a comparison drawn for the terminal, for Markdown, for LaTeX and as CSV.

There is a section for each benchmark and protocol, and in it a row for each method and its settings.
"""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fcil.report.comparison import BOUNDS, Comparison, Row, Section, number, settings_text

WIDE = 160  # columns of a terminal that folds no label


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
                [section.benchmark, section.protocol, row.method, settings_text(row.settings), len(row.seeds)]
                + [value for m in measured for value in (m.mean, m.sem)]
                + [row.memory_bytes, row.seconds, *(row.paper or (None, None))]
            )
    return text.getvalue()


def _kilobytes(row: Row) -> str:
    return f"{row.memory_bytes / 1000:,.1f}" if row.memory_bytes else "0"


def _minutes(row: Row) -> str:
    minutes = row.seconds / 60
    return f"{minutes:.1f}" if minutes < 100 else f"{minutes:,.0f}"


def _claimed(row: Row) -> str:
    return f"{row.paper.final:.2f} ± {row.paper.sem:.2f}" if row.paper else ""


def _claimed_final(row: Row) -> str:
    return f"{row.paper.final:.2f}" if row.paper else ""


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
    _Column("forgetting", lambda row: number(row.forgetting.mean), dropped=6),
    _Column("BWT", lambda row: number(row.bwt.mean), dropped=1),
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
    label = 24 if width < WIDE else WIDE // 2  # longer labels are folded
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
        text = markdown_text(column.cell(row))
        if column.header == "method" and row.method in BOUNDS:
            return f"*{text}*"
        return f"**{text}**" if column.header == "final" and row is section.best else text

    lines = [
        [column.header for column in columns],
        ["---" if column.header == "method" else "---:" for column in columns],
        *([cell(column, row) for column in columns] for row in section.rows),
    ]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### {markdown_text(section.title)}\n\n{table}\n\n{_notes(section, columns)}\n"


def markdown_text(text: str) -> str:
    """Return text with what Markdown would read as its own escaped."""
    return "".join(f"\\{c}" if c in "\\`*_|[]<>" else c for c in text)


def _latex_section(section: Section) -> str:
    columns = _columns(section)

    def cell(column: _Column, row: Row) -> str:
        text = latex_text(column.cell(row))
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
            rf"\caption{{{latex_text(section.title)}. {latex_text(_notes(section, columns))}}}",
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


def latex_text(text: str) -> str:
    """Return text with what LaTeX would read as its own escaped."""
    return "".join(_LATEX.get(c, c) for c in text)
