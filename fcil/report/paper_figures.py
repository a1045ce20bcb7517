"""Figure 3 of the paper, beside ours: final accuracy by memory, and accuracy after each task; its values are dotted."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from fcil.report.comparison import Measured, settings_text
from fcil.report.drawing import COLOURS, GREY, SYMBOLS, Cell, Chart, chart, errors, names, task_axis, with_error
from fcil.report.evidence import Evidence, Group, over_seeds
from fcil.report.paper import paper_name
from fcil.report.paper_curves import BY_MEMORY, BY_TASK, MEMORIES, MEMORYLESS, SWEPT
from fcil.report.paper_runs import row_of
from fcil.results.runs import Run
from fcil.scenario.benchmarks import BENCHMARKS

OURS = (*SWEPT, "hr-literal")  # the last stands beside the paper's hr, too
OLIVE = "#999933"
LOOKS = {
    **dict(zip(("hr", *(m for m in SWEPT if m != "hr")), zip((*COLOURS, OLIVE), SYMBOLS, strict=True), strict=True)),
    "hr-literal": ("#8F6BD1", "circle-open"),  # beside the paper's hr, too, but no second line in its blue
}
DASHED = {"finetune": "longdashdot", "joint": "longdash", "hr-literal": "dash"}  # dots are the paper's
CLAIMS = "Dotted: what the paper's Figure 3 claims, in the colour of the method, under its own protocol."


def over_tasks(evidence: Evidence) -> Chart | str:
    """Accuracy after each task of the methods in the paper's figure, with its curves behind."""
    claimed = BY_TASK.get(evidence.section.benchmark, {})
    groups = [g for g in evidence.groups if g.row.method in (*OURS, "finetune", "joint") and _taken(evidence, g)]
    if not claimed or not any(g.row.method in OURS for g in groups):
        return (
            "The paper's forgetting trends are left out: it has them for "
            f"{', '.join(BY_TASK)}, and it takes a run of {', '.join(OURS)} there."
        )
    figure = go.Figure()
    for method, values in claimed.items():
        if any(paper_name(group.row.method) == method for group in groups):
            figure.add_trace(_claim(method, range(1, len(values) + 1), values, "after task %{x}"))
    for group in groups:
        found = over_seeds([trial.overall for trial in group.trials])
        points = [(t + 1, value) for t, value in enumerate(found) if value]
        figure.add_trace(_measured(group.row.method, points, "after task %{x}"))
    figure.add_trace(_dotted())
    figure.update_xaxes(task_axis(evidence))
    figure.update_yaxes(title="accuracy on all classes so far (%)", range=[0, 100])
    figure.update_layout(height=480)
    rows: list[tuple[Cell, ...]] = [
        (*names(group), trial.seed, t + 1, value, _at(claimed, group, t))
        for group in groups
        for trial in group.trials
        for t, value in enumerate(trial.overall)
    ]
    return chart(
        "paper-over-tasks", "Accuracy after each task, beside the paper's forgetting trends",
        f"What the paper calls forgetting is the fall of this accuracy. {CLAIMS} Whiskers are our standard errors.",
        figure, ("method", "settings", "seed", "after_task", "accuracy", "paper_accuracy"), rows,
    )  # fmt: skip


