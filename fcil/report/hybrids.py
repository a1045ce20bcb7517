"""Table 1 of the Hybrid Replay paper: how the hybrid methods differ, theirs beside what the code here does.

The paper calls designs clean or complex by their figures. Here a method's lines are counted, whenever the table is
asked for: `code_lines` says which.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fcil.methods import METHODS, method
from fcil.report.code_lines import Lines, lines_of
from fcil.report.paper import PAPER_TABLE_1
from fcil.report.tables import latex_text, markdown_text

HYBRIDS = {  # where each classifies, and what gives its latent space a structure
    "hr": ("latent space: nearest centroid", "centroids placed by the server (Lennard-Jones)"),
    "hr-literal": ("latent space: nearest centroid", "centroids placed by the server (Lennard-Jones)"),
    "remind": ("after decoding: linear head", "none: maps of a network that is frozen"),
    "remind-plus": ("after decoding: linear head", "none: bottleneck of an autoencoder of maps"),
    "ictrl": ("latent space: {classifier}", "a subspace for each class (rate reduction)"),
}
COLUMNS = ("method", "classification", "quantisation", "learning", "latent space", "simplicity")


@dataclass(frozen=True)
class Hybrid:
    """A row of Table 1 as the code has it, and the paper's."""

    method: str
    classification: str
    quantisation: str
    learning: str
    latent_space: str
    lines: Lines
    paper: tuple[str, str, str, str, str]  # the same five columns, in the paper's words

    @property
    def cells(self) -> tuple[str, ...]:
        """Our row, in the order of `COLUMNS`."""
        simplicity = f"{self.lines.own} lines, and {self.lines.used} it uses"
        return self.method, self.classification, self.quantisation, self.learning, self.latent_space, simplicity


def hybrids() -> list[Hybrid]:
    """Return a row for each hybrid method that there is."""
    return [_row(name) for name in HYBRIDS if name in METHODS]


def _row(name: str) -> Hybrid:
    config = method(name).config()
    classification, latent = HYBRIDS[name]
    own = classification.format(classifier=getattr(config, "classifier", "").replace("_", " "))
    return Hybrid(
        name, own, _quantisation(config), _learning(config), latent, lines_of(METHODS[name].module),
        PAPER_TABLE_1["hr" if name.startswith("hr") else name],
    )  # fmt: skip


def _quantisation(config: Any) -> str:
    """Say how what is kept is quantised, by the knobs as they stand."""
    if hasattr(config, "centres"):
        return f"product quantisation: {config.centres} centres, a byte for {config.part} channels"
    if hasattr(config, "code_bits"):
        return f"codes of {config.code_bits} bits a number"
    return f"codes of a {config.codec} codec, quantised" if hasattr(config, "codec") else "none: floats"


def _learning(config: Any) -> str:
    """Say whether a task's images are there as long as it lasts, or seen once."""
    if not hasattr(config, "single_pass"):
        return "offline"
    return "online" if config.single_pass else "offline; online: single_pass=true"


# -- as a person sees it ----------------------------------------------------------------------------------------------

NOTES = (
    "What the code here does, and the paper's words. Lines are those that are neither blank nor comment nor docstring: "
    "of the method's file, and of what it uses of blocks and networks, itself or through others, the benchmark's "
    "network with it."
)


def hybrids_as_rich(rows: Sequence[Hybrid]) -> Group:
    """Draw the table for a terminal: a section for each method, where ours and the paper's words stand side by side."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for column in ("method", "here", "paper"):
        table.add_column(column)
    for row in rows:
        table.add_row(Text(row.method, style="bold"))
        for name, ours, theirs in zip(COLUMNS[1:], row.cells[1:], row.paper, strict=True):
            table.add_row(f"  {name}", Text(ours), Text(theirs, style="dim"), end_section=name == COLUMNS[-1])
    return Group(table, Text(NOTES, style="dim"))


def hybrids_as_markdown(rows: Sequence[Hybrid]) -> str:
    """Write the table as Markdown."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for row in rows:
        lines.append([markdown_text(cell) for cell in row.cells])
        lines.append([f"*{markdown_text(cell)}*" for cell in ("paper", *row.paper)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{NOTES}\n"


def hybrids_as_latex(rows: Sequence[Hybrid]) -> str:
    """Write the table as LaTeX that needs booktabs."""
    lines = []
    for row in rows:
        lines += [r"\midrule", " & ".join(latex_text(cell) for cell in row.cells) + r" \\"]
        lines.append(" & ".join(rf"\textit{{{latex_text(cell)}}}" for cell in ("paper", *row.paper)) + r" \\")
    widths = "".join(rf"p{{{share}\textwidth}}" for share in (0.18, 0.18, 0.13, 0.18, 0.13))
    return "\n".join(
        [
            r"\begin{table*}", r"\centering", r"\scriptsize", rf"\caption{{Hybrid methods. {latex_text(NOTES)}}}",
            rf"\begin{{tabular}}{{@{{}}l{widths}@{{}}}}", r"\toprule", " & ".join(COLUMNS) + r" \\", *lines,
            r"\bottomrule", r"\end{tabular}", r"\end{table*}", "",
        ]
    )  # fmt: skip


def hybrids_as_csv(rows: Sequence[Hybrid]) -> str:
    """Write the table as CSV: a line for each method, the paper's words in columns of their own."""
    text, names = io.StringIO(), [column.replace(" ", "_") for column in COLUMNS[1:]]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", *names[:-1], "lines", "used_lines", *(f"paper_{name}" for name in names)])
    for row in rows:
        writer.writerow([*row.cells[:-1], *row.lines, *row.paper])
    return text.getvalue()
