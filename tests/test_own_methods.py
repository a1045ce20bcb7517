"""A method file of the user's own: what is wrong with it is said when it is read."""

import re
from pathlib import Path

import pytest

from fcil.errors import UserError
from fcil.experiment import run
from fcil.methods import method
from tests.test_readme import blocks

(CODE,) = [block for block in blocks("python") if "METHOD = Method(" in block]


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (" -> Training[Update]:", ":", r"Client\.train says no type for its return"),
        ("message: Model) ->", "message) ->", r"Client\.train says no type for its message"),
        ("def broadcast(self) -> Model:", "def broadcast(self):", r"Server\.broadcast says no type for its return"),
        ("Client, Nothing)", "Client, dict)", "its memory is a dict; it must be a record"),
    ],
)
def test_records_that_cannot_be_found_are_named(right: str, wrong: str, says: str, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(CODE)
    assert method(str(own)).config().lr == 0.01
    assert right in CODE
    own.write_text(CODE.replace(right, wrong))
    with pytest.raises(UserError, match=says):
        method(str(own))


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ('load={"net"', 'load={"nett"', "a Fit loads nett; this client's networks are net"),
        ("return Update(trained.weights, trained.count)", "return {}", "answers with a dict; it must be a record"),
    ],
)
def test_answers_that_go_wrong_are_said_plainly(right: str, wrong: str, says: str, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    assert right in CODE
    own.write_text(CODE.replace(right, wrong))
    with pytest.raises(UserError, match=re.escape(says)):
        run(str(own), settings={"rounds": 1, "steps": 1}, out=tmp_path / "run", device="cpu")