def by_memory(evidence: Evidence) -> Chart | str:
    """Final accuracy over memory, from one raw image a class to 128, with the paper's values behind."""
    sweeps: dict[str, list[tuple[float, Group]]] = {}
    for group in evidence.groups:
        memory = {name: str(value) for name, value in group.row.settings.items() if name == "memory"}
        if group.row.method in OURS and _taken(evidence, group, memory):
            sweeps.setdefault(group.row.method, []).append((memory_of(group.trials[0].run), group))
    if not any(len(points) > 1 for points in sweeps.values()):
        return (
            f"The memory sweep is left out: it takes one of {', '.join(OURS)} with several memories; "
            "run: fcil sweep --paper memory"
        )
    claimed = BY_MEMORY.get(evidence.section.benchmark, {})
    figure = go.Figure()
    for method, values in claimed.items():
        if any(paper_name(ours) == method for ours in sweeps):
            figure.add_trace(_claim(method, MEMORIES, values, "%{x} a class"))
    at = {(method, float(m)): v for method, values in claimed.items() for m, v in zip(MEMORIES, values, strict=True)}
    rows: list[tuple[Cell, ...]] = []
    for method, points in sweeps.items():
        points.sort(key=lambda point: point[0])
        measured = [(memory, group.row.final) for memory, group in points]
        if method in MEMORYLESS:  # what keeps nothing is as good with any memory
            measured = [(memory, measured[0][1]) for memory in (MEMORIES[0], MEMORIES[-1])]
        figure.add_trace(_measured(method, measured, "%{x} a class"))
        rows += [
            (method, settings_text(group.row.settings), len(group.row.seeds), memory, group.row.final.mean,
             group.row.final.sem, at.get((paper_name(method), memory)))
            for memory, group in points
        ]  # fmt: skip
    if claimed:
        figure.add_trace(_dotted())
    figure.update_xaxes(title="memory (raw images a class, in all)", type="log", tickvals=MEMORIES, range=[-0.1, 2.2])
    figure.update_yaxes(title="final accuracy (%)", range=[0, 100])
    figure.update_layout(height=480)
    return chart(
        "paper-by-memory", "Final accuracy by memory" + (", beside the paper's" if claimed else ""),
        "The room of so many raw images for each class, over the whole federation, used for images or for codes. "
        + (CLAIMS if claimed else "The paper has no such curve for this benchmark."),
        figure, ("method", "settings", "seeds", "memory", "final", "final_sem", "paper_final"), rows,
    )  # fmt: skip


def _taken(evidence: Evidence, group: Group, settings: Mapping[str, str] | None = None) -> bool:
    """Say whether these are a method's runs that the paper's tables take."""
    rows = (one.row for one in evidence.groups)
    return row_of(rows, evidence.section.benchmark, group.row.method, settings) is group.row


def memory_of(run: Run) -> float:
    """Return a run's memory in raw images a class: what was set, or the benchmark's own."""
    known = BENCHMARKS.get(run.result["benchmark"])
    try:
        return float(run.settings.get("memory", known.memory if known else 0))
    except (TypeError, ValueError):
        return 0.0


def _at(claimed: Mapping[str, Sequence[float]], group: Group, task: int) -> float | None:
    values = claimed.get(paper_name(group.row.method), ())
    return values[task] if task < len(values) else None


def _dotted() -> go.Scatter:
    """Return an entry of the legend: what dotted lines are."""
    dots = {"color": GREY, "dash": "dot", "width": 1.5}
    return go.Scatter(x=[None], y=[None], mode="lines", name="dotted: the paper", line=dots, hoverinfo="skip")


def _claim(method: str, places: Sequence[int], values: Sequence[float], where: str) -> go.Scatter:
    return go.Scatter(
        x=list(places), y=list(values), mode="lines", name=f"{method}, in the paper", showlegend=False, opacity=0.75,
        line={"color": LOOKS[method][0], "dash": "dot", "width": 1.5},
        hovertemplate=f"<b>{method}</b>, in the paper<br>{where}: %{{y}} %<extra></extra>",
    )  # fmt: skip


def _measured(method: str, points: Sequence[tuple[float, Measured]], where: str) -> go.Scatter:
    colour, symbol = LOOKS.get(method, (GREY, "triangle-up" if method == "joint" else "triangle-down"))
    return go.Scatter(
        x=[place for place, _ in points], y=[value.mean for _, value in points],
        error_y=errors([value for _, value in points]), mode="lines+markers", name=method,
        line={"color": colour, "width": 2, "dash": DASHED.get(method, "solid")},
        marker={"symbol": symbol, "size": 8}, customdata=[[with_error(value)] for _, value in points],
        hovertemplate=f"<b>{method}</b><br>{where}: %{{customdata[0]}} %<extra></extra>",
    )  # fmt: skip
