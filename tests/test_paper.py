"""PAPER.md: numbered without gaps, and every place in the code that it names is there."""

import ast
import re
from pathlib import Path

import pytest

import fcil

ROOT = Path(fcil.__file__).parent
TEXT = (ROOT.parent / "PAPER.md").read_text()
ITEMS = {int(number): words for number, words in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^## |\Z)", TEXT, re.M | re.S)}
PLACE = re.compile(r"\*(HL|[a-z_\\/]+\.py):\*((?:\s+`\w+`,?)+)")


def places(words: str) -> list[tuple[str, str]]:
    """Return the (file, name) pairs that an item points at."""
    found = []
    for where, names in PLACE.findall(words):
        file = "methods/hr_literal.py" if where == "HL" else where.replace("\\", "")
        found += [(file, name) for name in re.findall(r"`(\w+)`", names)]
    return found


def defined(file: str) -> set[str]:
    """Return every function, class and module-level name that a file defines."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def test_items_are_numbered_without_gaps() -> None:
    assert list(ITEMS) == list(range(1, len(ITEMS) + 1)) and len(ITEMS) > 40


@pytest.mark.parametrize("number", [n for n in ITEMS if n not in (7, 8, 21, 43, 44)])
def test_each_item_names_places_that_exist(number: int) -> None:
    assert places(ITEMS[number]), "no place in the code"
    for file, name in places(ITEMS[number]):
        assert name in defined(file), f"{file} has no {name}"


def test_every_setting_it_names_is_one() -> None:
    from fcil.knobs import knobs
    from fcil.methods import method
    from fcil.scenario.benchmarks import Benchmark

    literal, _, ours = TEXT.partition("## What `hr` does instead")
    for name, text, least in (("hr-literal", literal, 16), ("hr", ours, 5)):
        known = {**knobs(Benchmark), **knobs(type(method(name).config()))}
        named = re.findall(r"(?:`|--set )(\w+)=([\w.-]+)", text)
        assert len(named) >= least
        for knob, value in named:
            assert known[knob].read(value) is not None, knob
