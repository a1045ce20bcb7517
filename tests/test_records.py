"""Records: what is sent, stored and weighed comes back as it was."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fcil import records
from fcil.errors import UserError
from fcil.records import (
    ByClass,
    Done,
    Weights,
    flatten,
    keep_no_more,
    read_tensors,
    record,
    size_in_bytes,
    unflatten,
    write_tensors,
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool)


@record
class Everything:
    """A field of every kind that a record may have; some names begin like others."""

    tensor: Tensor
    weights: Weights
    weights2: Weights
    classes: ByClass
    count: int
    share: float
    done: bool


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    made = (1000 * torch.randn(shape, generator=generator)).to(torch.int64 if dtype == torch.uint8 else dtype)
    made = made.to(dtype)
    if made.is_floating_point() and made.numel() and draw(st.booleans()):
        made.view(-1)[0] = draw(st.sampled_from([float("nan"), float("inf"), -0.0]))
    return made.transpose(0, -1) if made.ndim > 1 and draw(st.booleans()) else made


def records_of_everything() -> st.SearchStrategy[Everything]:
    names = st.text("abc./_ é", min_size=1, max_size=8)
    return st.builds(
        Everything,
        tensor=tensors(),
        weights=st.dictionaries(names, tensors(), max_size=3),
        weights2=st.dictionaries(names, tensors(), max_size=2),
        classes=st.dictionaries(st.integers(0, 300), tensors(), max_size=3),
        count=st.integers(-(2**63), 2**63 - 1),
        share=st.floats(),
        done=st.booleans(),
    )


def same_bits(one: Tensor, other: Tensor) -> bool:
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)


def same(one: object, other: object) -> bool:
    left, right = flatten(one), flatten(other)
    return type(one) is type(other) and left.keys() == right.keys() and all(same_bits(left[n], right[n]) for n in left)


@settings(max_examples=60, deadline=None)
@given(records_of_everything())
def test_flatten_and_back_is_the_same_record(rec: Everything) -> None:
    back = unflatten(Everything, flatten(rec))
    assert same(rec, back)
    assert list(back.weights) == list(rec.weights) and list(back.classes) == list(rec.classes)
    for name, kind in (("count", int), ("share", float), ("done", bool)):
        assert type(getattr(back, name)) is kind


@settings(max_examples=60, deadline=None)
@given(records_of_everything())
def test_a_record_weighs_what_its_tensors_and_numbers_weigh(rec: Everything) -> None:
    held = [rec.tensor, *rec.weights.values(), *rec.weights2.values(), *rec.classes.values()]
    assert size_in_bytes(rec) == sum(t.numel() * t.element_size() for t in held) + 8 + 8 + 1


@settings(max_examples=30, deadline=None)
@given(rec=records_of_everything())
def test_a_file_gives_the_same_record_back(rec: Everything, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("records") / "file.safetensors"
    write_tensors(path, flatten(rec), {"who": "ödi"})
    flat, facts = read_tensors(path)
    assert same(rec, unflatten(Everything, flat)) and facts == {"who": "ödi"}


def test_equal_records_leave_equal_files(tmp_path: Path) -> None:
    tensors, facts = {"b": torch.ones(3), "a": torch.zeros(2)}, {f"fact {n}": 'ö "1"\n' for n in range(9)}
    for name, order in (("one", facts), ("other", dict(reversed(facts.items())))):
        write_tensors(tmp_path / name, tensors, order)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert read_tensors(tmp_path / "one")[1] == facts


def test_an_empty_record_can_be_sent_and_stored(tmp_path: Path) -> None:
    write_tensors(tmp_path / "done", flatten(Done()))
    assert read_tensors(tmp_path / "done") == ({}, {})
    assert unflatten(Done, {}) == Done() and size_in_bytes(Done()) == 0


def test_tensors_that_share_storage_are_stored_each(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    flat = {"whole": whole, "again": whole, "row": whole[1], "turned": whole.T, "spread": whole[:, :1].expand(3, 4)}
    write_tensors(tmp_path / "shared", flat)
    back, _ = read_tensors(tmp_path / "shared")
    assert back.keys() == flat.keys() and all(torch.equal(back[name], flat[name]) for name in flat)


def test_gradients_are_left_behind(tmp_path: Path) -> None:
    write_tensors(tmp_path / "leaf", {"w": torch.ones(2, requires_grad=True)})
    assert not read_tensors(tmp_path / "leaf")[0]["w"].requires_grad


def broken(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def tear(path: Path, *_: object) -> None:
    Path(path).write_bytes(b"half")
    broken()


@pytest.mark.parametrize("where", ["save_file", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    write_tensors(path, {"w": torch.ones(3)})
    if where == "save_file":
        monkeypatch.setattr(records, "save_file", lambda flat, partial, facts: tear(partial))
    else:
        monkeypatch.setattr("fcil.files.os.fsync", broken)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(path, {"w": torch.zeros(3)})
    assert torch.equal(read_tensors(path)[0]["w"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_write_takes_the_place_of_the_old_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_tensors(path, {"w": torch.ones(3)})
    content = path.read_bytes()
    with path.open("rb") as reader:
        write_tensors(path, {"w": torch.zeros(3)})
        assert reader.read() == content, "whoever reads the old file reads it to its end"
    assert torch.equal(read_tensors(path)[0]["w"], torch.zeros(3)) and [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_write_that_is_interrupted_never_shows_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(partial: Path) -> None:
        Path(partial).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(records, "save_file", lambda flat, partial, facts: killed(partial))
    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "state", {"w": torch.zeros(3)})
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007])
def test_those_may_read_a_file_whom_the_umask_lets(umask: int, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors.partial").touch(mode=0o600)  # left by a process that was killed
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "a.safetensors", {"a": torch.ones(3)})
        (tmp_path / "beside").touch()
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "beside").stat().st_mode


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        write_tensors(tmp_path / "nowhere" / "state", {"w": torch.zeros(3)})


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_torn_file_is_refused(share: float, tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_tensors(path, {"w": torch.ones(1000), "b": torch.ones(10)})
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        read_tensors(path)


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello, I am not a tensor at all")
    for path in (tmp_path / "text", tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="not a readable safetensors file"):
            read_tensors(path)


@pytest.mark.parametrize(
    "kind", [str, list, object, dict, dict[str, int], list[Tensor], Tensor | None, tuple[int, int]]
)
def test_a_record_refuses_what_cannot_travel(kind: object) -> None:
    with pytest.raises(TypeError, match=r"Bad\.wrong: a record holds tensors, dicts of tensors and numbers"):
        record(type("Bad", (), {"__annotations__": {"fine": int, "wrong": kind}}))


def test_a_value_of_another_kind_than_declared_is_not_sent() -> None:
    with pytest.raises(KeyError):
        flatten(records.Update({}, "three"))  # type: ignore[arg-type]


def test_a_missing_field_is_not_made_up() -> None:
    flat = flatten(records.Update({"w": torch.ones(1)}, 3))
    del flat["count"]
    with pytest.raises(KeyError, match="count"):
        unflatten(records.Update, flat)


def test_a_record_is_a_plain_dataclass() -> None:
    assert [f.name for f in dataclasses.fields(records.Update)] == ["weights", "count"]
    assert records.Update({}, 3) == records.Update({}, count=3)


def test_a_record_holds_no_more_than_it_weighs() -> None:
    rows = torch.arange(100.0)
    kept = Everything(rows[:2], {"w": rows}, {}, {3: rows[5:6], 4: torch.ones(2)}, 7, 0.5, True)
    whole, before = kept.weights["w"], flatten(kept)
    keep_no_more(kept)
    after = flatten(kept)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in after)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in after.values())
    assert kept.weights["w"] is whole and (kept.count, kept.share, kept.done) == (7, 0.5, True)
