"""docs/claims.md: its numbers are those of results/, its methods and settings exist, and every row has a verdict."""

import re
from pathlib import Path
from typing import Any

import pytest

import fcil
from fcil.methods import METHODS
from fcil.plan import plan
from fcil.report.apart import mended_later
from fcil.report.comparison import compare
from fcil.report.drawing import Chart
from fcil.report.evidence import gather
from fcil.results.runs import find

ROOT = Path(fcil.__file__).parent.parent
TEXT = (ROOT / "docs/claims.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if line.startswith("| **")]
VERDICTS = ("holds", "in part", "not seen", "fails", "open")
TOPICS = (
    "Descent", "10x memory", "Latents as good as perfect", "Order of families", "Without latents",
    "Without distillation", "Without global replay", "RFA", "HR-mini", "Less forgetting", "Less compute",
    "Privacy order",
)  # fmt: skip


@pytest.mark.parametrize("topic", TOPICS)
def test_every_claim_has_a_row(topic: str) -> None:
    assert any(f"**{topic}" in row[0] for row in ROWS)


def test_every_row_has_a_command_and_a_verdict() -> None:
    assert len(ROWS) >= 18
    for claim, command, measured, verdict in ROWS:
        said = re.findall(r"\*\*([a-z ]+)\*\*", verdict)
        assert said and set(said) <= set(VERDICTS), claim
        assert command.startswith(("`", "the same")), claim
        assert (measured == "not measured yet") == (said == ["open"]), claim


def test_its_numbers_on_digits_are_those_of_the_runs() -> None:
    (section,) = compare(find([ROOT / "results/digits"])).sections
    measured = {row.method: str(row.final) for row in section.rows if not row.settings}
    told = re.findall(r"`([\w-]+)` (\d+\.\d ± \d+\.\d)", TEXT)
    assert len(told) > 25
    for method, value in told:
        assert measured[method] == value, method
    forgotten = {row.method: f"{row.forgetting.mean:.1f}" for row in section.rows if not row.settings}
    for method, value in (("hr", "0.6"), ("dde", "2.9"), ("icarl", "3.3"), ("hr-literal", "28.3"), ("target", "15.8")):
        assert forgotten[method] == value


def test_whether_confusion_is_mended_later_is_as_the_ledgers_have_it() -> None:
    (found,), left_out = gather([ROOT / "results/digits" / method for method in ("hr", "hr-literal", "finetune")])
    assert left_out == []
    drawn = mended_later(found)
    assert isinstance(drawn, Chart)
    at_its_end, later = (dict(zip(*_named(trace), strict=True)) for trace in drawn.figure.data)
    (row,) = (row for row in ROWS if "Repaired one task later" in row[0])
    for method in ("hr", "hr-literal"):
        assert f"{method} {at_its_end[method]} and {later[method]}" in row[2]
    assert f"(finetune) {at_its_end['finetune']} and {later['finetune']}" in row[2]


def _named(trace: Any) -> tuple[list[str], list[str]]:
    """Return the methods of a trace, and what it says of each to three digits."""
    values = zip(trace.x, trace.error_x.array, strict=True)
    return [label for label, _ in trace.customdata], [f"{mean:.3f} ± {sem:.3f}" for mean, sem in values]


def test_every_method_and_setting_in_a_command_is_there() -> None:
    commands = re.findall(r"`(fcil [^`]*)`", TEXT)
    assert len(commands) > 15
    for command in commands:
        methods = re.findall(r"--methods ([\w,-]+)|fcil run ([\w-]+)", command)
        for name in (name for pair in methods for names in pair for name in names.split(",") if name):
            settings = dict(word.split("=", 1) for word in re.findall(r"--set (\S+)", command))
            assert name in METHODS and plan(name, settings={k: v.split(",")[0] for k, v in settings.items()})
