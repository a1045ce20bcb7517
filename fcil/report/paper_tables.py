"""The paper's tables as it prints them, with our numbers: Table 2, Table 3 and the memory sweep, two lines a method.

The first line is ours, mean and standard error over whatever seeds there are; the second is the paper's claim.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fcil.errors import UserError
from fcil.report.comparison import BOUNDS, Comparison, Row, Section
from fcil.report.paper import PAPER_FINAL, STAND_IN, Budgeted, claim, in_millions, paper_name, table_3
from fcil.report.paper_curves import BY_MEMORY, MEMORIES, MEMORYLESS
from fcil.report.paper_runs import TABLES, Wanted, row_of, runs_of
from fcil.report.tables import latex_text, markdown_text

MISSING = "-"
NOTES = (
    "Final accuracy in percent, ours and below it the paper's claim under its own protocol; ± is the standard error "
    f"over seeds, a single seed is marked; {MISSING} is not measured. finetune and joint are the bounds."
)
TIMES = (
    " Minutes are of the machines that runs were on; to HR: in multiples of hr's, where one code, device and engine "
    "made both."
)
TABLE_3 = ("kept", "exemplars", "decoder", "length", "minutes", "to HR", "final")
SHORT = {  # for terminals, which are narrow
    "cifar100-10x10": "CIFAR 10x10", "cifar100-20x5": "CIFAR 20x5", "imagenet-subset-10x20": "IN 10x20",
    "imagenet-subset-20x10": "IN 20x10", "tinyimagenet-10x5": "Tiny 10x5",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A method: our cells, and the paper's."""

    name: str
    ours: tuple[str, ...]
    paper: tuple[str, ...]


@dataclass(frozen=True)
class PaperTable:
    """One of the paper's tables under one protocol of ours."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: str = NOTES


def paper_tables(comparison: Comparison, table: str) -> list[PaperTable]:
    """Return a table of the paper, once for each protocol that runs were made under."""
    about = {wanted.benchmark for wanted in runs_of(table)}
    sections = [
        section
        for section in comparison.sections
        if section.benchmark in about or (table == "table3" and _stands_in(section))
    ]
    if not sections:
        raise UserError(f"no run here belongs to {table} of the paper; make them with: fcil sweep --paper {table}")
    by_protocol: dict[str, list[Section]] = {}
    for section in sections:
        by_protocol.setdefault(section.protocol, []).append(section)
    return [made for name, alike in by_protocol.items() for made in _DRAWN[table](name, alike)]


def as_rich(tables: Sequence[PaperTable]) -> Group:
    """Draw them for a terminal."""
    parts: list[Table | Text] = []
    for made in tables:
        drawn = Table(
            title=Text(made.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
            show_edge=False, pad_edge=False,
        )  # fmt: skip
        drawn.add_column("method", no_wrap=True)
        for column in made.columns:
            drawn.add_column(SHORT.get(column, column), justify="right", overflow="fold")
        for line in made.lines:
            drawn.add_row(line.name, *map(_narrow, line.ours))
            if any(line.paper):
                drawn.add_row("  paper", *map(_narrow, line.paper), style="dim")
        parts += [drawn, Text(f"{made.notes} (1): one seed.", style="dim"), Text()]
    return Group(*parts)


def _narrow(cell: str) -> str:
    return cell.replace(" ± ", "±").replace(" seed)", ")")


def as_markdown(tables: Sequence[PaperTable]) -> str:
    """Write them as Markdown."""
    texts = []
    for made in tables:
        lines = [["method", *made.columns], ["---", *["---:"] * len(made.columns)]]
        for line in made.lines:
            lines.append([markdown_text(cell) for cell in (line.name, *line.ours)])
            if any(line.paper):
                lines.append([f"*{markdown_text(cell)}*" if cell else "" for cell in ("paper", *line.paper)])
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        texts.append(f"### {markdown_text(made.title)}\n\n{body}\n\n{made.notes}\n")
    return "\n".join(texts)


def as_latex(tables: Sequence[PaperTable]) -> str:
    """Write them as LaTeX that needs booktabs."""
    texts = []
    for made in tables:
        lines = []
        for line in made.lines:
            lines.append(" & ".join(latex_text(cell) for cell in (line.name, *line.ours)) + r" \\")
            if any(line.paper):
                claimed = (rf"\textit{{{latex_text(cell)}}}" if cell else "" for cell in (r"paper", *line.paper))
                lines.append(" & ".join(claimed) + r" \\")
        head = " & ".join(latex_text(cell) for cell in ("method", *made.columns)) + r" \\"
        texts.append(
            "\n".join(
                [
                    r"\begin{table*}", r"\centering",
                    rf"\caption{{{latex_text(made.title)}. {latex_text(made.notes)}}}",
                    rf"\begin{{tabular}}{{@{{}}l{'r' * len(made.columns)}@{{}}}}", r"\toprule", head, r"\midrule",
                    *lines, r"\bottomrule", r"\end{tabular}", r"\end{table*}", "",
                ]
            )
        )  # fmt: skip
    return "\n".join(texts)


def as_csv(tables: Sequence[PaperTable]) -> str:
    """Write them as one CSV: a line for each field, ours and the paper's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["table", "method", "column", "ours", "paper"])
    for made in tables:
        for line in made.lines:
            for column, ours, paper in zip(made.columns, line.ours, line.paper, strict=True):
                writer.writerow([made.title, line.name, column, "" if ours == MISSING else ours, paper])
    return text.getvalue()


