"""The report page: one HTML file that holds all it needs, drawn by plotly from the ledgers of runs."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from PIL import Image

from fcil import __version__
from fcil.errors import UserError, lacking
from fcil.files import write_text
from fcil.report.comparison import BOUNDS, number
from fcil.report.evidence import Evidence, Group, gather

MOST_PICTURES = 6_000_000  # bytes of all galleries on a page
WATCH_EVERY = 3  # seconds after which a live page asks for news


@dataclass(frozen=True)
class Picture:
    """A run's replay.png, inside the page."""

    label: str
    seed: int
    url: str


def write_page(runs: Sequence[Path], out: Path) -> list[str]:
    """Write the page about `runs` to `out`; return a sentence for each run that is left out."""
    if out.is_dir():
        raise UserError(f"{out} is a folder; give the name of a file, such as page.html")
    if not out.absolute().parent.is_dir():
        raise UserError(f"there is no folder {out.absolute().parent} to write {out.name} to")
    found, left_out = gather(runs)
    if not found:
        raise UserError(f"there is no run to report: {'; '.join(left_out)}")
    page = page_of(found, left_out)
    try:
        write_text(out, page)
    except OSError as error:
        raise UserError(f"cannot write {out} ({error.strerror}); choose a place you can write") from None
    return left_out


def page_of(found: Sequence[Evidence], left_out: Sequence[str], live: Mapping[str, Any] | None = None) -> str:
    """Return the page as HTML; one that is `live` says where its run stands, and is fetched anew when a task ended."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from plotly.offline import get_plotlyjs

        from fcil.report.charts import CHARTS, PAPER
        from fcil.report.courses import training_loss
        from fcil.report.drawing import DARK, LIGHT, Chart
    except ImportError as error:
        raise lacking(f"a page needs the package {error.name}", "report") from None
    room = MOST_PICTURES
    sections = []
    for n, evidence in enumerate(found):
        made = [draw(evidence) for draw in CHARTS if live is None or draw is not training_loss]
        made += [drawn for draw in PAPER if isinstance(drawn := draw(evidence), Chart)]
        pictures, missing = pictures_of(evidence, room)
        room -= sum(len(picture.url) for picture in pictures)
        sections.append(
            {
                "id": f"part-{n + 1}",
                "title": evidence.title,
                "table": [_cells(group) for group in evidence.groups],
                "claims": any(group.row.paper for group in evidence.groups),
                "charts": [island(chart, f"part-{n + 1}") for chart in made if isinstance(chart, Chart)],
                "missing": [sentence for sentence in made if isinstance(sentence, str)] + missing,
                "pictures": pictures,
                "first_pictures": _first_two(pictures),
                "trials": [trial for group in evidence.groups for trial in group.trials],
            }
        )
    # LF as line end and a fixed order: the same runs give the same page.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        title=_title(found) if found or live is None else live["title"], version=__version__, sections=sections,
        left_out=left_out, live=live, every=WATCH_EVERY,
        plotly=get_plotlyjs(), templates={"light": LIGHT.to_plotly_json(), "dark": DARK.to_plotly_json()},
    )  # fmt: skip


def pictures_of(evidence: Evidence, room: int) -> tuple[list[Picture], list[str]]:
    """Return the galleries of all runs, as far as there is room for them, and why others are missing.

    Every method comes with one before any comes with two.
    """
    pictures, missing, left_out = [], [], 0
    turns = zip_longest(*([(group, trial) for trial in group.trials] for group in evidence.groups))
    for group, trial in (pair for turn in turns for pair in turn if pair):
        path = trial.run.folder / "replay.png"
        if not path.exists():
            continue
        if left_out:
            left_out += 1
            continue
        try:
            url = _lossless(path)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            missing.append(f"{path} is left out: it is not a readable picture ({error}).")
            continue
        if len(url) > room:
            left_out = 1
        else:
            pictures.append(Picture(group.label, trial.seed, url))
            room -= len(url)
    if left_out:
        missing.append(
            f"{left_out} of {left_out + len(pictures)} galleries are left out to keep this page small; each run's "
            "folder has its own, replay.png."
        )
    if not pictures and not left_out:
        missing.append("The replay gallery is left out: no run here has a replay.png, as methods that replay leave it.")
    return sorted(pictures, key=lambda picture: _place(evidence, picture)), missing


def _place(evidence: Evidence, picture: Picture) -> tuple[int, int]:
    return [group.label for group in evidence.groups].index(picture.label), picture.seed


def _first_two(pictures: Sequence[Picture]) -> list[int]:
    """Return which galleries are shown first: Hybrid Replay's, ours and as printed, or those of the first methods."""
    by_label: dict[str, int] = {}
    for i, picture in enumerate(pictures):
        by_label.setdefault(picture.label, i)
    ours = [by_label[label] for label in ("hr", "hr-literal") if label in by_label]
    return list(dict.fromkeys([*ours, *by_label.values(), *range(len(pictures))]))[:2]


def _lossless(path: Path) -> str:
    with Image.open(path) as picture:
        packed = io.BytesIO()
        picture.convert("RGB").save(packed, format="WEBP", lossless=True)
    smaller = packed.getvalue()
    return f"data:image/webp;base64,{base64.b64encode(smaller).decode()}"


def _title(found: Sequence[Evidence]) -> str:
    names = list(dict.fromkeys(evidence.section.benchmark for evidence in found))
    methods = list(dict.fromkeys(group.row.method for evidence in found for group in evidence.groups))
    who = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    return f"{who} on {', '.join(names)}"


def _cells(group: Group) -> dict[str, Any]:
    row = group.row
    return {
        "label": group.label,
        "bound": BOUNDS.get(row.method, ""),
        "seeds": len(row.seeds),
        "measured": [row.final, row.average, row.forgetting],
        "memory": f"{row.memory_bytes:,.0f}",
        "minutes": number(row.seconds / 60),
        "paper": f"{row.paper.final} ± {row.paper.sem}" if row.paper else "",
    }


def island(chart: Any, part: str) -> dict[str, Any]:
    """Return what the page needs of a chart; its title stands in the page's text, where it can wrap."""
    views = [{"name": view.name, **drawing_of(view.figure)} for view in chart.views]
    return {
        "id": f"{part}-{chart.name}",
        "title": chart.title,
        "says": chart.says,
        "height": views[0]["layout"]["height"],
        "views": [view["name"] for view in views],
        "content": {"views": views, "csv": chart.csv},
    }


def drawing_of(figure: Any) -> dict[str, Any]:
    """Return the data and the layout of a figure, less what the page itself adds."""
    drawn = json.loads(figure.to_json())
    layout = {key: value for key, value in drawn["layout"].items() if key not in ("title", "template")}
    return {"data": drawn["data"], "layout": layout}
