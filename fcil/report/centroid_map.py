"""The map of the centroids: where those of a run lie in a plane, and how far apart they are in all dimensions."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fcil.blocks.centroids import REST
from fcil.report.drawing import COLOURS, GREY, SYMBOLS, Chart, View, chart, methods_down, names
from fcil.report.evidence import Evidence, Group, Trial

BIN = 0.05  # of the histogram of distances


@dataclass(frozen=True)
class Map:
    """Where a run's centroids lie, in units of the distance at which they rest."""

    names: list[str]
    tasks: list[int | None]
    flat: Tensor  # (classes, 2)
    distances: Tensor  # (classes, classes) in all dimensions
    off: float  # root mean square of what the plane changes a distance by


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
    farthest = max(1.0, *(float(plane.distances.max()) for _, _, plane in found))
    views = [View(f"{group.label}, seed {trial.seed}", _drawn(plane, farthest)) for group, trial, plane in found]
    if len(found) > 1:
        views.insert(0, View("all methods, by distance", _spreads(found, farthest)))
    off = ", ".join(f"{plane.off:.2f} ({group.label})" for group, _, plane in found)
    return chart(
        "centroids", "Map of the centroids",
        "The classes' centroids, laid into a plane so that their distances are kept as well as a plane can. The unit "
        "is the distance at which the Lennard-Jones potential lets two of them rest (dashed). The histogram has the "
        f"true distances, in all dimensions; the map is off by this much for a pair, in root mean square: {off}. "
        "Colour is the task.",
        views,
        ("method", "settings", "seed", "class", "task", "x", "y", "nearest", "nearest_distance"),
        [
            (*names(group), trial.seed, name, None if task is None else task + 1, *point, *near)
            for group, trial, p in found
            for name, task, point, near in zip(p.names, p.tasks, p.flat.tolist(), _nearest(p), strict=True)
        ],
    )  # fmt: skip


def map_of(trial: Trial) -> Map | None:
    """Lay the centroids of a run into a plane; None where it has none, or was stored without its model."""
    folder = trial.run.folder
    try:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            names = set(file.keys())
            if not {"centroids", "seen"} <= names:
                return None
            points, seen = file.get_tensor("centroids").double(), file.get_tensor("seen").bool()
        spacing = float(tomllib.loads((folder / "config.toml").read_text())["config"]["spacing"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    labels = seen.nonzero().flatten().tolist()
    whole = points.ndim == 2 and seen.shape == points.shape[:1] and len(trial.classes) > max(labels, default=0)
    if len(labels) < 3 or spacing <= 0 or not whole or not points[seen].isfinite().all():
        return None
    distances = torch.cdist(*[points[seen] / (REST * spacing)] * 2)
    flat = flattened(distances)
    return Map(
        names=[trial.classes[j] for j in labels],
        tasks=[trial.task_of_class.get(j) for j in labels],
        flat=flat,
        distances=distances,
        off=float((torch.pdist(flat) - _pairs(distances)).square().mean().sqrt()),
    )


def flattened(distances: Tensor, steps: int = 300) -> Tensor:
    """Lay points into a plane so that their distances change least: de Leeuw's majorization of the stress.

    A projection would not do: points that all rest equally far from each other lie alike in every direction.
    """
    n = len(distances)
    flat = torch.randn(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * distances.mean()
    for _ in range(steps):
        ratio = distances / torch.cdist(flat, flat).clamp_min(1e-9)
        flat = (ratio.sum(1, keepdim=True) * flat - ratio @ flat) / n
    return flat


def _pairs(distances: Tensor) -> Tensor:
    rows, columns = torch.triu_indices(len(distances), len(distances), 1)
    return distances[rows, columns]


def _drawn(plane: Map, farthest: float) -> go.Figure:
    figure = make_subplots(2, 1, row_heights=[0.68, 0.32], vertical_spacing=0.16)
    figure.add_trace(_scattered(plane), row=1, col=1)
    figure.add_trace(_distances(plane), row=2, col=1)
    figure.add_vline(x=1, line={"color": GREY, "dash": "dash"}, row=2, col=1)
    figure.update_xaxes(title="first axis (rest distances)", row=1, constrain="domain")
    figure.update_yaxes(title="second axis (rest distances)", row=1, scaleanchor="x", scaleratio=1)
    figure.update_xaxes(title="distance of a pair (rest distances)", row=2, range=[0, farthest + 2 * BIN])
    figure.update_yaxes(title="pairs of classes", row=2)
    return figure.update_layout(height=680, showlegend=False, bargap=0.05)


def _spreads(found: Sequence[tuple[Group, Trial, Map]], farthest: float) -> go.Figure:
    """Draw for each method how far its pairs lie apart: least, quarters and most."""
    marks = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
    least, low, middle, high, most = torch.stack([_pairs(p.distances).quantile(marks) for _, _, p in found], 1).tolist()
    figure = go.Figure()
    figure.add_box(
        y=list(range(len(found))), lowerfence=least, q1=low, median=middle, q3=high, upperfence=most, orientation="h",
        width=0.6, showlegend=False, line={"width": 1.5}, marker={"color": COLOURS[0]}, hoverinfo="x",
    )  # fmt: skip
    figure.add_vline(x=1, line={"color": GREY, "dash": "dash"})
    methods_down(figure, [group.label for group, _, _ in found])
    figure.update_xaxes(title="distance of a pair (rest distances)", range=[0, farthest + 2 * BIN], hoverformat=".2f")
    return figure


def _scattered(plane: Map) -> go.Scatter:
    colours = [GREY if task is None else COLOURS[task % len(COLOURS)] for task in plane.tasks]
    symbols = [SYMBOLS[(task or 0) // len(COLOURS) % len(SYMBOLS)] for task in plane.tasks]
    return go.Scatter(
        x=plane.flat[:, 0].tolist(), y=plane.flat[:, 1].tolist(),
        mode="markers+text" if len(plane.names) <= 30 else "markers", text=plane.names, textposition="top center",
        marker={"color": colours, "symbol": symbols, "size": 10},
        customdata=[
            ["?" if task is None else task + 1, *near] for task, near in zip(plane.tasks, _nearest(plane), strict=True)
        ],
        hovertemplate="<b>%{text}</b>, task %{customdata[0]}<br>nearest: %{customdata[1]}, at %{customdata[2]:.2f} "
        "rest distances<extra></extra>",
    )  # fmt: skip


def _distances(plane: Map) -> go.Histogram:
    pairs = _pairs(plane.distances).tolist()
    return go.Histogram(
        x=pairs, marker={"color": COLOURS[0]},
        xbins={"start": -BIN / 2, "end": max(pairs) + BIN, "size": BIN},
        hovertemplate="%{y} pairs at %{x} rest distances<extra></extra>",
    )  # fmt: skip


def _nearest(plane: Map) -> list[tuple[str, float]]:
    apart = plane.distances.clone().fill_diagonal_(float("inf"))
    return [(plane.names[j], d) for d, j in zip(apart.amin(1).tolist(), apart.argmin(1).tolist(), strict=True)]
