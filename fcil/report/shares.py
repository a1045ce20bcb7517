"""Who holds what: a summary and a picture of a scenario's partition."""

from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fcil.errors import UserError, lacking
from fcil.scenario.benchmarks import Benchmark
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import Task

COLUMNS = ("task", "images", "clients", "empty", "images\na client", "classes\na client", "images a client\nand class")


def shares_table(scenario: Scenario) -> Table:
    """Return the summary of a scenario's shares, a row for each task."""
    caption = "min/median/max; last column median/90%/max; empty: without images"
    table = Table(title=describe(scenario), caption=caption, box=SIMPLE_HEAD)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for row in shares_rows(scenario):
        table.add_row(*row)
    return table


def shares_rows(scenario: Scenario) -> list[tuple[str, ...]]:
    """Return the cells of the summary as text."""
    return [_row(scenario, task) for task in scenario.tasks]


def describe(scenario: Scenario) -> str:
    """Say in a line how a scenario's images are dealt."""
    return f"{scenario.benchmark.name}: {dealt(scenario.benchmark)}, seed {scenario.partition_seed}"


def dealt(benchmark: Benchmark) -> str:
    """Say by which partition images are dealt, with the numbers that it takes."""
    b = benchmark
    options = {
        "lda_equal": f"alpha {b.alpha:g}",
        "dirichlet_class": f"alpha {b.alpha:g}",
        "class_subset": f"{b.class_share:.0%} of the classes",
        "powerlaw_dirichlet": f"alpha {b.alpha:g}, exponent {b.exponent:g}, {b.class_share:.0%} of the classes",
        "dirichlet_balanced": f"alpha {b.alpha:g}",
    }
    return f"{b.partition} ({options[b.partition]})"


def draw_shares(scenario: Scenario, path: Path) -> None:
    """Draw how many images of each class every client gets, as a PNG heat map."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise lacking("drawing needs the package matplotlib", "report") from None
    counts = reduce(
        np.maximum, map(scenario.share, scenario.tasks)
    )  # a class comes in one task; clients that stay on hold it in two
    clients, classes = counts.shape
    width, height = min(16.0, max(6.5, 3 + 0.16 * classes)), min(11.0, max(4.5, 2 + 0.1 * clients))
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _cells(figure, axes, counts)
    _task_marks(axes, scenario.tasks, clients)
    if classes <= 100:  # beyond, names would run into each other
        short = max(map(len, scenario.class_names)) <= 3
        size = 10 if classes <= 10 else 6
        axes.set_xticks(range(classes), scenario.class_names, rotation=0 if short else 90, fontsize=size)
    if clients <= 20:
        axes.set_yticks(range(clients))
    axes.set_xlabel("class, in order of appearance")
    axes.set_ylabel("client")
    axes.set_title(f"Images of each class at each client\n{describe(scenario)}", fontsize=11, pad=20, loc="left")
    try:
        figure.savefig(path, format="png", bbox_inches="tight")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from None


def _row(scenario: Scenario, task: Task) -> tuple[str, ...]:
    held = scenario.share(task)[scenario.present(task)]
    sizes, classes, pairs = held.sum(axis=1), (held > 0).sum(axis=1), held[:, list(task.new)]
    return (
        str(task.index + 1),
        f"{sizes.sum():,}",
        str(len(sizes)),
        str((sizes == 0).sum()),
        _three(sizes, 0, 50, 100),
        _three(classes, 0, 50, 100),
        _three(pairs, 50, 90, 100),
    )


def _three(values: Any, *percents: int) -> str:
    return "/".join(f"{value:g}" for value in np.percentile(values, percents).round(1))


def _cells(figure: Any, axes: Any, counts: Any) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, PowerNorm

    clients, classes = counts.shape
    # the square root keeps the many small shares apart beside the few large ones; no image at all is white
    most = max(2, int(counts.max()))
    norm = PowerNorm(0.5, 1, most)
    colours = ListedColormap(colormaps["YlGnBu"](np.linspace(0.12, 1, 256))).with_extremes(bad="white")
    ticks = np.unique(np.round(1 + (most - 1) * np.linspace(0, 1, 8) ** 2)).astype(int)
    drawn = np.ma.masked_equal(counts, 0)
    shown = axes.imshow(drawn, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    bar = figure.colorbar(shown, ax=axes, pad=0.02, ticks=ticks)
    bar.set_label("images (white: none)")
    bar.outline.set_visible(False)
    if clients * classes <= 400:
        for client, label in np.argwhere(counts > 0):
            value = counts[client, label]
            ink = "white" if norm(value) > 0.5 else "black"
            axes.text(label, client, str(value), ha="center", va="center", fontsize=7, color=ink)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=2)


def _task_marks(axes: Any, tasks: list[Task], clients: int) -> None:
    for task in tasks:
        first, last = task.new[0], task.new[-1]
        if task.index:
            axes.axvline(first - 0.5, color="black", linewidth=0.8)
        name = f"task {task.index + 1}" if len(tasks) <= 10 or task.index == 0 else str(task.index + 1)
        axes.text((first + last) / 2, -0.5 - 0.012 * clients, name, ha="center", va="bottom", fontsize=8)
