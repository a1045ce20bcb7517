"""Knobs: settings that explain themselves and refuse what makes no sense."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcil.errors import UserError
from fcil.knobs import Knob, changed, knob, knobs
from fcil.methods import METHODS, OVERRIDDEN, method
from fcil.scenario.benchmarks import BENCHMARKS, PROTOCOLS, Benchmark, Protocol


@dataclass(frozen=True)
class Settings:
    rate: float = knob(0.1, "how fast", above=0, most=1)
    part: float = knob(0.1, "how much", least=0, below=1)
    count: int = knob(3, "how many", least=0)
    free: float = knob(0.0, "any number")
    shuffle: bool = knob(True, "in random order")
    how: str = knob("mean", "which way", choices=("mean", "median"))
    note: str = knob("", "what you like")


SETTINGS = {
    **{f"{name}.Config": type(method(name).config()) for name in METHODS},
    "Protocol": Protocol,
    "Benchmark": Benchmark,
}
EVERY_KNOB = [
    pytest.param(one, id=f"{where}.{name}") for where, cls in SETTINGS.items() for name, one in knobs(cls).items()
]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rate", "0.5", 0.5),
        ("rate", "1", 1.0),
        ("rate", "1e-3", 0.001),
        ("count", "0", 0),
        ("count", " 12 ", 12),
        ("free", "-7.5", -7.5),
        ("shuffle", "true", True),
        ("shuffle", "No", False),
        ("shuffle", "1", True),
        ("how", "median", "median"),
        ("note", "anything, 1=2", "anything, 1=2"),
    ],
)
def test_text_is_read(name: str, text: str, value: object) -> None:
    read = getattr(changed(Settings(), {name: text}), name)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rate", "0", "numbers above 0 and at most 1"),
        ("rate", "1.01", "numbers above 0 and at most 1"),
        ("rate", "fast", "numbers above 0 and at most 1"),
        ("rate", "", "numbers above 0 and at most 1"),
        ("rate", "nan", "numbers above 0 and at most 1"),
        ("rate", True, "numbers above 0 and at most 1"),
        ("part", "1", "numbers at least 0 and below 1"),
        ("free", "nan", "numbers"),
        ("free", "inf", "numbers"),
        ("free", "-inf", "numbers"),
        ("free", "1e400", "numbers"),
        ("free", float("nan"), "numbers"),
        ("free", 10**400, "numbers"),
        ("count", "-1", "whole numbers at least 0"),
        ("count", str(2**53), "whole numbers at least 0, below 2^53"),
        ("count", 10**21, "whole numbers at least 0, below 2^53"),
        ("count", "1.5", "whole numbers at least 0"),
        ("count", 1.0, "whole numbers at least 0"),
        ("count", True, "whole numbers at least 0"),
        ("count", None, "whole numbers at least 0"),
        ("shuffle", "maybe", "true, false"),
        ("shuffle", 1, "true, false"),
        ("how", "Mean", "mean, median"),
        ("how", 3, "mean, median"),
        ("note", 3, "any text"),
        ("note", ["a"], "any text"),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(name: str, value: object, allowed: str) -> None:
    with pytest.raises(UserError) as refusal:
        changed(Settings(), {name: value})
    said, _, rest = str(refusal.value).partition(" is not allowed; ")
    assert rest == f"{name} takes {allowed}"
    assert said == f"{name}={value}" or float(said.removeprefix(f"{name}=")) == float(value)


@given(st.floats())
def test_a_number_passes_exactly_when_it_is_in_range(value: float) -> None:
    try:
        assert knobs(Settings)["rate"].check(value) == value and 0 < value <= 1
    except UserError:
        assert not 0 < value <= 1


def test_values_of_their_own_type_pass_and_the_original_stays() -> None:
    before = Settings()
    after = changed(before, {"count": 7, "rate": 1, "shuffle": False})
    assert (after.count, after.rate, after.shuffle) == (7, 1.0, False) and type(after.rate) is float
    assert before == Settings() and after.how == before.how


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"there is no setting 'rat'; did you mean 'rate'\? allowed: rate, part, count, free"
    ):
        changed(Settings(), {"rat": "1"})
    with pytest.raises(UserError, match=r"no setting 'zzz'; allowed: rate"):
        changed(Settings(), {"zzz": "1"})


@pytest.mark.parametrize("one", EVERY_KNOB)
def test_every_knob_has_a_meaning_and_a_default_that_passes(one: Knob) -> None:
    assert one.meaning and one.meaning == one.meaning.strip() and not one.meaning.endswith(".")
    assert one.kind in (int, float, bool, str)
    assert one.check(one.default) == one.default
    assert type(one.default) is one.kind
    assert one.read(str(one.default)) == one.default


@pytest.mark.parametrize("settings", [*BENCHMARKS.values(), *PROTOCOLS.values()], ids=lambda s: s.name)
def test_every_named_benchmark_and_protocol_passes_its_own_check(settings: Benchmark | Protocol) -> None:
    values = {name: getattr(settings, name) for name in knobs(type(settings))}
    assert changed(settings, values) == settings


@pytest.mark.parametrize("name", METHODS)
def test_no_two_knobs_that_can_be_set_share_a_name(name: str) -> None:
    """But a method may have a protocol's knob as its own, with another default, where its Fits go by it."""
    config = set(knobs(SETTINGS[f"{name}.Config"])) - OVERRIDDEN
    protocol, benchmark = set(knobs(Protocol)) - {"name"}, set(knobs(Benchmark)) - {"name", "protocol"}
    assert not config & protocol and not config & benchmark and not protocol & benchmark
    assert "name" not in config and "protocol" not in config and "seed" not in config
