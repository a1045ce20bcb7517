"""The lists of runs for a borrowed GPU: a word misspelt there would cost its time."""

import json
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from fcil.plan import Plan, plan
from fcil.terminal import settings_of

LISTS = sorted((Path(__file__).parents[1] / "benchmarks" / "h200").glob("*.txt"))


def planned(line: str) -> Plan:
    words = ArgumentParser()
    words.add_argument("method")
    words.add_argument("--benchmark", required=True)
    words.add_argument("--protocol")
    words.add_argument("--seed", type=int, required=True)
    words.add_argument("--set", action="append", default=[])
    given = words.parse_args(shlex.split(line.replace("lr=chosen", "lr=0.1")))
    return plan(given.method, given.benchmark, given.protocol, given.seed, settings_of(given.set))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_line_is_a_run_of_its_own(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    folders = [planned(line).folder() for line in lines]
    assert lines and len(set(folders)) == len(folders)


def test_a_rate_is_chosen_by_what_held_out_images_say_and_sought_beyond_the_last_tried(tmp_path: Path) -> None:
    def tried(method: str, rate: float, final: float, holdout: float = 0.1, stop_after: int = 1) -> None:
        folder = tmp_path / "runs" / f"{method},{rate},{holdout},{stop_after}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"final": final}))
        said = f"holdout = {holdout}\nstop_after = {stop_after}\n"
        (folder / "config.toml").write_text(f'method = "{method}"\n[benchmark]\n{said}[config]\nlr = {rate}\n')

    def said(*words: str) -> subprocess.CompletedProcess[str]:
        tool = [sys.executable, str(LISTS[0].parent / "chosen.py"), *words]
        return subprocess.run(tool, cwd=tmp_path, capture_output=True, text=True)

    for method, finals in (("icarl", (70, 75, 71)), ("podnet", (40, 42, 45)), ("dde", (50, 49, 40)), ("bic", (1, 2))):
        for rate, final in zip((0.1, 0.3, 1.0), finals, strict=False):
            tried(method, rate, final)
    tried("icarl", 9.0, 99, holdout=0.0)
    tried("icarl", 27.0, 99, stop_after=5)
    end = "--benchmark digits --seed 0"
    names = ("icarl", "podnet", "dde")
    (tmp_path / "list.txt").write_text(
        "\n".join(["# which", *(f"{m} {end} --set lr=chosen" for m in names), f"hr {end}"])
    )
    rates = (f"{method} {end} --set lr=5 --set holdout=0.1" for method in (*names, "bic"))
    (tmp_path / "rates.txt").write_text("\n".join(rates))
    (tmp_path / "untried.txt").write_text(f"ssil {end} --set lr=chosen\n")

    filled = [f"icarl {end} --set lr=0.3", f"podnet {end} --set lr=1", f"dde {end} --set lr=0.1", f"hr {end}"]
    assert said("list.txt", "runs").stdout.splitlines() == filled
    beyond = [f"dde {end} --set lr=0.033 --set holdout=0.1", f"podnet {end} --set lr=3 --set holdout=0.1"]
    assert said("--further", "rates.txt", "none", "runs").stdout.splitlines() == beyond
    wrong = said("untried.txt", "runs")
    assert wrong.returncode == 1 and wrong.stdout == "" and wrong.stderr.startswith("no rate of ssil was tried")
