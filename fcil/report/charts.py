"""The charts of the report page: pure functions from what runs say to plotly figures, each with its data as a table.

A function returns a chart, or the sentence that says why there is none.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fcil.report.apart import confusion, local_and_global, mended_later
from fcil.report.capacity import capacity
from fcil.report.centroid_map import centroids
from fcil.report.comparison import BOUNDS, Measured, settings_text, shown_name
from fcil.report.courses import accuracy_after_each_task, forgetting, matrices, training_loss
from fcil.report.drawing import (
    COLOURS,
    GREY,
    PATTERNS,
    SYMBOLS,
    Chart,
    View,
    byte_axis,
    chart,
    endless,
    errors,
    in_bytes,
    looks_of,
    mark,
    methods_down,
    names,
)
from fcil.report.evidence import Evidence, Group, Trial
from fcil.report.paper_figures import by_memory, over_tasks
from fcil.report.told import what_audits_tell
from fcil.report.views import FEW, kind_of, selections

MOST_POINTS = 120  # of a box; beyond, only its outliers are drawn


def accuracy(evidence: Evidence) -> Chart:
    """Final and average accuracy of every method, between the two bounds."""
    rows, labels = [group.row for group in evidence.groups], [group.label for group in evidence.groups]
    figure = go.Figure()
    for name, field, symbol, colour in (
        ("final", "final", "circle", COLOURS[0]),
        ("average over tasks", "average", "circle-open", COLOURS[1]),
    ):
        values: list[Measured] = [getattr(row, field) for row in rows]
        figure.add_scatter(
            x=[value.mean for value in values], y=list(range(len(rows))), mode="markers", name=name,
            error_x=errors(values), marker=mark(symbol, colour),
            customdata=[[label, f"{value} %"] for label, value in zip(labels, values, strict=True)],
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>{name}: %{{customdata[1]}}<extra></extra>",
        )  # fmt: skip
    claimed = [(i, labels[i], row.paper) for i, row in enumerate(rows) if row.paper]
    if claimed:
        figure.add_scatter(
            x=[claim.final for _, _, claim in claimed], y=[i for i, _, _ in claimed], mode="markers",
            name="final, as the paper has it", marker=mark("diamond-open", GREY),
            customdata=[[label, f"{claim.final} ± {claim.sem} %"] for _, label, claim in claimed],
            hovertemplate="<b>%{customdata[0]}</b><br>the paper's claim: %{customdata[1]}<extra></extra>",
        )  # fmt: skip
    for row, label in zip(rows, labels, strict=True):
        if row.method in BOUNDS and label == row.method:
            figure.add_vline(
                x=row.final.mean, line={"color": GREY, "dash": "dot" if BOUNDS[row.method] == "lower" else "dash"},
                name=f"{BOUNDS[row.method]} bound: {row.method}", showlegend=True,
            )  # fmt: skip
    methods_down(figure, labels)
    figure.update_xaxes(title="test accuracy (%)", range=[-2, 102])
    return chart(
        "accuracy", "Final and average accuracy",
        "Accuracy on all classes after the last task, and its mean over all tasks. Whiskers are the standard error "
        "over seeds; a single seed has none.",
        figure,
        ("method", "settings", "seeds", "final", "final_sem", "average", "average_sem", "paper_final", "paper_sem"),
        [
            (row.method, settings_text(row.settings), len(row.seeds), row.final.mean, row.final.sem,
             row.average.mean, row.average.sem, *(row.paper or (None, None)))
            for row in rows
        ],
    )  # fmt: skip


def accuracy_against_memory(evidence: Evidence) -> Chart:
    """Final accuracy against what a client keeps."""
    groups = evidence.groups
    if len(groups) <= FEW:
        views = [View("", _memory(groups, _own_look(groups)))]
    else:
        kinds = list(dict.fromkeys(kind_of(group.row.method) for group in groups))
        family = {
            kind: (kind, GREY if kind == "bounds" else COLOURS[i % len(COLOURS)], "solid", SYMBOLS[i % len(SYMBOLS)])
            for i, kind in enumerate(sorted(kinds, key=lambda kind: kind == "bounds"))
        }
        views = [View("all methods, coloured by family", _memory(groups, lambda g, _: family[kind_of(g.row.method)]))]
        views += [View(name, _memory(chosen, _own_look(chosen))) for name, chosen in selections(groups)[:-1]]
    return chart(
        "memory", "Accuracy against memory",
        "Final accuracy against the most that any client has kept. A bound is no rival: joint keeps every image.",
        views,
        ("method", "settings", "seeds", "memory_bytes", "final", "final_sem"),
        [
            (g.row.method, settings_text(g.row.settings), len(g.row.seeds), g.row.memory_bytes, g.row.final.mean,
             g.row.final.sem)
            for g in evidence.groups
        ],
    )  # fmt: skip


def traffic(evidence: Evidence) -> Chart:
    """Bytes sent down and up in a whole run, and kept."""

    def sums(trial: Trial) -> tuple[int, int, int, int]:
        costs = trial.costs
        return (
            sum(cost.down for cost in costs), sum(cost.up for cost in costs), max(cost.kept for cost in costs),
            max(cost.kept_max for cost in costs),
        )  # fmt: skip

    kinds = (
        ("sent down to clients", "triangle-down", COLOURS[0]), ("sent up to the server", "triangle-up", COLOURS[1]),
        ("kept by all clients", "square", COLOURS[2]), ("kept by one client, at most", "diamond-open", COLOURS[3]),
    )  # fmt: skip
    figure = go.Figure()
    for k, (name, symbol, colour) in enumerate(kinds):
        means = [(i, g.label, fmean(sums(t)[k] for t in g.trials)) for i, g in enumerate(evidence.groups)]
        shown = [(i, label, value) for i, label, value in means if value]
        figure.add_scatter(
            x=[value for _, _, value in shown], y=[i for i, _, _ in shown], mode="markers", name=name,
            marker=mark(symbol, colour),
            customdata=[[label, in_bytes(value)] for _, label, value in shown],
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>{name}: %{{customdata[1]}}<extra></extra>",
        )  # fmt: skip
    methods_down(figure, [group.label for group in evidence.groups])
    figure.update_xaxes(byte_axis([x for trace in figure.data for x in trace.x]) | {"title": "bytes, in all"})
    return chart(
        "bytes", "Bytes down, up and kept",
        "All bytes of a run, counted as they pass between server and clients, and the most that was kept after a task. "
        "Means over seeds; where a mark is missing, it is zero. The CSV has every task.",
        figure,
        ("method", "settings", "seed", "task", "down", "up", "kept", "kept_max"),
        [
            (*names(group), trial.seed, t + 1, cost.down, cost.up, cost.kept, cost.kept_max)
            for group in evidence.groups
            for trial in group.trials
            for t, cost in enumerate(trial.costs)
        ],
    )  # fmt: skip


def time_by_part(evidence: Evidence) -> Chart:
    """Seconds of a whole run by part."""

    def sums(trial: Trial) -> dict[str, float]:
        return {part: sum(c.seconds.get(part, 0.0) for c in trial.costs) for c in trial.costs for part in c.seconds}

    spent = {group.label: [sums(trial) for trial in group.trials] for group in evidence.groups}
    means = {
        label: {part: fmean(one.get(part, 0.0) for one in every) for part in sorted({p for one in every for p in one})}
        for label, every in spent.items()
    }
    total = {part: sum(mean.get(part, 0.0) for mean in means.values()) for mean in means.values() for part in mean}
    figure = go.Figure()
    labels = list(means)
    for part, (pattern, colour) in zip(sorted(total, key=lambda p: -total[p]), endless(PATTERNS, COLOURS)):  # noqa: B905
        figure.add_bar(
            x=[means[label].get(part, 0.0) for label in labels], y=list(range(len(labels))), name=part, orientation="h",
            marker={"color": colour, "pattern": {"shape": pattern}}, customdata=[[label] for label in labels],
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>{part}: %{{x:.3s}} s<extra></extra>",
        )  # fmt: skip
    methods_down(figure, labels)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="time of a run (seconds)", rangemode="tozero")
    return chart(
        "time", "Time by part",
        "Where the time of a run goes, as means over seeds: server, evaluate, save and look (pictures of what is "
        "replayed) are the simulation's, all else is asked of clients, by the names that a method has for it. Compare "
        "methods only where they ran on the same machine, and alone on it.",
        figure,
        ("method", "settings", "seed", "task", "part", "seconds"),
        [
            (*names(group), trial.seed, t + 1, part, seconds)
            for group in evidence.groups
            for trial in group.trials
            for t, cost in enumerate(trial.costs)
            for part, seconds in cost.seconds.items()
        ],
    )  # fmt: skip


def accuracy_by_client(evidence: Evidence) -> Chart:
    """How far clients lie apart after the last task."""
    figure = go.Figure()
    for i, group in enumerate(evidence.groups):
        points = [
            (value, f"client {client}, seed {trial.seed}")
            for trial in group.trials
            for client, value in enumerate(trial.by_client)
            if value is not None
        ]
        figure.add_box(
            x=[value for value, _ in points], y=[i] * len(points), orientation="h", name=group.label,
            text=[text for _, text in points], boxpoints="all" if len(points) <= MOST_POINTS else "outliers",
            pointpos=0, jitter=0.5, width=0.6, showlegend=False, line={"width": 1.5},
            marker={"color": COLOURS[0] if group.row.method not in BOUNDS else GREY, "size": 4, "opacity": 0.7},
            hovertemplate="%{text}: %{x:.1f} %<extra></extra>" if len(points) <= MOST_POINTS else None,
            hoverinfo=None if len(points) <= MOST_POINTS else "x",
        )  # fmt: skip
    methods_down(figure, [group.label for group in evidence.groups])
    figure.update_xaxes(title="accuracy of a client (%)", range=[-2, 102], hoverformat=".1f")
    return chart(
        "clients", "Accuracy by client",
        "Each client's accuracy after the last task on the classes it has held, weighted by how many images of each it "
        "had. Boxes span the middle half of all clients and seeds.",
        figure,
        ("method", "settings", "seed", "client", "accuracy"),
        [
            (*names(group), trial.seed, client, value)
            for group in evidence.groups
            for trial in group.trials
            for client, value in enumerate(trial.by_client)
        ],
    )  # fmt: skip


Look = Callable[[Group, str], tuple[str, str, str, str]]


def _own_look(groups: Sequence[Group]) -> Look:
    looks = looks_of(groups)
    return lambda group, name: (name, *looks[group.label])


def _memory(groups: Sequence[Group], look: Look) -> go.Figure:
    """Draw accuracy against memory; `look` gives a method's name in the legend, its colour, dash and symbol."""
    lines: dict[tuple[str, str], list[Group]] = {}
    for group in groups:  # of a sweep over memory, all points are one line
        others = {key: value for key, value in group.row.settings.items() if key != "memory"}
        lines.setdefault((group.row.method, settings_text(others)), []).append(group)
    kept = [group.row.memory_bytes for group in groups if group.row.memory_bytes]
    nothing = len(kept) < len(groups)
    both = nothing and bool(kept)
    figure = (
        make_subplots(1, 2, shared_yaxes=True, column_widths=[0.18, 0.82], horizontal_spacing=0.03)
        if both
        else make_subplots(1, 1)
    )
    named: set[str] = set()
    for (method, _), alike in lines.items():
        own = alike[0].label if len(alike) == 1 else f"{shown_name(method)}, by memory"
        name, colour, dash, symbol = look(alike[0], own)
        for keeps in (True, False):
            chosen = sorted(
                (group for group in alike if bool(group.row.memory_bytes) is keeps), key=lambda g: g.row.memory_bytes
            )
            if chosen:
                figure.add_scatter(
                    x=[group.row.memory_bytes if keeps else "0 B" for group in chosen],
                    y=[group.row.final.mean for group in chosen], error_y=errors([g.row.final for g in chosen]),
                    mode="lines+markers" if len(chosen) > 1 else "markers", name=name, legendgroup=name,
                    showlegend=name not in named, marker=mark(symbol, colour), line={"color": colour, "dash": dash},
                    customdata=[[g.label, f"{g.row.final} %", f"{g.row.memory_bytes:,.0f} bytes"] for g in chosen],
                    hovertemplate="<b>%{customdata[0]}</b><br>final: %{customdata[1]}<br>keeps %{customdata[2]}"
                    "<extra></extra>",
                    row=1, col=2 if both and keeps else 1,
                )  # fmt: skip
                named.add(name)
    if kept:
        figure.update_xaxes(byte_axis(kept) | {"title": "kept by a client, at most"}, col=2 if both else 1)
    if nothing:
        figure.update_xaxes(type="category", col=1)
    figure.update_yaxes(title="final accuracy (%)", range=[-2, 102], col=1)
    return figure.update_layout(height=420, hovermode="closest", showlegend=len(lines) > 1)


CHARTS: tuple[Callable[[Evidence], Chart | str], ...] = (
    accuracy, accuracy_after_each_task, matrices, forgetting, accuracy_against_memory, local_and_global, mended_later,
    confusion, accuracy_by_client, traffic, time_by_part, training_loss, centroids,
)  # fmt: skip
PAPER: tuple[Callable[[Evidence], Chart | str], ...] = (  # where runs allow them
    over_tasks, by_memory, what_audits_tell, capacity,
)  # fmt: skip
