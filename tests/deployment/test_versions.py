"""A client's memory on disk: idempotent, whole, and able to go back with its server."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fcil.federation.versions import Place, Versions


def memory(n: int) -> dict[str, torch.Tensor]:
    return {"codes/3": torch.full((4,), n, dtype=torch.uint8), "count": torch.tensor(n)}


def value(found: dict[str, torch.Tensor] | None) -> int | None:
    return None if found is None else int(found["count"])


def test_nothing_is_remembered_at_first(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "none")
    assert versions.before(100) is None and versions.applied == Place(0, 0, 0)


def test_a_memory_outlasts_its_process_with_the_question_it_followed(tmp_path: Path) -> None:
    Versions(tmp_path).apply(Place(1, 0, 4), memory(4))
    again = Versions(tmp_path)
    assert value(again.before(5)) == 4 and again.before(4) is None
    assert again.applied == Place(1, 0, 4)


def test_a_question_that_changes_nothing_is_booked_all_the_same(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.apply(Place(1, 0, 4), memory(4))
    versions.apply(Place(1, 0, 5), None)
    assert versions.applied.step == 5 and value(versions.before(6)) == 4
    assert (
        versions.applied.is_after(1, 4) and not versions.applied.is_after(1, 5) and not versions.applied.is_after(2, 1)
    )


def test_a_server_that_goes_back_finds_the_memory_of_then(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    for step in (2, 4, 6):
        versions.apply(Place(1, 0, step), memory(step))
    assert value(versions.before(5)) == 4
    versions.apply(Place(2, 0, 5), None)  # the second life knows nothing of question 6
    assert value(versions.before(7)) == 4


def test_the_same_question_twice_leaves_the_same_memory(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    versions.apply(Place(1, 0, 2), memory(2))
    for _ in range(2):
        before = value(versions.before(3))
        versions.apply(Place(1, 0, 3), memory(before + 10))
    assert value(versions.before(4)) == 12


@pytest.mark.parametrize("how", ["cut", "flipped", "gone", "manifest"])
def test_a_torn_version_is_recognised_and_the_last_good_one_used(tmp_path: Path, how: str) -> None:
    versions = Versions(tmp_path)
    versions.apply(Place(1, 0, 2), memory(2))
    versions.apply(Place(1, 0, 3), memory(3))
    file = tmp_path / "memory-3.safetensors"
    content = bytearray(file.read_bytes())
    if how == "cut":
        file.write_bytes(content[:-3])
    elif how == "flipped":
        content[-1] ^= 1
        file.write_bytes(content)
    elif how == "gone":
        file.unlink()
    else:
        (tmp_path / "3.json").write_text('{"life": 1')
    assert value(versions.before(9)) == 2


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = Versions(tmp_path)
    versions.apply(Place(1, 0, 2), memory(2))
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fcil.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        versions.apply(Place(1, 0, 3), memory(3))
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before
    assert value(versions.before(9)) == 2 and versions.applied.step == 2


def test_versions_that_no_server_can_go_back_to_are_removed(tmp_path: Path) -> None:
    versions = Versions(tmp_path)
    for step in (2, 4, 6, 8):
        versions.apply(Place(1, 0, step), memory(step))
    versions.forget_before(6)
    assert versions.before(6) is None and value(versions.before(7)) == 6 and value(versions.before(9)) == 8
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("how", ["gone", "torn"])
def test_where_the_last_answer_is_lost_the_memories_tell_it(tmp_path: Path, how: str) -> None:
    versions = Versions(tmp_path)
    for life, step in ((1, 2), (1, 8), (2, 6)):
        versions.apply(Place(life, 0, step), memory(step))
    if how == "gone":
        (tmp_path / "applied.json").unlink()
    else:
        (tmp_path / "applied.json").write_text('{"lif')
    assert versions.applied == Place(2, 0, 6)
    assert versions.applied.is_after(1, 9) and versions.applied.is_after(2, 5) and not versions.applied.is_after(2, 6)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.data())
def test_whatever_is_asked_again_ends_as_if_asked_once(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], data: st.DataObject
) -> None:
    """Each question adds its number; servers that go back to a step ask all that follows again."""
    versions, life, step = Versions(tmp_path_factory.mktemp("versions")), 1, 0
    for advance in steps:
        for _ in range(advance):
            step += 1
            versions.apply(Place(life, 0, step), memory((value(versions.before(step)) or 0) + step))
        life, step = life + 1, data.draw(st.integers(0, step))
    total = value(versions.before(step + 1)) or 0
    assert total == step * (step + 1) // 2 % 256 or total == step * (step + 1) // 2


def test_nobody_else_may_look_into_a_memory(tmp_path: Path) -> None:
    Versions(tmp_path / "memory").apply(Place(1, 0, 4), memory(4))
    assert (tmp_path / "memory").stat().st_mode & 0o077 == 0
