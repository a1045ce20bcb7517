"""What `fcil bench` found, as tables."""

from collections.abc import Iterable, Sequence
from statistics import median, quantiles
from typing import Any

from rich.console import RenderableType
from rich.table import Table

Found = dict[str, Any]


def tables(found: Sequence[Found]) -> list[RenderableType]:
    """Return a table, or a line, for each part that was measured."""
    parts = {
        name: [f for f in found if f["part"] == name] for name in ("engine", "rounds", "growth", "page", "missing")
    }
    shown: list[RenderableType] = []
    if parts["engine"]:
        shown += [_engine(parts["engine"]), *(_share(f) for f in parts["engine"] if "share" in f)]
    if parts["rounds"]:
        shown += [_rounds(parts["rounds"]), *_best(parts["rounds"])]
    if parts["growth"]:
        shown += ["How costs grow", *(f["says"] for f in parts["growth"])]
    shown += [f["says"] for f in parts["page"]]
    return [*shown, *dict.fromkeys(f["says"] for f in parts["missing"] if not f["needed"])]


def _engine(rows: Sequence[Found]) -> Table:
    table = _table(
        "A round of five clients: the engine against the plain loop, eager and fp32",
        "method", "plain ms", "engine ms", "ratio", "images/s", "engine",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["method"], spread(row["plain"]), spread(row["fast"]), f"{row['ratio']:.1f}", f"{row['rate']:,.0f}",
            row["engine"],
        )  # fmt: skip
    return table


def _share(row: Found) -> str:
    return (
        f"{row['rate']:,.0f} images a second through the encoder's forward and backward are {row['share']:.1%} of the "
        f"{row['matrix_rate'] / 1e12:,.2f} Tflop/s that a large product of matrices reaches here"
    )


def _rounds(rows: Sequence[Found]) -> Table:
    table = _table(
        "Federated averaging: 50 clients, 5 in a round, 5 steps of 20 images",
        "model", "runtime", "procs", "round ms", "ratio", "overhead ms", "ratio",
    )  # fmt: skip
    for row in rows:
        ours = [r for r in rows if r["model"] == row["model"] and r["name"].startswith("fcil")]
        fastest, least = min(r["median"] for r in ours), min(third_quartile(r["overheads"]) for r in ours)
        table.add_row(
            row["model"], row["name"], str(row["processes"]),
            spread(row["seconds"]), f"{row['median'] / fastest:.1f}",
            spread(row["overheads"]), f"{row['overhead'] / least:.1f}",
        )  # fmt: skip
    return table


def _best(rows: Sequence[Found]) -> Iterable[str]:
    yield "in brackets: quartiles; overhead: a round less the bare local steps of its busiest process, in its layout"
    yield "ratio: to the better of our two; of our overhead the third quartile is taken, since it comes near zero"
    largest = max(row["difference"] for row in rows)
    yield f"same work: after as many rounds the runtimes' weights differ by at most {largest:.0e}"


def spread(seconds: Sequence[float]) -> str:
    """Return the median with its quartiles, in milliseconds."""
    first, _, third = _quartiles(seconds)
    return f"{1e3 * median(seconds):.0f} ({1e3 * first:.0f}..{1e3 * third:.0f})"


def third_quartile(seconds: Sequence[float]) -> float:
    """Return what three quarters of the measurements stay below."""
    return _quartiles(seconds)[2]


def _quartiles(seconds: Sequence[float]) -> list[float]:
    return quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else [*seconds, *seconds, *seconds]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for number, name in enumerate(columns):
        words = number == 0 or name in ("runtime", "engine")
        table.add_column(name, justify="left" if words else "right", no_wrap=name != "engine")
    return table
