"""The paper's limitation as a figure: what a larger decoder, or a larger code, buys and what it costs.

"If the decoder lacks sufficient representational capacity, it may fail to generate realistic images"; if it is overly
complex, it may memorise training images, and every step costs more.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from fcil.errors import UserError
from fcil.networks import BODIES
from fcil.records import read_tensors
from fcil.report.comparison import Measured, ran_by, settings_text
from fcil.report.drawing import COLOURS, DASHES, GREY, SYMBOLS, Chart, byte_axis, chart, errors, names, with_error
from fcil.report.evidence import Evidence, Group, Trial, over_seeds
from fcil.report.told import auc_of, audit_of

PANELS = (
    ("final", "accuracy (%)"), ("psnr", "PSNR (dB)"), ("auc", "membership AUC"), ("step", "step (ms)"),
)  # fmt: skip
LEAST = {"auc": (0.5,), "step": (0.0,)}  # what an axis shows in any case
SIZED = ("decoder_width", "codec_width", "code_bytes", "latent", "code_bits")  # settings that change the two sizes


@dataclass(frozen=True)
class Point:
    """One method with one size of decoder and code."""

    group: Group
    line: str  # what else was set
    width: float | None  # channels of the decoder; None where it has none
    code: float  # bytes
    found: dict[str, Measured | None]
    told: dict[str, dict[int, float | None]]  # the same, seed by seed
    ran: dict[int, tuple[str, ...]]  # by which code, device and engine: times of others do not compare


def capacity(evidence: Evidence) -> Chart | str:
    """Accuracy, PSNR, membership AUC and step time, against the decoder's width and against the bytes of a code."""
    points = [point for group in evidence.groups if (point := _point(group))]
    sides = [
        (title, place, lines)
        for title, place, fixed in (("decoder (channels)", _width, _code), ("code (bytes)", _code, _width))
        if (lines := _lines(points, place, fixed))
    ]
    if not sides:
        return (
            "The figure of decoder capacity is left out: it takes hr or hr-literal with several sizes, such as "
            "fcil sweep --methods hr-literal --set decoder_width=8,16,64,256, or --methods hr --set code_bytes=12,24"
        )
    timed = any(value for _, _, lines in sides for along in lines.values() for _, value in _shared(along, "step"))
    shown = [(k, axis) for k, axis in PANELS if any(p.found[k] for p in points) and (k != "step" or timed)]
    figure = make_subplots(len(shown), len(sides), shared_xaxes=True, vertical_spacing=0.05, horizontal_spacing=0.06)
    labels = list(dict.fromkeys(label for _, _, lines in sides for label in lines))
    for column, (title, place, lines) in enumerate(sides, 1):
        for row, (key, axis) in enumerate(shown, 1):
            for label, along in lines.items():
                _draw(figure, row, column, labels.index(label), label, axis, place, _shared(along, key))
            if key == "auc":
                figure.add_hline(0.5, line={"color": GREY, "dash": "dot", "width": 1}, row=row, col=column)
            span = _span(key, [lines for _, _, lines in sides])
            named = {"title": axis} if column == 1 else {"showticklabels": False}
            figure.update_yaxes({"range": span, **named}, row=row, col=column)
            if not any(value for along in lines.values() for _, value in _shared(along, key)):
                at = {"xref": "x domain", "yref": "y domain", "x": 0.5, "y": 0.5, "row": row, "col": column}
                figure.add_annotation(text="no runs that compare", showarrow=False, font={"color": GREY}, **at)
        places = [value for along in lines.values() for point in along if (value := place(point))]
        scale = byte_axis(places) if place is _code else {"type": "log", "tickvals": sorted(set(places))}
        if place is _code and len(set(places)) <= 6:
            scale |= {"tickvals": sorted(set(places)), "ticktext": [f"{value:g}" for value in sorted(set(places))]}
        figure.update_xaxes(scale, col=column)
        figure.update_xaxes(title=title, row=len(shown), col=column)
    figure.update_layout(height=90 + 190 * len(shown), showlegend=len(labels) > 1)
    without = (
        "" if any(point.found["auc"] for point in points) else " No run here was audited: fcil audit RUN adds AUC."
    )
    return chart(
        "capacity", f"Decoder capacity{f' of {labels[0]}' * (len(labels) == 1)}: what it buys, and what it costs",
        "Final accuracy; how near the exemplars are to their images (PSNR); how well an attacker tells training images "
        "from others (the highest AUC of the audit; dotted, 0.5: guessing); and the time of a local step, of runs by "
        "the same code and engine. Means over the seeds that all points of a line have."
        + without,
        figure,
        ("method", "settings", "seeds", "decoder_channels", "code_bytes",
         *(f"{key}{part}" for key, _ in PANELS for part in ("", "_sem"))),
        [
            (*names(p.group), len(p.group.trials), p.width, p.code,
             *(getattr(p.found[key], part, None) for key, _ in PANELS for part in ("mean", "sem")))
            for p in points
        ],
    )  # fmt: skip


