"""Fill in the learning rates that did best on held-out images.

`python3 benchmarks/h200/chosen.py LIST RUNS...` prints LIST with each `lr=chosen` replaced, by the runs of the first
task with `holdout` under RUNS. With `--further` it prints a line of LIST for each method of which three rates were
tried and the smallest or the largest did best, with a rate beyond it.
"""

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def tried(runs: Sequence[Path]) -> dict[str, dict[float, float]]:
    """Return held-out accuracy by method and rate."""
    found: dict[str, dict[float, float]] = {}
    for path in (path for folder in runs for path in folder.rglob("result.json")):
        config = tomllib.loads((path.parent / "config.toml").read_text())
        if config["benchmark"]["holdout"] and config["benchmark"]["stop_after"] == 1:
            rates = found.setdefault(config["method"], {})
            rates[config["config"]["lr"]] = json.loads(path.read_text())["final"]
    return found


def filled(line: str, found: dict[str, dict[float, float]]) -> str:
    """Return a line of a list with the best rate of its method."""
    if "lr=chosen" not in line:
        return line
    method = line.split()[0]
    if method not in found:
        sys.exit(f"no rate of {method} was tried on held-out images here; do first: session.sh rates LIST K S")
    rates = found[method]
    best = max(rates, key=rates.__getitem__)
    if best in (min(rates), max(rates)):
        print(f"{method}: {best:g} is the best rate, and the last one tried", file=sys.stderr)
    return line.replace("lr=chosen", f"lr={best:g}")


def further(lines: list[str], found: dict[str, dict[float, float]]) -> list[str]:
    """Return runs with rates beyond those tried, where the best one is at an end."""
    more = []
    for method, rates in sorted(found.items()):
        best = max(rates, key=rates.__getitem__)
        beyond = 3 if best == max(rates) else 1 / 3 if best == min(rates) else None
        line = next((line for line in lines if line.split()[0] == method), None)
        if beyond is not None and line is not None and len(rates) > 2:
            more.append(re.sub(r"lr=\S+", f"lr={best * beyond:.2g}", line))
    return more


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("list", type=Path)
    words.add_argument("runs", type=Path, nargs="+")
    words.add_argument("--further", action="store_true")
    given = words.parse_args()
    lines = [line for line in given.list.read_text().splitlines() if line and not line.startswith("#")]
    found = tried(given.runs)
    print("\n".join(further(lines, found) if given.further else [filled(line, found) for line in lines]))
