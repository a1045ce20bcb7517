"""The lists of runs for a borrowed GPU: a word misspelt there would cost its time."""

import shlex
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
    given = words.parse_args(shlex.split(line))
    return plan(given.method, given.benchmark, given.protocol, given.seed, settings_of(given.set))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_line_is_a_run_of_its_own(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    folders = [planned(line).folder() for line in lines]
    assert lines and len(set(folders)) == len(folders)