def _table_2(protocol: str, sections: Sequence[Section]) -> list[PaperTable]:
    columns = tuple(PAPER_FINAL)
    methods = sorted(dict.fromkeys(wanted.method for wanted in runs_of("table2")), key=_rank)
    lines = [
        Line(
            method,
            tuple(_final(_row(sections, benchmark, method)) for benchmark in columns),
            tuple(f"{c.final:.2f} ± {c.sem:.2f}" if (c := claim(benchmark, method)) else "" for benchmark in columns),
        )
        for method in methods
    ]
    return [PaperTable(f"Table 2 of the paper, {protocol} protocol", columns, tuple(lines))]


def _table_3(protocol: str, sections: Sequence[Section]) -> list[PaperTable]:
    tables = []
    for benchmark in (section.benchmark for section in sections):
        wanted = sorted(runs_of("table3", [benchmark], protocol), key=lambda one: _rank(one.method))
        rows = {one.method: _row(sections, benchmark, one.method, _size(one)) for one in wanted}
        claims, lines = table_3(benchmark), []
        for one in wanted:
            row, ours = rows[one.method], dict.fromkeys(TABLE_3, "")
            if row:
                length = f"{one.settings['rounds']} rounds" if "rounds" in one.settings else "all rounds"
                ours |= {"kept": f"{row.memory_bytes / 1000:,.1f} KB", "length": length}
                ours |= {"minutes": f"{row.seconds / 60:.2f}", "to HR": _times(row, rows["hr"])}
            ours["final"] = _final(row)
            said = dict.fromkeys(TABLE_3, "")
            if one.method not in BOUNDS:
                said = _said(claims[paper_name(one.method)], claims["hr"].minutes)
            lines.append((one.method, ours, said))
        title = f"Table 3 of the paper: {benchmark}, {protocol} protocol"
        columns: tuple[str, ...] = TABLE_3
        if benchmark in STAND_IN:  # of which the paper says nothing but times, and these of another benchmark
            title += f"; the paper's times are those of {STAND_IN[benchmark]}"
            columns = tuple(name for name in TABLE_3 if name not in ("exemplars", "decoder"))
            lines = [(method, ours, said | {"kept": "", "final": ""}) for method, ours, said in lines]
        cells = tuple(Line(m, *(tuple(one[c] for c in columns) for one in both)) for m, *both in lines)
        tables.append(PaperTable(title, columns, cells, NOTES + TIMES))
    return tables


def _said(said: Budgeted, hybrid: int) -> dict[str, str]:
    """Return a line of the paper's; `hybrid` is how many minutes its Hybrid Replay takes."""
    return {
        "kept": in_millions(said.memory), "exemplars": f"{said.exemplars} {said.kind}",
        "decoder": in_millions(said.decoder), "length": f"{said.epochs} epochs", "minutes": str(said.minutes),
        "to HR": f"{said.minutes / hybrid:.2f}", "final": f"{said.final:.2f} ± {said.sem:.2f}",
    }  # fmt: skip


def _stands_in(section: Section) -> bool:
    """Say whether Table 3 was asked of a benchmark that stands in for one of the paper's."""
    if section.benchmark not in STAND_IN:
        return False
    budgeted = (one for one in runs_of("table3", [section.benchmark], section.protocol) if _size(one))
    return any(_row([section], one.benchmark, one.method, _size(one)) for one in budgeted)


def _times(row: Row, hr: Row | None) -> str:
    """Return a method's time in multiples of hr's; nothing where they do not compare."""
    if not hr or len({*row.ran, *hr.ran}) > 1:
        return ""
    return f"{row.seconds / hr.seconds:.2f}"


def _memory(protocol: str, sections: Sequence[Section]) -> list[PaperTable]:
    tables = []
    for benchmark in (section.benchmark for section in sections):
        wanted = runs_of("memory", [benchmark])
        methods = sorted(dict.fromkeys(one.method for one in wanted), key=_rank)
        lines = []
        for method in methods:
            fixed = method in BOUNDS or method in MEMORYLESS
            cells = [{} if fixed else {"memory": str(n)} for n in MEMORIES]
            ours = tuple(_final(_row(sections, benchmark, method, one)) for one in cells)
            values = BY_MEMORY[benchmark].get(paper_name(method), ())
            paper = tuple(f"{value:.2f}" for value in values) if values else ("",) * len(MEMORIES)
            lines.append(Line(method, ours, paper))
        title = f"Memory sweep of the paper: {benchmark}, {protocol} protocol; raw images a class"
        tables.append(PaperTable(title, tuple(map(str, MEMORIES)), tuple(lines)))
    return tables


_DRAWN = dict(zip(TABLES, (_table_2, _table_3, _memory), strict=True))


def _row(
    sections: Sequence[Section], benchmark: str, method: str, settings: Mapping[str, str] | None = None
) -> Row | None:
    """Return our line of a method with the settings that a table takes, if it was run."""
    rows = (row for section in sections if section.benchmark == benchmark for row in section.rows)
    return row_of(rows, benchmark, method, settings)


def _size(wanted: Wanted) -> dict[str, str]:
    """Return what a table sets but for the learning rate."""
    return {name: value for name, value in wanted.settings.items() if name != "lr"}


def _final(row: Row | None) -> str:
    return str(row.final) if row else MISSING


def _rank(method: str) -> int:
    """Put the lower bound first and the upper bound last."""
    return {"lower": -1, "upper": 1}.get(BOUNDS.get(method, ""), 0)
