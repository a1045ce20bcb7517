"""The tables of RESULTS.md on cifar100-5x4, made from the runs in results/.

`python -m tests.on_two_cores` prints them.
"""

import json
import tomllib
from pathlib import Path
from statistics import fmean

import fcil
from fcil.report.comparison import Row, compare
from fcil.results.runs import find

RESULTS = Path(fcil.__file__).parent.parent / "results"
RUNS, HELD_OUT = RESULTS / "cifar100-5x4", RESULTS / "cifar100-5x4-held-out"


def rows() -> dict[str, Row]:
    """Return all that ran, by what it is called."""
    (section,) = compare(find([RUNS])).sections
    return {row.label: row for row in section.rows}


def accuracy_rows() -> list[str]:
    """Return the lines of the table of accuracy, in the order of their final one."""
    lines = []
    for label, row in sorted(rows().items(), key=lambda item: item[1].final.mean):
        last = [json.loads((folder / "result.json").read_text())["matrix"][-1] for folder in row.folders]
        old, new = (fmean(value) for value in zip(*((fmean(tasks[:-1]), tasks[-1]) for tasks in last), strict=True))
        name = label.partition(" (")
        cells = [
            f"{name[0]}, `{name[2].rstrip(')')}`" if name[2] else label, str(len(row.seeds)), str(row.final),
            str(row.average), f"{old:.1f} / {new:.1f}", f"{row.forgetting.mean:.1f}", f"{row.memory_bytes:,.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def tried() -> dict[str, dict[float, float]]:
    """Return the accuracy on held-out images after the first task, by method and learning rate."""
    found: dict[str, dict[float, float]] = {}
    for path in sorted(HELD_OUT.glob("*stop_after=1/0/result.json")):
        config = tomllib.loads((path.parent / "config.toml").read_text())
        found.setdefault(config["method"], {})[config["config"]["lr"]] = json.loads(path.read_text())["final"]
    return found


def rate_rows() -> list[str]:
    """Return the lines of the table of learning rates, the best of each method in bold."""
    lines = []
    for method, rates in tried().items():
        best = max(rates, key=rates.__getitem__)
        told = {rate: f"**{rates[rate]:.1f}**" if rate == best else f"{rates[rate]:.1f}" for rate in sorted(rates)}
        lines.append(f"| {method} | {', '.join(f'{rate:g}: {value}' for rate, value in told.items())} |")
    return lines


CHOSEN_FROM = (  # settings of `hr`, as their folders are named
    "contrast=0", "", "contrast=0.3", "contrast=1", "calibrate=1", "calibrate=1,contrast=0.3",
    "calibrate=0.5,contrast=0.3", "alpha=0.1", "alpha=0.1,calibrate=1,contrast=0.3",
)  # fmt: skip


def chosen_rows() -> list[str]:
    """Return the lines of the table of settings of `hr`, on held-out images after each task, seed by seed."""
    lines = []
    for setting in CHOSEN_FROM:
        cells = []
        for seed in (0, 1):
            folder = HELD_OUT / f"hr,{setting}{',' if setting else ''}holdout=0.1" / str(seed)
            result = json.loads((folder / "result.json").read_text())
            last = result["matrix"][-1]
            after = " ".join(f"{value:.1f}" for value in result["overall"])
            cells.append(f"{after} ({fmean(last[:-1]):.0f} / {last[-1]:.0f})")
        name = " ".join(f"`{knob}`" for knob in setting.split(",")) if setting else "`hr`"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def hundred_rows() -> list[str]:
    """Return the lines of the table of settings of `hr` with all classes of cifar100-10x10, on held-out images."""
    lines = []
    for name, setting in (("`hr`", ""), ("`calibrate=1` `contrast=0.3`", "calibrate=1,contrast=0.3,")):
        folder = RESULTS / "cifar100-held-out" / f"hr,batch_size=32,{setting}holdout=0.1,network=resnet8/0"
        result = json.loads((folder / "result.json").read_text())
        last = result["matrix"][-1]
        cells = [f"{value:.1f}" for value in result["overall"]]
        ends = [f"{fmean(last[:-1]):.1f} / {last[-1]:.1f}", f"{result['forgetting']:.1f}"]
        lines.append(f"| {' | '.join([name, *cells, *ends])} |")
    return lines


if __name__ == "__main__":
    print("\n".join([*accuracy_rows(), "", *rate_rows(), "", *chosen_rows(), "", *hundred_rows()]))