def psnr_of(trial: Trial) -> float | None:
    """Return how near a run's exemplars are to their images, in dB: its own measure, an audit's, or the gallery's."""
    told = None
    for told_by in (trial.run.result.get("measured"), audit_of(trial.run.folder).get("kept")):
        if told is None and isinstance(told_by, dict):
            told = told_by.get("psnr")
    return float(told) if isinstance(told, int | float) else _pictured(trial.run.folder)


def _pictured(folder: Path) -> float | None:
    """Return the PSNR of the exemplars in a run's gallery, after the last task that shows them."""
    try:
        pictures, _ = read_tensors(folder / "replay.safetensors")
    except UserError:
        return None
    real = {name.split("/")[2]: picture for name, picture in pictures.items() if "/real/" in name}
    kept = {
        name.split("/")[2]: pictures[name]
        for name in sorted((n for n in pictures if "/kept/" in n), key=lambda n: int(n.split("/")[0]))
    }
    gaps = [(kept[j].double() - real[j].double()).square().mean() for j in real.keys() & kept.keys()]
    error = float(torch.stack(gaps).mean()) if gaps else 0.0
    return float(10 * torch.tensor(255.0**2 / error).log10()) if error else None


def _point(group: Group) -> Point | None:
    """Return where a method stands; None where it is not Hybrid Replay, or its plan cannot be read."""
    method = group.row.method
    if (
        not method.startswith("hr")
        or group.row.settings.keys() & {"exemplars"}
        or method.endswith(("-perfect", "-no-latents"))
    ):
        return None
    try:
        plan = tomllib.loads((group.trials[0].run.folder / "config.toml").read_text())
        benchmark, config = plan["benchmark"], plan["config"]
        numbers = _image_bytes(group.trials[0], benchmark)
        width: float | None
        if method.startswith("hr-literal"):
            width = float(config.get("decoder_width") or BODIES[benchmark["network"]].begins)  # type: ignore[attr-defined]
            code = (config["latent"] or round(numbers / 10)) * float(config["code_bits"]) / 8
        else:
            width = float(config.get("codec_width", 64)) if config["codec"] == "autoencoder" else None
            code = float(config["code_bytes"] or max(12, round(numbers / 10)))
        steps = [_step(trial, plan) for trial in group.trials]
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    others = {k: v for k, v in group.row.settings.items() if k not in SIZED}
    told = {
        "final": [trial.run.result["final"] for trial in group.trials], "step": steps,
        "psnr": [psnr_of(trial) for trial in group.trials], "auc": [auc_of(trial) for trial in group.trials],
    }  # fmt: skip
    found = {key: over_seeds([[value] for value in values])[0] for key, values in told.items()}
    seeds = [trial.seed for trial in group.trials]
    ran = {trial.seed: ran_by(trial.run.result) for trial in group.trials}
    by_seed = {key: dict(zip(seeds, values, strict=True)) for key, values in told.items()}
    line = f"{method} ({settings_text(others)})" if others else method
    return Point(group, line, width, code, found, by_seed, ran)


