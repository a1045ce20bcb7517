"""Class names and their slots."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from fcil.deploy.registry import Registry, alike, normal, room_for


def test_a_name_keeps_its_slot_for_ever() -> None:
    registry = Registry()
    registry.hear(["dog", "cat"])
    assert registry.take(1) == (0,) and registry.names == ["cat"]
    registry.hear(["ant", "cat", "dog"])
    assert registry.take(10) == (1, 2)
    assert registry.slots() == {"cat": 0, "dog": 1, "ant": 2}
    assert registry.take(10) == () and not registry.unknown(["cat", "ant"]) and registry.unknown(["bee"])


def test_two_ways_to_write_an_umlaut_are_one_class() -> None:
    registry = Registry()
    composed, decomposed = unicodedata.normalize("NFC", "Häher"), unicodedata.normalize("NFD", "Häher")
    assert composed != decomposed
    assert registry.hear([composed, decomposed, " Häher "]) == []
    assert registry.waiting == [composed]


def test_names_that_look_alike_are_warned_about_and_stay_two_classes() -> None:
    registry = Registry()
    registry.hear(["sea lion"])
    registry.take(10)
    (warning,) = registry.hear(["Sea_Lion"])
    assert "'Sea_Lion' looks like 'sea lion'" in warning
    assert registry.waiting == ["Sea_Lion"]
    assert registry.hear(["Sea_Lion"]) == []  # said once


@given(st.lists(st.text(max_size=8)), st.lists(st.text(max_size=8)))
def test_slots_never_move_whatever_names_come(first: list[str], then: list[str]) -> None:
    registry = Registry()
    registry.hear(first)
    registry.take(3)
    before = registry.slots()
    registry.hear(then)
    registry.take(1000)
    assert {name: registry.slots()[name] for name in before} == before
    assert len(set(registry.names)) == len(registry.names)
    assert set(registry.names) == {normal(name) for name in first + then}


@given(st.text())
def test_a_normal_name_is_normal_and_alike_to_itself(name: str) -> None:
    assert normal(normal(name)) == normal(name)
    assert alike(normal(name)) == alike(normal(normal(name)))


def test_tables_double_until_all_classes_have_room() -> None:
    assert [room_for(n, 4) for n in (1, 4, 5, 8, 9, 33)] == [4, 4, 8, 8, 16, 64]
