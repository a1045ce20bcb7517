"""A node's own images."""

import shutil
from pathlib import Path

import pytest
import torch

from fcil.deploy.folders import Arrivals, check_folder, inventory
from fcil.errors import UserError
from tests.deployment.conftest import digits_into


def arrivals(tmp_path: Path) -> Arrivals:
    return Arrivals(tmp_path / "data", tmp_path / "state", 8)


def test_names_and_counts_are_told_without_reading_images(tmp_path: Path) -> None:
    digits_into(tmp_path, (0, 1), 0, 5)
    (tmp_path / "null" / "broken.png").write_bytes(b"no image")
    (tmp_path / "empty").mkdir()
    assert inventory(tmp_path) == {"null": 6, "eins": 5}


def test_about_a_tenth_is_held_out_and_never_trained_on(tmp_path: Path) -> None:
    digits_into(tmp_path / "data", (0, 1), 0, 150)
    found = arrivals(tmp_path).of(0, {"null": 0, "eins": 1})
    assert len(found.labels) + len(found.answers) == 300
    assert 15 < len(found.answers) < 50
    trained = {image.numpy().tobytes() for image in found.images}
    assert not trained & {image.numpy().tobytes() for image in found.tested}


def test_what_is_held_out_does_not_depend_on_names_or_neighbours(tmp_path: Path) -> None:
    digits_into(tmp_path / "data", (0,), 0, 60)
    digits_into(tmp_path / "other" / "data", (0,), 0, 120)
    for n, file in enumerate(sorted((tmp_path / "data" / "null").iterdir())):
        file.rename(file.with_name(f"renamed-{n}.png"))
    few, many = (arrivals(place).of(0, {"null": 0}) for place in (tmp_path, tmp_path / "other"))
    kept = {image.numpy().tobytes() for image in many.tested}
    assert len(few.tested) > 0 and {image.numpy().tobytes() for image in few.tested} <= kept


def test_a_class_with_few_images_has_one_held_out(tmp_path: Path) -> None:
    digits_into(tmp_path / "data", (3,), 0, 2)
    found = arrivals(tmp_path).of(0, {"drei": 4})
    assert found.labels.tolist() == [4] and found.answers.tolist() == [4]


def test_only_what_has_arrived_since_the_last_task_is_data(tmp_path: Path) -> None:
    digits_into(tmp_path / "data", (0, 1), 0, 10)
    mine = arrivals(tmp_path)
    first = mine.of(0, {"null": 0})
    digits_into(tmp_path / "data", (0,), 10, 5)  # five more of a known class
    second = mine.of(1, {"null": 0, "eins": 1})
    assert set(first.labels.tolist()) == {0}
    labels = torch.cat([second.labels, second.answers])
    assert (labels == 0).sum() == 5 and (labels == 1).sum() == 10
    assert sum(len(answers) for _, answers in mine.tested()) == len(first.answers) + len(second.answers)
    assert mine.held(2) == [len(first.labels) + int((second.labels == 0).sum()), int((second.labels == 1).sum())]


def test_a_task_keeps_its_images_whatever_happens_to_the_folder(tmp_path: Path) -> None:
    digits_into(tmp_path / "data", (0,), 0, 10)
    before = arrivals(tmp_path).of(0, {"null": 0})
    shutil.rmtree(tmp_path / "data")
    after = arrivals(tmp_path).of(0, {"null": 0})
    assert torch.equal(before.images, after.images)


def test_torn_images_are_read_again_from_the_folder(tmp_path: Path) -> None:
    digits_into(tmp_path / "data", (0,), 0, 10)
    before = arrivals(tmp_path).of(0, {"null": 0}).images.clone()
    file = tmp_path / "state" / "train-0.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    assert torch.equal(before, arrivals(tmp_path).of(0, {"null": 0}).images)


def test_a_task_that_begins_anew_with_other_classes_is_read_anew(tmp_path: Path) -> None:
    digits_into(tmp_path / "data", (0, 1), 0, 10)
    mine = arrivals(tmp_path)
    assert set(mine.of(0, {"null": 0}).labels.tolist()) == {0}
    assert set(mine.of(0, {"eins": 0}).labels.tolist()) == {0}
    assert set(mine.of(0, {"eins": 0, "null": 1}).labels.tolist()) == {0, 1}


def test_unreadable_images_are_left_out_and_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    digits_into(tmp_path / "data", (0,), 0, 10)
    (tmp_path / "data" / "null" / "broken.png").write_bytes(b"no image")
    found = arrivals(tmp_path).of(0, {"null": 0})
    assert len(found.labels) + len(found.answers) == 10
    (said,) = caplog.messages
    assert said.endswith("that cannot be read as images, and are left out: 1") and str(tmp_path / "data") in said


def test_images_of_no_class_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_folder(tmp_path)  # there may be nothing yet
    (tmp_path / "loose.png").write_bytes(b"")
    with pytest.raises(UserError, match="are of no class"):
        check_folder(tmp_path)
    digits_into(tmp_path, (0,), 0, 3)
    assert caplog.messages == []
    check_folder(tmp_path)
    (said,) = caplog.messages
    assert f"images in {tmp_path} that are of no class, and not used: 1; put those of each class" in said


def test_training_images_of_an_earlier_task_go_and_held_out_ones_stay(tmp_path: Path) -> None:
    digits_into(tmp_path / "data", (0,), 0, 30)
    mine = arrivals(tmp_path)
    held_out = len(mine.of(0, {"null": 0}).answers)
    mine.forget_before(1)
    assert not (tmp_path / "state" / "train-0.safetensors").exists()
    assert [len(answers) for _, answers in mine.tested()] == [held_out]


def test_nobody_else_may_look_at_what_arrived(tmp_path: Path) -> None:
    digits_into(tmp_path / "data", (0, 1), 0, 5)
    found = arrivals(tmp_path)
    found.of(0, {"null": 0, "eins": 1})
    assert list(found.place.iterdir()) and found.place.stat().st_mode & 0o077 == 0
