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
    for method, rate, holdout, final in (
        ("icarl", 0.3, 0.1, 70.0), ("icarl", 1.0, 0.1, 75.0), ("icarl", 3.0, 0.1, 71.0), ("icarl", 9.0, 0.0, 99.0),
        ("podnet", 0.1, 0.1, 40.0), ("podnet", 0.3, 0.1, 45.0),
    ):  # fmt: skip
        folder = tmp_path / "runs" / method / str(rate)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"final": final}))
        config = f'method = "{method}"\n[benchmark]\nholdout = {holdout}\n[config]\nlr = {rate}\n'
        (folder / "config.toml").write_text(config)
    end = "--benchmark digits --seed 0"
    chosen = [f"{method} {end} --set lr=chosen" for method in ("icarl", "podnet", "bic")]
    (tmp_path / "list.txt").write_text("\n".join(["# which", *chosen, f"dde {end}"]))
    (tmp_path / "rates.txt").write_text(
        "\n".join(f"{m} {end} --set lr=0.1 --set holdout=0.1" for m in ("icarl", "podnet"))
    )

    def said(*words: str) -> list[str]:
        tool = str(LISTS[0].parent / "chosen.py")
        done = subprocess.run(
            [sys.executable, tool, "runs", *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    assert said("list.txt") == [f"icarl {end} --set lr=1", f"podnet {end} --set lr=0.3", f"bic {end}", f"dde {end}"]
    assert said("rates.txt", "further") == [f"podnet {end} --set lr=0.9 --set holdout=0.1"]
