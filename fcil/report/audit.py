"""What `fcil audit` found: tables for the terminal, and a picture of images beside what is kept, sent and made up."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from torch import Tensor

from fcil.analysis.audit import Found, Pictures
from fcil.errors import UserError, lacking
from fcil.files import whole
from fcil.report.paper import CLASSES, in_millions, kept_in_table_3

ROWS = 8  # examples in the picture
CELL = 0.6  # side of a picture in it, in inches


def tables(found: Found) -> list[RenderableType]:
    """Return the tables of an audit, and what their columns mean."""
    return [
        _membership(found),
        "AUC: the chance that an image that was trained on scores higher than a test image of the same classes; 0.5 is "
        "guessing, and the interval holds 95 % of a bootstrap\n",
        _likeness(found),
        "PSNR (dB) and SSIM to the image that it came from, or is most like of those that went in, and that one's rank "
        f"among all {found['images']['train']:,} training images by distance in pixels: medians; 1st: how often it is "
        "the nearest; copy: the chance that its nearest image stands out more among its 50 nearest than that of a test "
        "image (0.5: as of new images, 1: copies)\n",
        _memory(found),
        *_beside_the_paper(found),
    ]


def _membership(found: Found) -> Table:
    table = _table("Was this image trained on?", "images", "told by", "AUC", "95 %", "number")
    for row in found["membership"]:
        table.add_row(row["images"], row["attack"], f"{row['value']:.3f}", _interval(row), f"{row['inside']:,}")
    return table


def _likeness(found: Found) -> Table:
    title = "How near do pictures come to images?"
    table = _table(title, "pictures", "bytes", "number", "PSNR", "SSIM", "1st", "rank", "copy")
    rows = [
        ("kept", found["kept"]), *((f"sent: {name}", row) for name, row in found["sent"].items()),
        ("made up", found["made"]), *((f"if it were {name}", row) for name, row in found["tried"].items()),
    ]  # fmt: skip
    for name, row in rows:
        table.add_row(name, *(_cells(row) if row else ["none", *[""] * 6]))
    return table


def _cells(row: Found) -> list[str]:
    known = "ssim" in row
    exact = "equal" if known and row["psnr"] is None else f"{row['psnr']:.1f}" if known else ""
    return [
        f"{row['bytes']:,}" if row.get("bytes") else "", f"{row['pictures']:,}", exact,
        f"{row['ssim']:.3f}" if known else "", f"{row['source_is_nearest']:.1%}" if known else "",
        f"{row['rank']:,}" if known else "", f"{row['stands_out']['value']:.2f}",
    ]  # fmt: skip


def _memory(found: Found) -> Table:
    memory = found["memory"]
    table = _table("What it weighs, in bytes", "part", "numbers", "bytes", "")
    for name, weight in memory["federation"].items():
        beside = "beside the budget" if name == "labels" else ""
        table.add_row(f"memories: {name}", f"{weight['numbers']:,}", f"{weight['bytes']:,}", f"all clients {beside}")
    most, mean = memory["client_bytes"]["most"], memory["client_bytes"]["mean"]
    table.add_row(
        "a client's memory", "", f"{most:,}", f"at most; {mean:,.0f} on average, {memory['budget']:,} allowed"
    )
    for name, weight in memory["broadcast"].items():
        if weight["bytes"] > 100:
            table.add_row(f"broadcast: {name}", f"{weight['numbers']:,}", f"{weight['bytes']:,}", "to each client")
    return table


def _beside_the_paper(found: Found) -> list[str]:
    """Put a run's memory into the unit of the paper's Table 3, which is numbers."""
    memory, classes = found["memory"], len(found["classes"])
    each, own = memory["numbers_per_exemplar"], memory["decoder"]
    lines = [
        "Table 3 of the paper counts numbers; so counted, this run keeps "
        f"{memory['exemplars_per_class']:g} exemplars a class x {classes} classes x {each:g} numbers = "
        f"{memory['exemplars_per_class'] * classes * each:,.0f}, and decodes with {own['numbers']:,} "
        f"({own['bytes']:,} bytes)"
    ]
    for row in kept_in_table_3(str(found["benchmark"])):
        decoder = row.said.decoder
        lines.append(
            f"  {row.methods}, {row.benchmark}: {row.said.exemplars} x {CLASSES} x {row.each:,} = "
            f"{row.numbers / 1e6:.2f}M (printed: {in_millions(row.said.memory)})"
            f"{f' + {in_millions(decoder)} of the decoder' if decoder else ''}; "
            f"{row.as_bytes / 1e6:.1f} MB if a number of an exemplar is a byte, "
            f"{row.as_floats / 1e6:.1f} MB if it is a float"
        )
    return lines


def _interval(row: Found) -> str:
    return f"{row['low']:.3f} to {row['high']:.3f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in columns:
        words = name in ("images", "told by", "pictures", "part", "")
        table.add_column(name, justify="left" if words else "right", no_wrap=not words)
    return table


# -- the picture ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Columns of pictures under one title, and what stands beside each row."""

    title: str
    columns: list[tuple[str, list[Tensor]]]
    notes: list[str] = field(default_factory=list)


