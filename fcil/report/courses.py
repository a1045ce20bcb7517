"""What happens task by task and round by round: accuracy, forgetting, the matrix of tasks, and the training loss."""

from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from fcil.report.comparison import Measured
from fcil.report.drawing import COLOURS, GREY, SCALE, Chart, View, chart, line, looks_of, names, task_axis
from fcil.report.evidence import Evidence, Group, Round, Trial, over_seeds
from fcil.report.views import MOST_NUMBERS, lined, of_all, one_by_one, table


def accuracy_after_each_task(evidence: Evidence) -> Chart:
    """Accuracy on all classes so far, after each task."""
    return _over_tasks(
        evidence, "accuracy-over-tasks", "Accuracy after each task",
        "Accuracy on all classes seen so far. It falls as classes are added, even for a method that forgets nothing.",
        "accuracy on all classes so far (%)", "accuracy", lambda trial: trial.overall, "%", 100, 105,
    )  # fmt: skip


def forgetting(evidence: Evidence) -> Chart | str:
    """How far earlier tasks have fallen from their best."""
    if all(len(trial.matrix) < 2 for group in evidence.groups for trial in group.trials):
        return "Forgetting is left out: it takes two tasks."
    return _over_tasks(
        evidence, "forgetting", "Forgetting after each task",
        "How far the earlier tasks have fallen from their best accuracy, on average. Lower is better.",
        "forgetting (percentage points)", "forgetting", lambda trial: trial.fallen, "points", 100, 5,
    )  # fmt: skip


def matrices(evidence: Evidence) -> Chart:
    """Accuracy on each task after each task."""
    tables = {}
    for group in evidence.groups:
        size = max(len(trial.matrix) for trial in group.trials)
        means = [over_seeds([t.matrix[i] for t in group.trials if i < len(t.matrix)]) for i in range(size)]
        tables[group.label] = [_means(row) for row in means]
    last = [tables[group.label][-1] for group in evidence.groups]
    whole = table(evidence.groups, last, "accuracy on task", "task", "%", (0, 100), ".0f")
    return triangles(
        evidence.groups, tables, whole, "matrix", "Accuracy on each task, after each task",
        "Read a column downwards: what becomes of a task while later ones are learned."
        + of_all(evidence.groups, "All methods: their last lines, one below the other.") + " Means over seeds.",
        "accuracy", "%", "accuracy on task", "after task", (0, 100), ".0f",
    )  # fmt: skip


def training_loss(evidence: Evidence) -> Chart | str:
    """The training loss of every round."""
    found = [
        (group, _longest(group), _means(over_seeds([[r.loss for r in trial.rounds] for trial in group.trials])))
        for group in evidence.groups
    ]
    known = [(group, rounds, losses) for group, rounds, losses in found if any(v is not None for v in losses)]
    if not known:
        return "The training loss is left out: no ledger here has it."
    return loss_chart([(group.label, names(group), rounds, losses) for group, rounds, losses in known])


def loss_chart(
    known: Sequence[tuple[str, tuple[str, str], Sequence[Round], Sequence[float | None]]],
) -> Chart:
    """Draw the training loss of methods, one at a time: label, name with settings, rounds, and the loss of each."""
    return chart(
        "training-loss", "Training loss, round by round",
        "The mean loss of the clients that trained in a round; dotted where a task begins. Every method has a loss of "
        "its own: look at its course, and do not compare its height with another's. Means over seeds.",
        [View(label, loss_figure(rounds, losses)) for label, _, rounds, losses in known],
        ("method", "settings", "round", "task", "stage", "loss"),
        [
            (*named, i, a_round.task + 1, a_round.stage, loss)
            for _, named, rounds, losses in known
            for i, (a_round, loss) in enumerate(zip(rounds, losses, strict=True), 1)
        ],
    )  # fmt: skip


