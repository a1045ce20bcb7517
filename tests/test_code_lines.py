"""Lines of code: which count, and that it does not matter which block they stand in."""

from pathlib import Path

import pytest

import fcil
from fcil.report import code_lines as counting
from fcil.report.code_lines import Lines, code_lines, lines_of, used

SOURCE = '''"""A docstring
of two lines."""

# a comment
import fcil.blocks.losses  # counted: there is code before it
from fcil.blocks.rates import (
    coding_rate,
)


class A:
    """A docstring."""

    x = """a value
    of two lines"""

    def f(self):
        """A docstring."""
        return 1; "no docstring"
'''

METHOD = """
from fcil.blocks import inversion
from fcil.blocks.losses import loss
from fcil.records import record

def learn(setting):
    return loss(inversion.LeNet), setting.classifier()
"""
MOVING = "@cache\ndef moving():\n    return 1\n"
ROOMS = {
    "fcil.methods.m": METHOD,
    "fcil.blocks.losses": "from fcil.blocks.rates import RATE\ndef loss():\n    return moving() + RATE\n" + MOVING,
    "fcil.blocks.rates": "from fcil.blocks.losses import loss\nRATE, other = 1, loss\nclass Unused:\n    x = 1\n",
    "fcil.blocks.inversion": "def unused():\n    return 1\nclass LeNet:\n    unused = 1\n",
    "fcil.method": "from fcil.networks import Net\nclass Setting:\n    def classifier(self):\n        return Net()\n",
    "fcil.networks": "from fcil.networks.heads import Net\n",
    "fcil.networks.heads": "class Net:\n    pass\n",
}


def test_lines_are_code() -> None:
    assert code_lines(SOURCE) == 4 + 1 + 2 + 2
    assert code_lines("") == code_lines('"""Only words."""\n# and more\n\n') == 0
    assert code_lines("x = 1\n\n\ny = 2  # two\n") == 2


def test_what_a_method_uses_is_followed_from_name_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "source_of", ROOMS.__getitem__)
    assert used("fcil.methods.m") == {
        "fcil.blocks.losses": {2, 3, 4, 5, 6},
        "fcil.blocks.rates": {2},
        "fcil.blocks.inversion": {3, 4},
        "fcil.networks.heads": {1, 2},
    }
    assert lines_of("fcil.methods.m") == Lines(5, 10)


def test_moving_a_definition_from_one_block_to_another_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {name: source.replace(MOVING, "") for name, source in ROOMS.items()}
    moved["fcil.blocks.losses"] = "from fcil.blocks.codec import moving\n" + moved["fcil.blocks.losses"]
    moved["fcil.blocks.codec"] = "def unused():\n    return 2\n" + MOVING
    monkeypatch.setattr(counting, "source_of", moved.__getitem__)
    assert used("fcil.methods.m")["fcil.blocks.codec"] == {3, 4, 5}
    assert lines_of("fcil.methods.m") == Lines(5, 10)


def test_a_methods_own_lines_are_those_of_its_file() -> None:
    text = (Path(fcil.__file__).parent / "methods/lwf.py").read_text()
    found = lines_of("fcil.methods.lwf")
    assert found.own == code_lines(text) and 40 < found.own < len(text.splitlines())
    assert {"fcil.blocks.losses", "fcil.blocks.training", "fcil.networks.heads"} <= used("fcil.methods.lwf").keys()
    assert "fcil.blocks.exemplars" not in used("fcil.methods.lwf")
