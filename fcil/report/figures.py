"""The charts of runs as files: PNG for a README or slides, PDF for a paper, drawn by the same functions as the page."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fcil.errors import UserError, lacking
from fcil.report.evidence import Evidence, gather

WIDTH = 860  # pixels, before scaling
SCALE = 2  # of a PNG
FORMATS = ("png", "pdf")
LINES = "the best of each family"  # the view that is drawn beside the first
GREY = "#666666"


def write_figures(runs: Sequence[Path], out: Path) -> tuple[list[Path], list[str], list[str]]:
    """Draw all that `runs` can show into the folder `out`; return the files, and what is left out: runs and figures."""
    found, left_out = gather(runs)
    if not found:
        raise UserError(f"there is no run to draw: {'; '.join(left_out)}")
    wanted: dict[Path, Any] = {}
    missing: list[str] = []
    for evidence in found:
        folder = out / f"{evidence.section.benchmark.replace('/', '_')}-{evidence.section.protocol}"
        for name, figure in _figures(evidence, missing):
            figure.update_layout(title={"subtitle": {"text": _runs_of(evidence), "font": {"size": 12, "color": GREY}}})
            wanted[folder / name] = figure
    files = [path.with_suffix(f".{kind}") for path in wanted for kind in FORMATS]
    with _folders({path.parent for path in wanted}, out):
        _render([figure for figure in wanted.values() for _ in FORMATS], files)
    return files, left_out, missing


@contextmanager
def _folders(needed: Iterable[Path], out: Path) -> Iterator[None]:
    """Make folders to write to; where nothing comes to lie in them, they are gone again."""
    made = {place for folder in needed for place in (folder, *folder.parents) if not place.exists()}
    try:
        for folder in needed:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {out} ({error.strerror}); choose another --out") from None
    try:
        yield
    finally:
        for folder in sorted(made, reverse=True):  # what lies in a folder goes before it
            with suppress(OSError):
                folder.rmdir()


def all_charts() -> tuple[Callable[[Evidence], Any], ...]:
    """Return every function that draws runs: those of the page, and the paper's figures."""
    try:
        from fcil.report.charts import CHARTS, PAPER
        from fcil.report.replay_figure import what_is_replayed
        from fcil.report.schemes import how_hybrid_replay_goes, where_forgetting_happens
    except ImportError as error:
        raise lacking(f"figures need the package {error.name}", "report") from None
    return (*CHARTS, *PAPER, where_forgetting_happens, how_hybrid_replay_goes, what_is_replayed)


def _figures(evidence: Evidence, missing: list[str]) -> list[tuple[str, Any]]:
    figures = []
    for draw in all_charts():
        made = draw(evidence)
        if isinstance(made, str):
            missing.append(f"{evidence.title}: {made}")
            continue
        figures.append((made.name, made.views[0].figure))
        figures += [(f"{made.name}-lines", view.figure) for view in made.views[1:] if view.name == LINES]
    return figures


def _runs_of(evidence: Evidence) -> str:
    """Say what was run: a file stands alone, without the page's headings."""
    seeds = [len(group.trials) for group in evidence.groups]
    counted = f"{min(seeds)}" if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)}"
    return f"{evidence.title}; {counted} seed{'s' * (max(seeds) > 1)} a method"


def _render(figures: Sequence[Any], files: Sequence[Path]) -> None:
    """Let one browser draw all files."""
    try:
        import kaleido  # noqa: F401
        import plotly.io
        from choreographer.errors import BrowserClosedError, BrowserDepsError, BrowserFailedError
    except ImportError as error:
        raise lacking(f"figures need the package {error.name}", "report") from None
    widths = [WIDTH + (140 if figure.layout.showlegend is not False else 0) for figure in figures]
    for figure in figures:
        title = {"x": 0.02, "xanchor": "left", "font": {"size": 16}}
        figure.update_layout(paper_bgcolor="white", margin={"t": 104}, title=title)
    try:
        plotly.io.write_images(
            list(figures), list(files), scale=[SCALE if file.suffix == ".png" else 1 for file in files], width=widths,
            height=[figure.layout.height for figure in figures],
        )  # fmt: skip
    except (RuntimeError, BrowserClosedError, BrowserDepsError, BrowserFailedError):
        raise UserError(
            "figures are drawn by a browser, Chrome or Chromium, and none could be started; "
            "install one, on Debian with: apt-get install chromium"
        ) from None
