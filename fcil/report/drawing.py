"""How charts look and what they are drawn with: colours, axes, lines, views of one chart, and their data."""

import csv
import io
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, floor, log10
from typing import Any

import plotly.graph_objects as go

from fcil.report.comparison import BOUNDS, Measured, settings_text
from fcil.report.evidence import Evidence, Group

# Okabe and Ito's colours for every kind of sight, less the yellow and the black that a light or dark page swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")  # not as many as colours
GREY = "#8A8A8A"
SCALE = "Cividis"
PATTERNS = ("", "/", "x", ".")
ROW = 30  # pixels for a method in a chart with one line a method

Cell = str | int | float | None


@dataclass(frozen=True)
class View:
    """One of the figures that a chart can be looked at as."""

    name: str
    figure: go.Figure


@dataclass(frozen=True)
class Chart:
    """What it shows, how to read it, its views, the first of which is shown first, and its data."""

    name: str
    title: str
    says: str
    views: tuple[View, ...]
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]

    @property
    def figure(self) -> go.Figure:
        """Return the first view's figure."""
        return self.views[0].figure

    @property
    def csv(self) -> str:
        """Return the data as comma-separated values, unrounded."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return text.getvalue()


def chart(
    name: str, title: str, says: str, shown: go.Figure | Sequence[View], columns: tuple[str, ...],
    rows: list[tuple[Cell, ...]],
) -> Chart:  # fmt: skip
    """Make a chart of one figure or of views; its figures get the title, too."""
    views = (View("", shown),) if isinstance(shown, go.Figure) else tuple(shown)
    for view in views:
        named = f"{title}{' ' if title.endswith('?') else ': '}{view.name}" if len(views) > 1 else title
        view.figure.update_layout(title=named, template=LIGHT)
    return Chart(name, title, says, views, columns, rows)


def template(ink: str, lines: str) -> go.layout.Template:
    """Return how every chart looks, written in `ink`."""
    axis = {"gridcolor": lines, "zerolinecolor": lines, "linecolor": lines, "automargin": True, "title_standoff": 8}
    return go.layout.Template(
        layout={
            "font": {"color": ink, "size": 13, "family": "system-ui, sans-serif"}, "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)", "xaxis": axis, "yaxis": axis, "colorway": COLOURS,
            "margin": {"l": 56, "r": 16, "t": 28, "b": 48}, "hoverlabel": {"align": "left", "namelength": -1},
            "legend": {"bgcolor": "rgba(0,0,0,0)", "traceorder": "normal"},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": ink},
        }
    )  # fmt: skip


LIGHT, DARK = template("#222222", "#DDDDDD"), template("#E4E4E4", "#444444")


def names(group: Group) -> tuple[str, str]:
    """Return the method and its settings, as a table has them."""
    return group.row.method, settings_text(group.row.settings)


def endless(*choices: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Go through all combinations, again and again."""
    while True:
        yield from product(*choices)


def looks_of(groups: Sequence[Group]) -> dict[str, tuple[str, str, str]]:
    """Return colour, dash and symbol of every method in a figure; the bounds are grey."""
    rivals = [group.label for group in groups if group.row.method not in BOUNDS]
    looks = {
        label: (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)], SYMBOLS[i % len(SYMBOLS)])
        for i, label in enumerate(rivals)
    }
    for group in groups:
        if group.row.method in BOUNDS:
            lower = BOUNDS[group.row.method] == "lower"
            looks[group.label] = (GREY, "dot" if lower else "dash", "triangle-down" if lower else "triangle-up")
    return looks


def with_error(value: Measured, digits: int = 1) -> str:
    """Say a mean and its standard error."""
    return f"{value.mean:.{digits}f}" + (" (1 seed)" if value.sem is None else f" ± {value.sem:.{digits}f}")


def mark(symbol: str, colour: str) -> dict[str, Any]:
    """Return a mark that is filled, or a ring."""
    return {"symbol": symbol, "color": colour, "size": 10, "line": {"width": 2 if symbol.endswith("-open") else 0}}


def errors(values: Sequence[Measured]) -> dict[str, Any]:
    """Return whiskers as long as the standard errors; one seed has none."""
    return {"type": "data", "array": [value.sem for value in values], "thickness": 1.2, "width": 3}


def in_bytes(value: float) -> str:
    """Say bytes in the unit that suits them."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if value >= unit:
            return f"{value / unit:,.1f} {name}"
    return f"{value:,.0f} B"


def byte_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return an axis of powers of ten, with what lies between them marked where there are few."""
    low, high = log10(min(values, default=1.0)), log10(max(values, default=10.0))
    between = (1, 2, 5) if high - low < 1.5 else (1,)
    apart = max(1, ceil((high - low) / 4))
    ticks = [step * 10.0**power for power in range(floor(low) - 1, ceil(high) + 2, apart) for step in between]
    text = [in_bytes(tick).replace(".0 ", " ") for tick in ticks]
    room = max(0.35 - (high - low) / 4, 0.06 * (high - low))
    return {"type": "log", "tickvals": ticks, "ticktext": text, "range": [low - room, high + room]}


def line(
    label: str, values: Sequence[Measured | None], looks: dict[str, tuple[str, str, str]], what: str, unit: str,
    in_legend: bool = True, digits: int = 1,
) -> go.Scatter:  # fmt: skip
    """Return a method's line over tasks."""
    colour, dash, symbol = looks[label]
    known = [(t + 1, value) for t, value in enumerate(values) if value]
    return go.Scatter(
        x=[t for t, _ in known], y=[value.mean for _, value in known], error_y=errors([value for _, value in known]),
        mode="lines+markers", name=label, legendgroup=label, showlegend=in_legend,
        line={"color": colour, "dash": dash, "width": 2}, marker={"symbol": symbol, "size": 7},
        customdata=[[with_error(value, digits)] for _, value in known],
        hovertemplate=f"<b>{label}</b><br>{what} after task %{{x}}: %{{customdata[0]}} {unit}<extra></extra>",
    )  # fmt: skip


def task_axis(evidence: Evidence, title: str = "after task") -> dict[str, Any]:
    """Return an axis of tasks, counted from 1."""
    tasks = max(len(trial.matrix) for group in evidence.groups for trial in group.trials)
    return {"title": title, "dtick": 1 if tasks <= 12 else None, "tickformat": "d"}


def methods_down(figure: go.Figure, labels: Sequence[str]) -> None:
    """Give each method a line, named at the left."""
    lines = textwrap.TextWrapper(22, max_lines=3, placeholder=" …", break_long_words=False, break_on_hyphens=False)
    ticks = ["<br>".join(lines.wrap(label)) for label in labels]
    figure.update_yaxes(
        tickvals=list(range(len(labels))), ticktext=ticks, range=[len(labels) - 0.4, -0.6], zeroline=False,
        ticklabelstandoff=6,
    )  # fmt: skip
    most = max((1 + tick.count("<br>") for tick in ticks), default=1)  # all rows are as high as the highest name
    figure.update_layout(height=round(130 + ROW * max(1, 0.62 * most) * len(ticks)), hovermode="closest")
