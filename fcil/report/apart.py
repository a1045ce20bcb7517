"""Forgetting taken apart, as charts: local against global, confusion between tasks, and whether it is mended later."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fcil.report.comparison import Measured
from fcil.report.courses import triangles
from fcil.report.drawing import (
    COLOURS,
    Chart,
    chart,
    errors,
    line,
    looks_of,
    names,
    task_axis,
    with_error,
)
from fcil.report.evidence import TERMS, Evidence, Group, Trial, over_seeds
from fcil.report.views import dots, lined, of_all, one_by_one, table
from fcil.results.metrics import mean_and_interval

SPAN = (0, 0.7)  # nats: from told apart to not at all
LEAST = {"include": [0, 0.05]}  # nats that an axis shows, so that little looks little


class Change(NamedTuple):
    """How much a loss changes, in nats: a mean over seeds, and where 95 % of such intervals hold it."""

    mean: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Say what the interval allows."""
        return "mended" if self.high < 0 else "grown" if self.low > 0 else "neither"


_NOT_APART = "{} is left out: no ledger here has its decomposition, which runs of an earlier fcil lack; repeat them."


def local_and_global(evidence: Evidence) -> Chart | str:
    """Local against global forgetting, after each task."""
    groups = _with_apart(evidence)
    if not groups:
        return _NOT_APART.format("Local against global forgetting")
    courses = {
        (group.label, kind): over_seeds([[a.parts[kind] if a else None for a in trial.apart] for trial in group.trials])
        for group in groups
        for kind in ("local", "global")
    }

    def lines(chosen: Sequence[Group]) -> go.Figure:
        figure = make_subplots(
            2, 1, shared_xaxes=True, vertical_spacing=0.12,
            subplot_titles=["local: within a client", "global: between two"],
        )  # fmt: skip
        looks = looks_of(chosen)
        for group in chosen:
            for row, kind in enumerate(("local", "global"), 1):
                values = courses[group.label, kind]
                figure.add_trace(line(group.label, values, looks, kind, "nats", row == 1, 4), row=row, col=1)
        figure.update_xaxes(task_axis(evidence, ""), row=1)
        figure.update_xaxes(task_axis(evidence), row=2)
        figure.update_yaxes(title="loss (nats)", matches="y", autorangeoptions=LEAST)
        return figure.update_layout(height=560, showlegend=len(chosen) > 1)

    marks = (("local: within a client", "circle", COLOURS[0]), ("global: between two", "circle-open", COLOURS[1]))
    last = [
        (name, symbol, colour, [courses[group.label, kind][-1] for group in groups])
        for kind, (name, symbol, colour) in zip(("local", "global"), marks, strict=True)
    ]
    whole = dots(groups, last, "loss (nats)", "nats", 4)
    return chart(
        "local-and-global", "Local against global forgetting",
        "Confusion of pairs with an old class, split into what lies within a client and what lies between two, as "
        "shares of the loss on all pairs. A pair that cannot be told apart loses 0.69 nats. With many clients nearly "
        "all pairs lie between two: the CSV also has each term's own mean. See docs/forgetting.md."
        + _lacking(evidence, groups),
        lined(groups, lines, whole, "all methods, after the last task"),
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
    groups = [g for g in evidence.groups if any(_over_tasks(trial) for trial in g.trials)]
    if not groups:
        return (
            "Whether the next task mends confusion between clients is left out: it takes three tasks, and a ledger "
            "with that number, which runs of an earlier fcil lack."
        )
    sides = (("when its task ended", "circle", COLOURS[0], ""), ("one task later", "diamond", COLOURS[4], "/"))

    def draw(group: Group) -> go.Figure:
        figure = go.Figure()
        for side, (name, _, colour, pattern) in enumerate(sides):
            values = over_seeds([[pair[side] for pair in _pairs(trial)] for trial in group.trials])
            known = [(t, value) for t, value in enumerate(values) if value]
            figure.add_bar(
                x=[t + 1 for t, _ in known], y=[value.mean for _, value in known], name=name,
                error_y=errors([value for _, value in known]), marker={"color": colour, "pattern": {"shape": pattern}},
                customdata=[[with_error(value, 4)] for _, value in known],
                hovertemplate=f"task %{{x}}, {name}: %{{customdata[0]}} nats<extra>{group.label}</extra>",
            )  # fmt: skip
        figure.update_xaxes(task_axis(evidence, "pairs that came with task"))
        figure.update_yaxes(title="loss between clients (nats)", autorangeoptions=LEAST)
        return figure.update_layout(height=400, barmode="group")

    means = [
        (name, symbol, colour, [_means(group)[side] for group in groups])
        for side, (name, symbol, colour, _) in enumerate(sides)
    ]
    whole = dots(groups, means, "mean loss (nats)", "nats", 4)
    return chart(
        "mended-later", "Is confusion between clients mended one task later?",
        "Mean loss on pairs of an old and a new class held by two clients: when the task that brought them ended, and "
        "after the next one. The paper says that the next task mends it."
        + of_all(groups, "All methods: the mean over tasks.") + _verdicts(groups) + _lacking(evidence, groups),
        one_by_one(groups, draw, whole),
        ("method", "settings", "seed", "task", "at_its_end", "one_task_later"),
        [
            (*names(group), trial.seed, t + 1, *pair)
            for group in groups
            for trial in group.trials
            for t, pair in enumerate(_pairs(trial))
        ],
    )  # fmt: skip


def change_later(group: Group) -> Change | None:
    """Return by how much a method's confusion between clients changes in the next task; it takes two seeds."""
    both = [means for trial in group.trials if (means := _over_tasks(trial))]
    return Change(*mean_and_interval([later - now for now, later in both])) if len(both) > 1 else None


def _pairs(trial: Trial) -> list[tuple[float | None, float | None]]:
    """Return the loss on a task's new pairs between clients at its end and one task later, task by task."""
    return [
        (now.across if now else None, later.across_before if later else None)
        for now, later in zip(trial.apart, trial.apart[1:], strict=False)
    ]


def _over_tasks(trial: Trial) -> tuple[float, float] | None:
    """Return the means of both over the tasks that have them."""
    known = [(now, later) for now, later in _pairs(trial) if now is not None and later is not None]
    return (fmean(now for now, _ in known), fmean(later for _, later in known)) if known else None


def _means(group: Group) -> list[Measured | None]:
    return over_seeds([both for trial in group.trials if (both := _over_tasks(trial))])


def _verdicts(groups: Sequence[Group]) -> str:
    """Name the methods whose confusion is mended, and those whose grows, by what their seeds allow to say."""
    found = {group.label: change.verdict for group in groups if (change := change_later(group))}
    if not found:
        return ""
    mended, grown = (
        ", ".join(label for label, said in found.items() if said == verdict) or "none"
        for verdict in ("mended", "grown")
    )
    return f" Seed by seed, with 95 % by Student's t, it is mended in: {mended}. It has grown in: {grown}."


def confusion(evidence: Evidence) -> Chart | str:
    """Which tasks are confused with which, after the last one."""
    groups, tables = _with_apart(evidence), {}
    for group in groups:
        last = [trial.apart[-1].between for trial in group.trials if trial.apart[-1]]
        size = max(map(len, last), default=0)
        means = [over_seeds([rows[i] for rows in last if i < len(rows)]) for i in range(size)]
        tables[group.label] = [[value.mean if value else None for value in row] for row in means]
    if not groups:
        return _NOT_APART.format("Confusion between tasks")
    against = [_with_others(tables[group.label]) for group in groups]
    whole = table(groups, against, "classes of task", "task", "nats", SPAN, ".2f")
    return triangles(
        groups, tables, whole, "confusion", "Confusion between tasks, after the last one",
        "Mean loss on pairs of classes of two tasks, or of one with itself: 0 where they are told apart, 0.69 nats "
        "where they cannot be." + of_all(groups, "All methods: each task against all others.") + " Means over seeds."
        + _lacking(evidence, groups),
        "loss", "nats", "classes of task", "and of task", SPAN, ".2f",
    )  # fmt: skip


def _with_apart(evidence: Evidence) -> list[Group]:
    return [group for group in evidence.groups if any(trial.apart[-1] for trial in group.trials)]


def _lacking(evidence: Evidence, groups: Sequence[Group]) -> str:
    """Name the methods that are not drawn, so that none is missed without a word."""
    missing = [group.label for group in evidence.groups if group not in groups]
    return f" Without it, for runs of an earlier fcil lack it: {', '.join(missing)}." if missing else ""


def _with_others(between: list[list[float | None]]) -> list[float | None]:
    """Return for each task its mean loss against the others, from a lower triangle."""
    pairs = [(i, j, value) for i, row in enumerate(between) for j, value in enumerate(row) if i != j]
    known = [[value for i, j, value in pairs if t in (i, j) and value is not None] for t in range(len(between))]
    return [fmean(values) if values else None for values in known]
