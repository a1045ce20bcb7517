"""Figures 1 and 2 of the paper, redrawn from runs: where forgetting happens, and how Hybrid Replay goes on.

The paper draws both as schemes. Here the first has measured losses in its fields, and the second a run's own images.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from PIL import Image
from plotly.subplots import make_subplots
from torch import Tensor

from fcil.errors import UserError
from fcil.records import read_tensors
from fcil.report.comparison import Measured
from fcil.report.drawing import COLOURS, GREY, SCALE, Chart, chart, in_bytes, names
from fcil.report.evidence import TERMS, Evidence, Group, Trial, over_seeds

SHOWN = ("finetune", "hr-literal", "hr", "joint")  # of many methods, those whose fields are drawn
PLACES = ("A, old", "A, new", "B, old", "B, new")  # the tasks of two clients
NUMERALS = {"prior": "i", "new": "ii", "intra": "iii", "inter": "iv"}
MOST = 4  # images in a row of the second figure
SIDE = 64  # pixels of an image in it, at least


_A, _B = (-0.47, 1.47), (1.53, 3.47)
_KEY = (
    f'<b><span style="color:{COLOURS[5]}">within a client</span></b>, local forgetting: (i) two old classes, (iii) an '
    f'old and a new one<br><b><span style="color:{COLOURS[1]}">between two clients</span></b>, global forgetting: '
    "(iv) with an old class; (ii) two new classes.<br>0.69 nats: not told apart"
)
_FRAMES = ((_A, _A, COLOURS[5]), (_B, _B, COLOURS[5]), (_A, _B, COLOURS[1]), (_B, _A, COLOURS[1]))


def where_forgetting_happens(evidence: Evidence) -> Chart | str:
    """The paper's Figure 1: confusion within a client is local forgetting, between two it is global."""
    known = [g for g in evidence.groups if any(trial.apart[-1] for trial in g.trials) and len(g.trials[0].matrix) > 1]
    chosen = [g for g in known if g.label in SHOWN] or known[:3]
    if not chosen:
        return "Figure 1 is left out: no ledger here has its decomposition, which runs of an earlier fcil lack."
    terms = {group.label: _terms(group) for group in chosen}
    figure = make_subplots(1, len(chosen), subplot_titles=[g.label for g in chosen], horizontal_spacing=0.04)
    for column, group in enumerate(chosen, 1):
        values = terms[group.label]
        fields = [[_term(row, place) for place in range(4)] for row in range(4)]
        figure.add_heatmap(
            z=[[value.mean if (value := values[term]) else None for term in row] for row in fields],
            x=PLACES, y=PLACES, zmin=0, zmax=0.7, colorscale=SCALE, xgap=2, ygap=2, showscale=column == len(chosen),
            text=[[_said(term, values[term]) for term in row] for row in fields], texttemplate="%{text}",
            colorbar={"title": {"text": "nats"}, "thickness": 12, "outlinewidth": 0},
            hovertemplate="%{y} and %{x}: %{text}<extra></extra>", row=1, col=column,
        )  # fmt: skip
        for rows, columns, colour in _FRAMES:
            frame = {"type": "rect", "line": {"color": colour, "width": 4}}
            figure.add_shape(x0=columns[0], x1=columns[1], y0=rows[0], y1=rows[1], **frame, row=1, col=column)
    figure.update_yaxes(autorange="reversed", showgrid=False, showticklabels=False)
    figure.update_yaxes(showticklabels=True, title="a class of client", col=1)
    figure.update_xaxes(showgrid=False, title="and a class of client", tickangle=0)
    figure.add_annotation(
        text=_KEY, xref="paper", yref="paper", x=0, y=0, yshift=-62, xanchor="left", yanchor="top", align="left",
        showarrow=False,
    )  # fmt: skip
    figure.update_layout(height=500, margin={"b": 118})
    return chart(
        "figure-1", "Where forgetting happens: loss on pairs of classes after the last task",
        "The paper's Figure 1 with measured numbers: the mean loss on pairs of classes after the last task, 0 where "
        "they are told apart, 0.69 where they cannot be. Blue: within a client; (i) old tasks and (iii) an old and a "
        "new one are local forgetting. Orange: between two clients; (iv) is global forgetting. (ii) is the new task.",
        figure, ("method", "settings", "seeds", *TERMS),
        [
            (*names(group), len(group.trials), *(m.mean if (m := terms[group.label][term]) else None for term in TERMS))
            for group in chosen
        ],
    )  # fmt: skip


