"""Fill in the learning rates that did best on held-out images.

`python3 benchmarks/h200/chosen.py RUNS LIST` prints LIST with each `lr=chosen` replaced, by the runs with `holdout`
under RUNS; where there is none of a method, its default stands. With `further` behind it, it prints a line of LIST for
each method whose best rate is the smallest or the largest one tried so far, with a rate beyond it.
"""

import json
import re
import sys
import tomllib
from pathlib import Path


def tried(runs: Path) -> dict[str, dict[float, float]]:
    """Return held-out accuracy by method and rate."""
    found: dict[str, dict[float, float]] = {}
    for path in runs.rglob("result.json"):
        config = tomllib.loads((path.parent / "config.toml").read_text())
        if config["benchmark"]["holdout"]:
            rates = found.setdefault(config["method"], {})
            rates[config["config"]["lr"]] = json.loads(path.read_text())["final"]
    return found


def filled(line: str, found: dict[str, dict[float, float]]) -> str:
    """Return a line of a list with the best rate of its method."""
    rates = found.get(line.split()[0])
    if rates is None:
        return line.replace(" --set lr=chosen", "")
    return line.replace("lr=chosen", f"lr={max(rates, key=rates.__getitem__):g}")


def further(lines: list[str], found: dict[str, dict[float, float]]) -> list[str]:
    """Return runs with rates beyond those tried, where the best one is at an end."""
    more = []
    for method, rates in sorted(found.items()):
        best = max(rates, key=rates.__getitem__)
        beyond = 3 if best == max(rates) else 1 / 3 if best == min(rates) else None
        line = next((line for line in lines if line.split()[0] == method), None)
        if beyond is not None and line is not None:
            more.append(re.sub(r"lr=\S+", f"lr={best * beyond:.2g}", line))
    return more


if __name__ == "__main__":
    runs, path, *rest = sys.argv[1:]
    lines = [line for line in Path(path).read_text().splitlines() if line and not line.startswith("#")]
    found = tried(Path(runs))
    print("\n".join(further(lines, found) if rest == ["further"] else [filled(line, found) for line in lines]))
