"""One run: the table a newcomer sees at its end."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fcil.report.comparison import number, shown_name
from fcil.results.metrics import forgotten

NAMED = 5  # clients named whose replies were refused


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


def spread(result: Mapping[str, Any]) -> str:
    """Say how far classes and clients lie apart at the end of a run."""
    named = zip(result.get("per_class", []), result.get("classes", []), strict=False)
    by_class = [(accuracy, name) for accuracy, name in named if accuracy is not None]
    by_client = sorted(accuracy for accuracy in result.get("per_client", []) if accuracy is not None)
    parts = []
    if by_class:
        (low, worst), (high, best) = min(by_class), max(by_class)
        parts.append(f"classes from {low:.1f} ({worst}) to {high:.1f} ({best})")
    if by_client:
        parts.append(f"clients from {by_client[0]:.1f} to {by_client[-1]:.1f}, each on the classes it has held")
    return "; ".join(parts)


def replay(result: Mapping[str, Any]) -> str:
    """Say whether what was replayed still stands for the images it was made from, where a method measured it."""
    real, decoded = result.get("old"), result.get("measured", {}).get("old_exemplars")
    if real is None or decoded is None:
        return ""
    return f"accuracy on old classes: {decoded:.1f} % on the exemplars replayed, {real:.1f} % on real test images"


def trust(result: Mapping[str, Any]) -> str:
    """Say whose replies were refused, where any were."""
    refused: Mapping[str, int] = result.get("refused", {})
    if not refused:
        return ""
    most = ", ".join(f"{number} of client {client}" for client, number in list(refused.items())[:NAMED])
    more = f" and {len(refused) - NAMED} other clients" if len(refused) > NAMED else ""
    return f"refused {sum(refused.values())} replies: {most}{more}; why is in ledger.jsonl"


def privacy(result: Mapping[str, Any]) -> str:
    """Say what the privacy of a run cost, where it was asked for."""
    told: Mapping[str, Any] = result.get("privacy", {})
    if not told:
        return ""
    if not told["releases"]:
        return (
            f"dp={told['dp']} protected nothing: this method's clients send no sums or counts of classes, and all "
            "else that they send is not covered (docs/trust.md)"
        )
    whom = "anyone who sees a reply" if told["dp"] == "local" else "anyone but the server"
    return (
        f"differential privacy against {whom}: epsilon {told['epsilon']:.2f} at delta {told['delta']:g} for one "
        f"client's {', '.join(told['releases'])}; networks are not covered (docs/trust.md)"
    )


def _percent(value: float | None) -> str:
    return "" if value is None else number(value)
