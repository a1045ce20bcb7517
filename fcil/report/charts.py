"""The charts of the report page: pure functions from what runs say to plotly figures, each with its data as a table.

A function returns a chart, or the sentence that says why there is none.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fcil.report.comparison import BOUNDS, Measured, settings_text, shown_name
from fcil.report.drawing import (
    COLOURS,
    GREY,
    PATTERNS,
    SCALE,
    SYMBOLS,
    Chart,
    byte_axis,
    chart,
    choice,
    endless,
    errors,
    in_bytes,
    line,
    looks_of,
    mark,
    methods_down,
    names,
    task_axis,
    with_error,
)
from fcil.report.evidence import TERMS, Evidence, Group, Map, Trial, map_of, over_seeds

BIN = 0.05  # of the histogram of distances
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


def accuracy_after_each_task(evidence: Evidence) -> Chart:
    """Accuracy on all classes so far, after each task."""
    return _over_tasks(
        evidence, "accuracy-over-tasks", "Accuracy after each task",
        "Accuracy on all classes seen so far. It falls as classes are added, even for a method that forgets nothing.",
        "accuracy on all classes so far (%)", "accuracy", lambda trial: trial.overall, "%",
    )  # fmt: skip


def matrices(evidence: Evidence) -> Chart:
    """Accuracy on each task after each task."""
    tables = []
    for group in evidence.groups:
        size = max(len(trial.matrix) for trial in group.trials)
        means = [over_seeds([t.matrix[i] for t in group.trials if i < len(t.matrix)]) for i in range(size)]
        tables.append((group, [[value.mean if value else None for value in row] for row in means]))
    return _triangles(
        tables, "matrix", "Accuracy on each task, after each task",
        "Read a column downwards: what becomes of a task while later ones are learned. Means over seeds.",
        "accuracy", "%", "accuracy on task", "after task", (0, 100), ".0f",
    )  # fmt: skip


def forgetting(evidence: Evidence) -> Chart | str:
    """How far earlier tasks have fallen from their best."""
    if all(len(trial.matrix) < 2 for group in evidence.groups for trial in group.trials):
        return "Forgetting is left out: it takes two tasks."
    return _over_tasks(
        evidence, "forgetting", "Forgetting after each task",
        "How far the earlier tasks have fallen from their best accuracy, on average. Lower is better.",
        "forgetting (percentage points)", "forgetting", lambda trial: trial.fallen, "points",
    )  # fmt: skip


def accuracy_against_memory(evidence: Evidence) -> Chart:
    """Final accuracy against what a client keeps."""
    lines: dict[tuple[str, str], list[Group]] = {}
    for group in evidence.groups:  # of a sweep over memory, all points are one line
        others = {key: value for key, value in group.row.settings.items() if key != "memory"}
        lines.setdefault((group.row.method, settings_text(others)), []).append(group)
    nothing = any(not group.row.memory_bytes for group in evidence.groups)
    something = any(group.row.memory_bytes for group in evidence.groups)
    both = nothing and something
    figure = (
        make_subplots(1, 2, shared_yaxes=True, column_widths=[0.18, 0.82], horizontal_spacing=0.03)
        if both
        else make_subplots(1, 1)
    )
    looks = looks_of(evidence)
    for (method, _), groups in lines.items():
        name = groups[0].label if len(groups) == 1 else f"{shown_name(method)}, by memory"
        colour, dash, symbol = looks[groups[0].label]
        for keeps in (False, True):
            chosen = sorted(
                (group for group in groups if bool(group.row.memory_bytes) is keeps), key=lambda g: g.row.memory_bytes
            )
            if chosen:
                figure.add_scatter(
                    x=[group.row.memory_bytes if keeps else "0 B" for group in chosen],
                    y=[group.row.final.mean for group in chosen], error_y=errors([g.row.final for g in chosen]),
                    mode="lines+markers" if len(chosen) > 1 else "markers", name=name, legendgroup=name,
                    showlegend=keeps or not any(group.row.memory_bytes for group in groups),
                    marker=mark(symbol, colour), line={"color": colour, "dash": dash},
                    customdata=[[g.label, f"{g.row.final} %", f"{g.row.memory_bytes:,.0f} bytes"] for g in chosen],
                    hovertemplate="<b>%{customdata[0]}</b><br>final: %{customdata[1]}<br>keeps %{customdata[2]}"
                    "<extra></extra>",
                    row=1, col=2 if both and keeps else 1,
                )  # fmt: skip
    if something:
        kept = [group.row.memory_bytes for group in evidence.groups if group.row.memory_bytes]
        figure.update_xaxes(byte_axis(kept) | {"title": "kept by a client, at most"}, col=2 if both else 1)
    if nothing:
        figure.update_xaxes(type="category", col=1)
    figure.update_yaxes(title="final accuracy (%)", range=[-2, 102], col=1)
    figure.update_layout(height=420, hovermode="closest", showlegend=len(lines) > 1)
    return chart(
        "memory", "Accuracy against memory",
        "Final accuracy against the most that any client has kept. A bound is no rival: joint keeps every image.",
        figure,
        ("method", "settings", "seeds", "memory_bytes", "final", "final_sem"),
        [
            (g.row.method, settings_text(g.row.settings), len(g.row.seeds), g.row.memory_bytes, g.row.final.mean,
             g.row.final.sem)
            for g in evidence.groups
        ],
    )  # fmt: skip


def local_and_global(evidence: Evidence) -> Chart | str:
    """Local against global forgetting, after each task."""
    groups = _with_apart(evidence)
    if not groups:
        return _NOT_APART.format("Local against global forgetting")
    figure = make_subplots(
        2, 1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=["local: within a client", "global: between two"]
    )
    looks = looks_of(evidence)
    for group in groups:
        for row, kind in enumerate(("local", "global"), 1):
            values = over_seeds([[a.parts[kind] if a else None for a in trial.apart] for trial in group.trials])
            figure.add_trace(line(group.label, values, looks, kind, "nats", row == 1, 4), row=row, col=1)
    figure.update_xaxes(task_axis(evidence, ""), row=1)
    figure.update_xaxes(task_axis(evidence), row=2)
    figure.update_yaxes(title="loss (nats)", matches="y", rangemode="tozero")
    figure.update_layout(height=560, showlegend=len(groups) > 1)
    return chart(
        "local-and-global", "Local against global forgetting",
        "Confusion of pairs with an old class, split into what lies within a client and what lies between two, as "
        "shares of the loss on all pairs. A pair that cannot be told apart loses 0.69 nats. With many clients nearly "
        "all pairs lie between two: the CSV also has each term's own mean. See docs/forgetting.md.",
        figure,
        ("method", "settings", "seed", "after_task", "local", "global", *TERMS, "total",
         *(f"mean_{term}" for term in TERMS)),
        [
            (*names(group), trial.seed, t + 1, apart.parts["local"], apart.parts["global"],
             *(apart.parts[term] for term in TERMS), apart.parts["total"], *(apart.means[term] for term in TERMS))
            for group in groups
            for trial in group.trials
            for t, apart in enumerate(trial.apart)
            if apart
        ],
    )  # fmt: skip


def mended_later(evidence: Evidence) -> Chart | str:
    """Whether the next task mends what a task left confused between clients."""

    def pairs(trial: Trial) -> list[tuple[float | None, float | None]]:
        return [
            (now.across if now else None, later.across_before if later else None)
            for now, later in zip(trial.apart, trial.apart[1:], strict=False)
        ]

    groups = [g for g in evidence.groups if any(None not in pair for trial in g.trials for pair in pairs(trial))]
    if not groups:
        return (
            "Whether the next task mends confusion between clients is left out: it takes three tasks, and a ledger "
            "with that number, which runs of an earlier fcil lack."
        )
    figure = go.Figure()
    for i, group in enumerate(groups):
        for side, name, colour, pattern in (
            (0, "when its task ended", COLOURS[0], ""),
            (1, "one task later", COLOURS[4], "/"),
        ):
            values = over_seeds([[pair[side] for pair in pairs(trial)] for trial in group.trials])
            known = [(t, value) for t, value in enumerate(values) if value]
            figure.add_bar(
                x=[t + 1 for t, _ in known], y=[value.mean for _, value in known], name=name, visible=i == 0,
                error_y=errors([value for _, value in known]),
                marker={"color": colour, "pattern": {"shape": pattern}},
                customdata=[[with_error(value, 4)] for _, value in known],
                hovertemplate=f"task %{{x}}, {name}: %{{customdata[0]}} nats<extra>{group.label}</extra>",
            )  # fmt: skip
    choice(figure, [group.label for group in groups], 2)
    figure.update_xaxes(task_axis(evidence, "pairs that came with task"))
    figure.update_yaxes(title="loss between clients (nats)", rangemode="tozero")
    figure.update_layout(height=400, barmode="group")
    return chart(
        "mended-later", "Is confusion between clients mended one task later?",
        "Mean loss on pairs of an old and a new class held by two clients: when the task that brought them ended, and "
        "after the next one. The paper says that the next task mends it.",
        figure,
        ("method", "settings", "seed", "task", "at_its_end", "one_task_later"),
        [
            (*names(group), trial.seed, t + 1, *pair)
            for group in groups
            for trial in group.trials
            for t, pair in enumerate(pairs(trial))
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
        "Where the time of a run goes, as means over seeds. Compare methods only where they ran on the same machine, "
        "and alone on it.",
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


def confusion(evidence: Evidence) -> Chart | str:
    """Which tasks are confused with which, after the last one."""
    tables = []
    for group in _with_apart(evidence):
        last = [trial.apart[-1].between for trial in group.trials if trial.apart[-1]]
        size = max(map(len, last), default=0)
        means = [over_seeds([table[i] for table in last if i < len(table)]) for i in range(size)]
        tables.append((group, [[value.mean if value else None for value in row] for row in means]))
    if not tables:
        return _NOT_APART.format("Confusion between tasks")
    return _triangles(
        tables, "confusion", "Confusion between tasks, after the last one",
        "Mean loss on pairs of classes of two tasks, or of one with itself: 0 where they are told apart, 0.69 nats "
        "where they cannot be. Means over seeds.",
        "loss", "nats", "classes of task", "and of task", (0, 0.7), ".2f",
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


def centroids(evidence: Evidence) -> Chart | str:
    """Where the centroids of classes lie, and how far apart."""
    found: list[tuple[Group, Trial, Map]] = []
    for group in evidence.groups:
        mapped = ((trial, map_of(trial)) for trial in group.trials)
        first = next(((trial, plane) for trial, plane in mapped if plane), None)
        if first:
            found.append((group, *first))
    if not found:
        return (
            "The map of centroids is left out: no run here has a model.safetensors of a method that places centroids, "
            "such as hr; runs are often stored without it."
        )
    figure = make_subplots(2, 1, row_heights=[0.68, 0.32], vertical_spacing=0.16)
    for i, (_, _, plane) in enumerate(found):
        figure.add_trace(_scattered(plane, i == 0), row=1, col=1)
        figure.add_trace(_distances(plane, i == 0), row=2, col=1)
    choice(figure, [f"{group.label}, seed {trial.seed}" for group, trial, _ in found], 2)
    farthest = max(1.0, *(float(plane.distances.max()) for _, _, plane in found))
    figure.add_vline(x=1, line={"color": GREY, "dash": "dash"}, row=2, col=1)
    figure.update_xaxes(title="first axis (rest distances)", row=1, constrain="domain")
    figure.update_yaxes(title="second axis (rest distances)", row=1, scaleanchor="x", scaleratio=1)
    figure.update_xaxes(title="distance of a pair (rest distances)", row=2, range=[0, farthest + 2 * BIN])
    figure.update_yaxes(title="pairs of classes", row=2)
    figure.update_layout(height=680, showlegend=False, bargap=0.05)
    off = ", ".join(f"{plane.off:.2f} ({group.label})" for group, _, plane in found)
    return chart(
        "centroids", "Map of the centroids",
        "The classes' centroids, laid into a plane so that their distances are kept as well as a plane can. The unit "
        "is the distance at which the Lennard-Jones potential lets two of them rest (dashed). The histogram has the "
        f"true distances, in all dimensions; the map is off by this much for a pair, in root mean square: {off}. "
        "Colour is the task.",
        figure,
        ("method", "settings", "seed", "class", "task", "x", "y", "nearest", "nearest_distance"),
        [
            (*names(group), trial.seed, name, None if task is None else task + 1, *point, *near)
            for group, trial, p in found
            for name, task, point, near in zip(p.names, p.tasks, p.flat.tolist(), _nearest(p), strict=True)
        ],
    )  # fmt: skip


CHARTS: tuple[Callable[[Evidence], Chart | str], ...] = (
    accuracy, accuracy_after_each_task, matrices, forgetting, accuracy_against_memory, local_and_global, mended_later,
    confusion, accuracy_by_client, traffic, time_by_part, centroids,
)  # fmt: skip

_NOT_APART = "{} is left out: no ledger here has its decomposition, which runs of an earlier fcil lack; repeat them."


def _with_apart(evidence: Evidence) -> list[Group]:
    return [group for group in evidence.groups if any(trial.apart[-1] for trial in group.trials)]


def _over_tasks(
    evidence: Evidence, name: str, title: str, says: str, axis: str, what: str,
    values: Callable[[Trial], Sequence[float]], unit: str,
) -> Chart:  # fmt: skip
    looks = looks_of(evidence)
    figure = go.Figure(
        [line(g.label, over_seeds([values(t) for t in g.trials]), looks, what, unit) for g in evidence.groups]
    )
    figure.update_xaxes(task_axis(evidence))
    figure.update_yaxes(title=axis, rangemode="tozero")
    figure.update_layout(height=460, showlegend=len(evidence.groups) > 1)
    return chart(
        name, title, f"{says} Means over seeds; whiskers are the standard error.", figure,
        ("method", "settings", "seed", "after_task", what),
        [
            (*names(group), trial.seed, t + 1, value)
            for group in evidence.groups
            for trial in group.trials
            for t, value in enumerate(values(trial))
        ],
    )  # fmt: skip


def _triangles(
    tables: Sequence[tuple[Group, list[list[float | None]]]], name: str, title: str, says: str, what: str, unit: str,
    across: str, down: str, span: tuple[float, float], digits: str,
) -> Chart:  # fmt: skip
    """Draw one lower triangle of tasks by tasks at a time, to be chosen by method."""
    figure = go.Figure()
    size = max(len(table) for _, table in tables)
    for i, (group, table) in enumerate(tables):
        wide = [[row[j] if j < len(row) else None for j in range(len(table))] for row in table]
        figure.add_heatmap(
            z=wide, x=list(range(1, len(table) + 1)), y=list(range(1, len(table) + 1)), visible=i == 0, zmin=span[0],
            zmax=span[1], colorscale=SCALE, xgap=1, ygap=1, hoverongaps=False, name=group.label,
            texttemplate=f"%{{z:{digits}}}" if size <= 12 else None,
            colorbar={"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
            hovertemplate=f"{down} %{{y}}, {across} %{{x}}: %{{z:.4g}} {unit}<extra>{group.label}</extra>",
        )  # fmt: skip
    choice(figure, [group.label for group, _ in tables], 1)
    step = 1 if size <= 12 else None
    figure.update_xaxes(title=across, dtick=step, showgrid=False, constrain="domain")
    figure.update_yaxes(title=down, dtick=step, showgrid=False, autorange="reversed", zeroline=False)
    figure.update_layout(height=440)
    return chart(
        name, title, says, figure,
        ("method", "settings", down.replace(" ", "_"), across.replace(" ", "_"), what),
        [
            (*names(group), t + 1, j + 1, value)
            for group, table in tables
            for t, row in enumerate(table)
            for j, value in enumerate(row)
        ],
    )  # fmt: skip


def _scattered(plane: Map, visible: bool) -> go.Scatter:
    colours = [GREY if task is None else COLOURS[task % len(COLOURS)] for task in plane.tasks]
    symbols = [SYMBOLS[(task or 0) // len(COLOURS) % len(SYMBOLS)] for task in plane.tasks]
    return go.Scatter(
        x=plane.flat[:, 0].tolist(), y=plane.flat[:, 1].tolist(), visible=visible,
        mode="markers+text" if len(plane.names) <= 30 else "markers", text=plane.names, textposition="top center",
        marker={"color": colours, "symbol": symbols, "size": 10},
        customdata=[
            ["?" if task is None else task + 1, *near] for task, near in zip(plane.tasks, _nearest(plane), strict=True)
        ],
        hovertemplate="<b>%{text}</b>, task %{customdata[0]}<br>nearest: %{customdata[1]}, at %{customdata[2]:.2f} "
        "rest distances<extra></extra>",
    )  # fmt: skip


def _distances(plane: Map, visible: bool) -> go.Histogram:
    size = len(plane.names)
    pairs = [float(plane.distances[i, j]) for i in range(size) for j in range(i)]
    return go.Histogram(
        x=pairs, visible=visible, marker={"color": COLOURS[0]},
        xbins={"start": -BIN / 2, "end": max(pairs) + BIN, "size": BIN},
        hovertemplate="%{y} pairs at %{x} rest distances<extra></extra>",
    )  # fmt: skip


def _nearest(plane: Map) -> list[tuple[str, float]]:
    apart = plane.distances.clone().fill_diagonal_(float("inf"))
    return [(plane.names[j], d) for d, j in zip(apart.amin(1).tolist(), apart.argmin(1).tolist(), strict=True)]
