"""What methods replay, in one picture: their exemplars after the last task, and what they make up, from replay.png."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from PIL import Image

from fcil.report.drawing import Chart, chart, names
from fcil.report.evidence import Evidence, Group
from fcil.results.gallery import BLANK, CELL, GAP, HEADER, LABELS, pictured

MOST = 10  # classes shown
ROW = 46  # pixels of a method
BLOCKS = (("replayed after the last task", 0.2, 0.59), ("made up", 0.61, 1.0))


@dataclass(frozen=True)
class Cut:
    """The columns of one replay.png: a cell for each class."""

    group: Group
    real: list[Image.Image]
    kept: list[Image.Image]
    made: list[Image.Image]


def what_is_replayed(evidence: Evidence) -> Chart | str:
    """Of every method with a gallery, what it replays of the same classes."""
    cuts = [cut for group in evidence.groups if (cut := _cut(group))]
    if not cuts:
        return "The picture of what is replayed is left out: no run here has a replay.png."
    figure = go.Figure()
    figure.add_scatter(x=[0, 1], y=[0, len(cuts)], mode="markers", marker={"opacity": 0}, hoverinfo="skip")
    first = next((cut for cut in cuts if cut.group.label == "hr"), cuts[0])  # each method follows exemplars of its own
    rows: list[tuple[str, list[Image.Image], list[Image.Image]]] = [
        (f"real images ({first.group.label})", first.real, []),
        *((cut.group.label, cut.kept, cut.made) for cut in cuts),
    ]
    for place, (label, kept, made) in enumerate(rows):
        figure.add_annotation(x=0.19, y=place + 0.5, text=label, showarrow=False, xanchor="right")
        for (_, low, high), cells in zip(BLOCKS, (kept, made), strict=True):
            if any(not _blank(cell) for cell in cells):
                figure.add_layout_image(
                    source=_strip(cells), x=low, y=place + 0.5, xref="x", yref="y", sizex=high - low, sizey=0.88,
                    xanchor="left", yanchor="middle", sizing="contain", layer="above",
                )  # fmt: skip
    for title, low, _ in BLOCKS:
        figure.add_annotation(x=low, y=-0.25, text=f"<b>{title}</b>", showarrow=False, xanchor="left")
    hidden = {"visible": False, "fixedrange": True}
    figure.update_xaxes(hidden | {"range": [0, 1]})
    figure.update_yaxes(hidden | {"range": [len(rows), -0.6]})
    figure.update_layout(height=90 + ROW * (len(rows) + 1), showlegend=False)
    return chart(
        "replayed", "What is replayed, in the first seed of each method",
        "Of every method with a gallery: what a client's memory gives back of one exemplar a class, and "
        "what is made up for the class. Nothing is drawn where nothing is kept, or made up.",
        figure, ("method", "settings", "seed", "picture"),
        [
            (*names(cut.group), cut.group.trials[0].seed, str(cut.group.trials[0].run.folder / "replay.png"))
            for cut in cuts
        ],
    )  # fmt: skip


def _cut(group: Group) -> Cut | None:
    """Cut the columns of a run's gallery; None where it has none, or another form."""
    trial = group.trials[0]
    after = sum(pictured(t, len(trial.matrix)) for t in range(len(trial.matrix)))
    try:
        with Image.open(trial.run.folder / "replay.png") as file:
            page = file.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    forms = ((after + columns, *_fields(page, after + columns)) for columns in (2, 1))  # one without exemplars has no
    columns, step, count = next((form for form in forms if form[2]), (0, 0, 0))  # column for them besides "made"
    if not count:
        return None

    def column(place: int) -> list[Image.Image]:
        left, side = LABELS + place * step, step - GAP
        tops = [HEADER + row * step for row in range(min(count, MOST))]
        return [page.crop((left, top, left + side, top + side)) for top in tops]

    kept = column(columns - 2) if columns == after + 2 else []
    return Cut(group, column(0), kept, column(columns - 1))


def _fields(page: Image.Image, columns: int) -> tuple[int, int]:
    """Return how wide the fields of a gallery are if it has so many columns, and how many rows; 0 if it has not."""
    step, odd = divmod(page.width - LABELS, columns)
    if odd or step - GAP < CELL:
        return 0, 0
    count, cut = divmod(page.height - HEADER, step)
    return (0, 0) if cut else (step, count)


def _blank(cell: Image.Image) -> bool:
    return cell.getextrema() == tuple((value, value) for value in BLANK)


def _strip(cells: Sequence[Image.Image]) -> str:
    side = cells[0].width
    strip = Image.new("RGB", (len(cells) * (side + GAP), side), (255, 255, 255))
    for place, cell in enumerate(cells):
        if not _blank(cell):
            strip.paste(cell, (place * (side + GAP), 0))
    packed = io.BytesIO()
    strip.save(packed, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(packed.getvalue()).decode()}"