def how_hybrid_replay_goes(evidence: Evidence) -> Chart | str:
    """The paper's Figure 2: a task updates the model with what memory gives back, and then the memory."""
    groups = sorted(evidence.groups, key=lambda g: (g.row.method != "hr", len(g.row.settings)))
    found = next((shown for g in groups for trial in g.trials if (shown := _phases(g, trial))), None)
    if found is None:
        return (
            "Figure 2 is left out: it takes a run of hr or hr-literal of two tasks with its replay.safetensors; stored "
            "runs are often without."
        )
    group, trial, h = found.group, found.trial, found.task
    scheme = _Scheme()
    first, update, memory = (0.0, 0.25), (0.29, 0.71), (0.75, 1.0)
    scheme.box(first, f"Task 1: {trial.overall[0]:.0f} %", GREY)
    scheme.row(first, 0.72, "its images <i>D</i><sub>1</sub>", found.first)
    scheme.arrow(0.125, 0.53, 0.125, 0.44, "trained on,<br>then coded")
    scheme.row(first, 0.30, "memory <i>M</i><sub>1</sub>, decoded", found.first_kept)
    scheme.box(update, f"Task h = {h + 1}: {trial.overall[h]:.0f} % on all classes so far", COLOURS[0])
    scheme.row(update, 0.80, "new images <i>D</i><sub>h</sub>", found.new)
    scheme.row(update, 0.54, "memory <i>M</i><sub>1:h-1</sub>, decoded: against local forgetting", found.old_kept)
    scheme.row(update, 0.28, "made up from class means: against global forgetting", found.made)
    scheme.arrow(0.5, 0.11, 0.5, 0.03, "trained on together")
    scheme.box(memory, f"Memory after task {h + 1}", COLOURS[2])
    scheme.row(memory, 0.72, "codes of old tasks, decoded", found.old_after)
    scheme.row(memory, 0.40, "codes of task h, added", found.new_after)
    scheme.note(memory, 0.10, f"a client keeps {in_bytes(trial.costs[h].kept_max)}<br>of codes, and no image")
    scheme.arrow(0.255, 0.5, 0.285, 0.5, "")
    scheme.arrow(0.715, 0.5, 0.745, 0.5, "")
    return chart(
        "figure-2", f"How Hybrid Replay goes from task to task: {group.label}, seed {trial.seed}",
        f"The paper's Figure 2 with images of a run: {group.label} on {evidence.section.benchmark}, seed {trial.seed}. "
        "Task 1 is learned and coded; every later task is learned together with what the codes give back and what is "
        "made up from the means of classes, and then adds its own codes.",
        scheme.figure, ("what", "images"),
        [
            ("images of task 1", len(found.first)), ("new images", len(found.new)),
            ("decoded exemplars", len(found.old_kept)), ("made up", len(found.made)),
            ("decoded after the task", len(found.old_after) + len(found.new_after)),
        ],
    )  # fmt: skip


@dataclass(frozen=True)
class Phases:
    """The pictures of one run around one task."""

    group: Group
    trial: Trial
    task: int
    first: list[Tensor]
    first_kept: list[Tensor]
    new: list[Tensor]
    old_kept: list[Tensor]
    made: list[Tensor]
    old_after: list[Tensor]
    new_after: list[Tensor]