def loss_figure(rounds: Sequence[Round], losses: Sequence[float | None]) -> go.Figure:
    """Draw the loss over all rounds of a run."""
    figure = go.Figure()
    figure.add_scatter(
        x=list(range(1, len(rounds) + 1)), y=list(losses), mode="lines+markers" if len(rounds) < 60 else "lines",
        line={"color": COLOURS[0], "width": 1.5}, marker={"size": 4}, name="loss", showlegend=False,
        customdata=[[r.task + 1, r.stage] for r in rounds],
        hovertemplate="round %{x}, task %{customdata[0]}, %{customdata[1]}: %{y:.4g}<extra></extra>",
    )  # fmt: skip
    for i, (before, after) in enumerate(zip(rounds, rounds[1:], strict=False), 1):
        if before.task != after.task:
            figure.add_vline(x=i + 0.5, line={"color": GREY, "dash": "dot", "width": 1})
    figure.update_xaxes(title="round, of all tasks", tickformat="d")
    figure.update_yaxes(title="training loss")
    return figure.update_layout(height=340)


def triangles(
    groups: Sequence[Group], tables: dict[str, list[list[float | None]]], whole: go.Figure, name: str, title: str,
    says: str, what: str, unit: str, across: str, down: str, span: tuple[float, float], digits: str,
) -> Chart:  # fmt: skip
    """Draw all methods in one table, and a lower triangle of tasks by tasks for each."""

    def draw(group: Group) -> go.Figure:
        rows = tables[group.label]
        size = len(rows)
        figure = go.Figure()
        figure.add_heatmap(
            z=[[row[j] if j < len(row) else None for j in range(size)] for row in rows],
            x=list(range(1, size + 1)), y=list(range(1, size + 1)), zmin=span[0], zmax=span[1], colorscale=SCALE,
            xgap=1, ygap=1, hoverongaps=False, name=group.label,
            texttemplate=f"%{{z:{digits}}}" if size <= MOST_NUMBERS else None,
            colorbar={"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
            hovertemplate=f"{down} %{{y}}, {across} %{{x}}: %{{z:.4g}} {unit}<extra>{group.label}</extra>",
        )  # fmt: skip
        step = 1 if size <= MOST_NUMBERS else None
        figure.update_xaxes(title=across, dtick=step, showgrid=False, constrain="domain")
        figure.update_yaxes(title=down, dtick=step, showgrid=False, autorange="reversed", zeroline=False)
        return figure.update_layout(height=440)

    return chart(
        name, title, says, one_by_one(groups, draw, whole),
        ("method", "settings", down.replace(" ", "_"), across.replace(" ", "_"), what),
        [
            (*names(group), t + 1, j + 1, value)
            for group in groups
            for t, row in enumerate(tables[group.label])
            for j, value in enumerate(row)
        ],
    )  # fmt: skip


def _over_tasks(
    evidence: Evidence, name: str, title: str, says: str, axis: str, what: str,
    values: Callable[[Trial], Sequence[float]], unit: str, most: float, least: float,
) -> Chart:  # fmt: skip
    """Draw lines over tasks on an axis that reaches to `least` or farther, and a table coloured from 0 to `most`."""
    courses = {group.label: over_seeds([values(trial) for trial in group.trials]) for group in evidence.groups}

    def lines(groups: Sequence[Group]) -> go.Figure:
        looks = looks_of(groups)
        figure = go.Figure([line(g.label, courses[g.label], looks, what, unit) for g in groups])
        figure.update_xaxes(task_axis(evidence))
        figure.update_yaxes(title=axis, autorangeoptions={"include": [0, least]})
        return figure.update_layout(height=460, showlegend=len(groups) > 1)

    fields = [_means(courses[group.label]) for group in evidence.groups]
    whole = table(evidence.groups, fields, "after task", f"{what} after task", unit, (0, most), ".0f")
    return chart(
        name, title, f"{says} Means over seeds; whiskers are the standard error.",
        lined(evidence.groups, lines, whole),
        ("method", "settings", "seed", "after_task", what),
        [
            (*names(group), trial.seed, t + 1, value)
            for group in evidence.groups
            for trial in group.trials
            for t, value in enumerate(values(trial))
        ],
    )  # fmt: skip


def _longest(group: Group) -> list[Round]:
    return max((trial.rounds for trial in group.trials), key=lambda rounds: len(rounds))


def _means(values: Sequence[Measured | None]) -> list[float | None]:
    return [value.mean if value else None for value in values]
