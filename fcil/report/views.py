"""One chart, looked at in several ways: many methods as a table, as lines by family, or one at a time."""

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from fcil.methods import family
from fcil.report.comparison import BOUNDS, Measured
from fcil.report.drawing import SCALE, Cell, View, errors, mark, methods_down, with_error
from fcil.report.evidence import Group

FEW = 8  # methods that one figure can show as lines
MOST_NUMBERS = 12  # columns of a table whose fields have room for a number

KINDS = {
    "reference": "references", "exemplars": "with exemplars", "data-free": "data-free", "hybrid": "hybrid",
    "own": "methods of your own",
}  # fmt: skip
OURS = ("hr-literal", "hr")


def kind_of(method: str) -> str:
    """Return the family that a method is compared in; Hybrid Replay is one with its ablations."""
    for name in OURS:
        if method == name or method.startswith(f"{name}-"):
            return f"{name} and its ablations"
    return KINDS.get(family(method), "bounds")


def selections(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """Return what can be read as lines: all methods if they are few, or else the best of each family, and each family.

    The bounds are in all of them.
    """
    if len(groups) <= FEW:
        return [("as lines", list(groups))]
    kinds: dict[str, list[Group]] = {}
    for group in groups:
        if group.row.method not in BOUNDS:
            kinds.setdefault(kind_of(group.row.method), []).append(group)
    best = [_first(alike) for alike in kinds.values()]

    def among(chosen: Sequence[Group]) -> list[Group]:
        return [group for group in groups if group.row.method in BOUNDS or group in chosen]

    return [
        ("the best of each family", among(best)),
        *((kind, among(alike)) for kind, alike in kinds.items() if len(alike) > 1),
        ("all; touch a name to hide it, twice to see it alone", list(groups)),
    ]


def lined(
    groups: Sequence[Group], lines: Callable[[Sequence[Group]], go.Figure], table: go.Figure | None = None,
    name: str = "all methods",
) -> list[View]:  # fmt: skip
    """Return views of lines, and a table of all methods: first where they are many, and last where they are few."""
    drawn = [View(name, lines(chosen)) for name, chosen in selections(groups)]
    whole = [View(name, table)] if table is not None and len(groups) > 1 else []
    return whole + drawn if len(groups) > FEW else drawn + whole


def one_by_one(groups: Sequence[Group], draw: Callable[[Group], go.Figure], whole: go.Figure | None) -> list[View]:
    """Return a view of all methods, where there are several, and one of each."""
    compared = [View("all methods", whole)] if whole is not None and len(groups) > 1 else []
    return [*compared, *(View(group.label, draw(group)) for group in groups)]


def of_all(groups: Sequence[Group], sentence: str) -> str:
    """Return what is to be said of the view of all methods, where there is one."""
    return f" {sentence}" if len(groups) > 1 else ""


def table(
    groups: Sequence[Group], fields: Sequence[Sequence[Cell]], across: str, what: str, unit: str,
    span: tuple[float, float], digits: str,
) -> go.Figure:  # fmt: skip
    """Draw a table: a line a method, a column a task, each field coloured, and with its number where there is room."""
    width = max(map(len, fields))
    wide = [[row[j] if j < len(row) else None for j in range(width)] for row in fields]
    labels = [group.label for group in groups]
    numbers = width <= MOST_NUMBERS
    figure = go.Figure()
    figure.add_heatmap(
        z=wide, x=list(range(1, width + 1)), y=list(range(len(labels))), zmin=span[0], zmax=span[1], colorscale=SCALE,
        xgap=1, ygap=2, hoverongaps=False, texttemplate=f"%{{z:{digits}}}" if numbers else None, showscale=not numbers,
        colorbar={"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
        customdata=[[label] * width for label in labels],
        hovertemplate=f"<b>%{{customdata}}</b><br>{what} %{{x}}: %{{z:.4g}} {unit}<extra></extra>",
    )  # fmt: skip
    methods_down(figure, labels)
    title = f"{across}<br>numbers in {unit}" if numbers else across  # else the scale of colours has the unit
    figure.update_xaxes(title=title, dtick=1 if numbers else None, tickformat="d", showgrid=False)
    figure.update_yaxes(showgrid=False)
    return figure


def dots(
    groups: Sequence[Group], kinds: Sequence[tuple[str, str, str, Sequence[Measured | None]]], axis: str, unit: str,
    digits: int,
) -> go.Figure:  # fmt: skip
    """Draw a line a method with a mark of each kind: name, symbol, colour, and the value of every method."""
    figure = go.Figure()
    for name, symbol, colour, values in kinds:
        known = [(i, value) for i, value in enumerate(values) if value]
        figure.add_scatter(
            x=[value.mean for _, value in known], y=[i for i, _ in known], mode="markers", name=name,
            error_x=errors([value for _, value in known]), marker=mark(symbol, colour),
            customdata=[[groups[i].label, with_error(value, digits)] for i, value in known],
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>{name}: %{{customdata[1]}} {unit}<extra></extra>",
        )  # fmt: skip
    methods_down(figure, [group.label for group in groups])
    figure.update_xaxes(title=axis, rangemode="tozero")
    return figure


def _first(alike: Sequence[Group]) -> Group:
    """Return Hybrid Replay itself, or the method that ends highest."""
    whole = [group for group in alike if group.row.method in OURS and not group.row.settings]
    return whole[0] if whole else max(alike, key=lambda group: group.row.final.mean)