def _image_bytes(trial: Trial, benchmark: Mapping[str, Any]) -> float:
    classes = benchmark["tasks"] * benchmark["classes_per_task"]
    sharers = benchmark["clients"] if benchmark["memory_scope"] == "federation" else 1
    return float(trial.run.result["memory_budget"] * sharers / (benchmark["memory"] * classes))


def _step(trial: Trial, plan: Mapping[str, Any]) -> float | None:
    """Return the milliseconds of a local step; None where a round's steps are counted in epochs."""
    steps = plan["protocol"]["steps"] * plan["benchmark"]["active"] * len(trial.rounds)
    return 1000 * float(trial.run.result["seconds"]["train"]) / steps if steps else None


def _shared(along: Sequence[Point], key: str) -> list[tuple[Point, Measured | None]]:
    """Return what the points of a line are worth over the seeds that all of them have.

    Steps are compared seed by seed where one code made all of them; a seed of which a value is missing is left out.
    """
    seeds = [seed for seed in along[0].told[key] if all(p.told[key].get(seed) is not None for p in along)]
    if key == "step":
        seeds = [seed for seed in seeds if len({p.ran[seed] for p in along}) == 1]
    return [(p, over_seeds([[p.told[key][seed]] for seed in seeds])[0] if seeds else None) for p in along]


def _span(key: str, sides: Sequence[Mapping[str, Sequence[Point]]]) -> list[float]:
    """Return what an axis shows: all values with their errors, so that both columns have one scale."""
    known = [value for lines in sides for along in lines.values() for _, value in _shared(along, key) if value]
    ends = [value.mean + sign * (value.sem or 0.0) for value in known for sign in (-1, 1)]
    low, high = (pick([*ends, *LEAST.get(key, ())]) for pick in (min, max)) if known else (0.0, 1.0)
    room = 0.08 * (high - low) or 1.0
    return [low - room * (low != 0), high + room]


def _width(point: Point) -> float | None:
    return point.width


def _code(point: Point) -> float | None:
    return point.code


def _lines(
    points: Sequence[Point], place: Callable[[Point], float | None], fixed: Callable[[Point], float | None]
) -> dict[str, list[Point]]:
    """Return the points that differ in one size alone, by what they share, in the order of that size."""
    found: dict[tuple[str, float | None], list[Point]] = {}
    for point in points:
        if place(point) is not None:
            found.setdefault((point.line, fixed(point)), []).append(point)
    kept = {key: along for key, along in found.items() if len({place(point) for point in along}) > 1}
    several = [line for line, _ in kept]
    return {
        line if several.count(line) == 1 else f"{line}, {size:g}": sorted(along, key=lambda p: place(p) or 0.0)
        for (line, size), along in kept.items()
    }


def _draw(
    figure: go.Figure, row: int, column: int, place: int, label: str, axis: str,
    where: Callable[[Point], float | None], along: Sequence[tuple[Point, Measured | None]],
) -> None:  # fmt: skip
    known = [(where(point), value) for point, value in along if value]
    unnamed = all(trace.name != label for trace in figure.data)
    figure.add_scatter(
        x=[x for x, _ in known], y=[value.mean for _, value in known], error_y=errors([value for _, value in known]),
        mode="lines+markers", name=label, legendgroup=label, showlegend=unnamed,
        line={"color": COLOURS[place % len(COLOURS)], "dash": DASHES[place // len(COLOURS) % len(DASHES)]},
        marker={"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8},
        customdata=[[with_error(value, 2)] for _, value in known],
        hovertemplate=f"<b>{label}</b><br>%{{x}}: {axis} %{{customdata[0]}}<extra></extra>", row=row, col=column,
    )  # fmt: skip