def draw(found: Found, pictures: Pictures, path: Path) -> None:
    """Draw images beside what is kept of them, what can be made of messages, and what is made up."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise lacking("drawing needs the package matplotlib", "report") from None
    groups = [group for group in _groups(found, pictures) if group.columns[0][1]]
    widths = [len(group.columns) + 0.5 * bool(group.notes) for group in groups]
    width, height = CELL * sum(widths) + 0.3 * len(widths), CELL * ROWS + 1.05
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    title = f"{found['method']} on {found['benchmark']}, seed {found['seed']}: what it tells of training images"
    figure.text(0.1 / width, 1 - 0.1 / height, title, fontsize=9, fontweight="bold", va="top")
    left = 0.1
    for group, wide in zip(groups, widths, strict=True):
        figure.text(left / width, 1 - 0.35 / height, group.title, fontsize=8, va="top")
        for x, (name, images) in enumerate(group.columns):
            for y, image in enumerate(images):
                below = height - 1.0 - (y + 1) * CELL
                place = ((left + x * CELL) / width, below / height, 0.94 * CELL / width, 0.94 * CELL / height)
                axes = figure.add_axes(place)
                axes.set_axis_off()
                _show(axes, image)
                if y == 0:
                    axes.set_title(name, fontsize=5.5, pad=2)
                if group.notes and x == len(group.columns) - 1:
                    axes.text(1.06, 0.5, group.notes[y], fontsize=5.5, va="center", transform=axes.transAxes)
        left += CELL * wide + 0.3
    try:
        with whole(path) as partial:
            figure.savefig(partial, format="png")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None


def _groups(found: Found, pictures: Pictures) -> list[Group]:
    some = _spread(pictures.kept.labels.cpu())
    kept = [("image", list(pictures.kept.sources[some]))]
    if found["kept"]:
        kept.append((_header("kept", found["kept"]), list(pictures.kept.pictures[some])))
    for name, tried in pictures.tried.items():
        if name != "raw":
            kept.append((_header(name.partition(":")[0], found["tried"][name]), list(tried[some])))
    groups = [Group("kept, and if it were by other codecs" if found["kept"] else "nothing is kept; if it were", kept)]
    for name, pairs in pictures.sent.items():
        rows = pairs.sizes.argsort(stable=True)[:ROWS]
        columns = [("rebuilt", list(pairs.pictures[rows])), ("image", list(pairs.sources[rows]))]
        groups.append(Group(f"sent: {name}", columns, [f"of {n}" for n in pairs.sizes[rows].tolist()]))
    rows = torch.linspace(0, max(0, len(pictures.made) - 1), min(ROWS, len(pictures.made))).long()
    made, near = pictures.made.cpu()[rows], pictures.nearest.cpu()[rows]
    return [*groups, Group("made up", [("made", list(made)), ("nearest", list(near))])]


def _header(name: str, row: Found) -> str:
    error = "equal" if row["psnr"] is None else f"{row['psnr']:.1f} dB"
    return f"{name}\n{row['bytes']:,} B\n{error}"


def _show(axes: Any, image: Tensor) -> None:
    pixels = image.cpu().permute(1, 2, 0).numpy()
    if pixels.shape[2] == 3:
        axes.imshow(pixels, interpolation="nearest")
    else:
        axes.imshow(pixels[..., 0], "gray", interpolation="nearest", vmin=0, vmax=255)


def _spread(labels: Tensor) -> Tensor:
    """Return some rows, of as many classes as there are, in their order."""
    turns = [int((labels[:i] == label).sum()) for i, label in enumerate(labels[:1000])]
    first = torch.tensor(turns, dtype=torch.int64).argsort(stable=True)[:ROWS]
    return first[labels[first].argsort(stable=True)]