def _phases(group: Group, trial: Trial) -> Phases | None:
    if group.row.method not in ("hr", "hr-literal") or len(trial.matrix) < 2:
        return None
    try:
        pictures, _ = read_tensors(trial.run.folder / "replay.safetensors")
    except UserError:
        return None
    h = min(2, len(trial.matrix) - 1)

    def some(task: int, kind: str, of: Sequence[int]) -> list[Tensor]:
        names = [f"{task}/{kind}/{j}" for j in sorted(trial.task_of_class) if trial.task_of_class[j] in of]
        return [pictures[name] for name in names if name in pictures][:MOST]

    old = list(range(h))
    found = Phases(
        group, trial, h, first=some(0, "real", [0]), first_kept=some(0, "kept", [0]), new=some(h, "real", [h]),
        old_kept=some(h - 1, "kept", old), made=some(h - 1, "made", old), old_after=some(h, "kept", old),
        new_after=some(h, "kept", [h]),
    )  # fmt: skip
    return found if found.first and found.new and found.old_kept else None


def _terms(group: Group) -> dict[str, Measured | None]:
    ends = [trial.apart[-1] for trial in group.trials]
    return {term: over_seeds([[end.means[term]] for end in ends if end])[0] for term in TERMS}


def _term(row: int, column: int) -> str:
    """Return the term that a pair belongs to: places 0 and 1 are client A's old and new tasks, 2 and 3 client B's."""
    one_new, other_new, within = row % 2 == 1, column % 2 == 1, row // 2 == column // 2
    if one_new and other_new:
        return "new"
    if not within:
        return "inter"
    return "intra" if one_new or other_new else "prior"


def _said(term: str, value: Measured | None) -> str:
    return f"({NUMERALS[term]})<br>{value.mean:.3f}" if value else f"({NUMERALS[term]})"


class _Scheme:
    """A figure of boxes, rows of pictures and arrows; places are shares of its width and height."""

    def __init__(self) -> None:
        self.figure = go.Figure()
        self.figure.add_scatter(x=[0, 1], y=[0, 1], mode="markers", marker={"opacity": 0}, hoverinfo="skip")
        hidden = {"visible": False, "range": [0, 1], "fixedrange": True}
        self.figure.update_layout(height=460, xaxis=hidden, yaxis=hidden, showlegend=False)

    def box(self, across: tuple[float, float], title: str, colour: str) -> None:
        low, high = across
        frame = {"color": colour, "width": 2}
        self.figure.add_shape(type="rect", x0=low, x1=high, y0=0.0, y1=0.92, line=frame, layer="below")
        self._text((low + high) / 2, 0.97, f"<b>{title}</b>", 14)

    def row(self, across: tuple[float, float], top: float, title: str, pictures: Sequence[Tensor]) -> None:
        low, high = across
        self._text((low + high) / 2, top + 0.05, title, 12)
        wide = min(0.07, (high - low - 0.02) / max(1, len(pictures)))
        begin = (low + high - wide * len(pictures)) / 2
        for i, picture in enumerate(pictures):
            self.figure.add_layout_image(
                source=_url(picture), x=begin + wide * i, y=top + 0.01, xref="x", yref="y", sizex=wide * 0.92,
                sizey=0.16, xanchor="left", yanchor="top", sizing="contain", layer="above",
            )  # fmt: skip

    def arrow(self, x0: float, y0: float, x1: float, y1: float, title: str) -> None:
        self.figure.add_annotation(
            x=x1, y=y1, ax=x0, ay=y0, xref="x", yref="y", axref="x", ayref="y", showarrow=True, arrowhead=2,
            arrowwidth=2, arrowcolor=GREY, text="",
        )  # fmt: skip
        if title:
            self._text(x0 + 0.008, (y0 + y1) / 2, title, 12, "left")

    def note(self, across: tuple[float, float], y: float, text: str) -> None:
        self._text(sum(across) / 2, y, text, 12)

    def _text(self, x: float, y: float, text: str, size: int, anchor: str = "center") -> None:
        self.figure.add_annotation(
            x=x, y=y, text=text, showarrow=False, xref="x", yref="y", xanchor=anchor, font={"size": size}
        )


def _url(picture: Tensor) -> str:
    colours = picture.expand(3, -1, -1) if len(picture) != 3 else picture
    image = Image.fromarray(colours.to(torch.uint8).permute(1, 2, 0).contiguous().numpy())
    larger = max(1, -(-SIDE // image.width))
    packed = io.BytesIO()
    image.resize((image.width * larger, image.height * larger), Image.Resampling.NEAREST).save(packed, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(packed.getvalue()).decode()}"
