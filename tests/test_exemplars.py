"""How a memory is shared: never too much, fairly, and all of it."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil.blocks.codec import RawCodec
from fcil.blocks.exemplars import holdings, new_images, pictured, shares
from fcil.experiment import execute
from fcil.federation.loop import learn
from fcil.methods import METHODS
from fcil.parts import assemble
from fcil.results.gallery import Gallery
from fcil.scenario.datasets import Dataset
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import LocalData, Task
from tests.conftest import TINY, tiny_plan
from tests.test_codec import photos, psnr
from tests.test_every_method import Seen, watched

HELD = st.dictionaries(st.integers(0, 99), st.integers(0, 12), max_size=8)
ROOM, UNIT, EACH = st.integers(0, 400), st.integers(1, 20), st.integers(0, 30)


def shared(held: dict[int, int], room: int, unit: int = 1, each: int = 0, seed: int = 0) -> dict[int, int]:
    return shares(held, room, unit, each, torch.Generator().manual_seed(seed))


def cost(kept: dict[int, int], unit: int, each: int) -> int:
    """Bytes that these exemplars really take."""
    return sum(unit * n + each for n in kept.values() if n)


@settings(max_examples=200)
@given(HELD, ROOM, UNIT, EACH, st.integers(0, 9))
def test_no_class_gets_more_than_it_has_and_no_memory_is_overfull(
    held: dict[int, int], room: int, unit: int, each: int, seed: int
) -> None:
    kept = shared(held, room, unit, each, seed)
    assert kept.keys() == held.keys()
    assert all(0 <= kept[j] <= held[j] for j in held)
    assert cost(kept, unit, each) <= room


@settings(max_examples=200)
@given(HELD, ROOM, UNIT, EACH, st.integers(0, 9))
def test_a_class_that_has_more_never_keeps_two_fewer_than_another(
    held: dict[int, int], room: int, unit: int, each: int, seed: int
) -> None:
    kept = shared(held, room, unit, each, seed)
    most = max(kept.values(), default=0)
    assert all(kept[j] >= most - 1 for j in held if kept[j] < held[j])


@settings(max_examples=200)
@given(HELD, ROOM, UNIT, EACH, st.integers(0, 9))
def test_no_room_is_left_that_one_more_would_fairly_fit_in(
    held: dict[int, int], room: int, unit: int, each: int, seed: int
) -> None:
    kept = shared(held, room, unit, each, seed)
    hungry = [j for j in held if kept[j] < held[j]]
    fewest = min((kept[j] for j in hungry), default=0)
    for j in hungry:
        if kept[j] == fewest:  # one more for any other would be unfair
            assert cost({**kept, j: kept[j] + 1}, unit, each) > room


@given(st.integers(1, 8), ROOM, UNIT, EACH, st.integers(0, 9))
def test_classes_that_have_plenty_keep_equally_many(classes: int, room: int, unit: int, each: int, seed: int) -> None:
    kept = shared(dict.fromkeys(range(classes), 1000), room, unit, each, seed)
    level = max(0, (room // classes - each) // unit)
    assert set(kept.values()) <= {level, level + 1}
    more = sum(n > level for n in kept.values())
    left = room - cost(dict.fromkeys(kept, level), unit, each)
    assert more == left // (unit + (0 if level else each)) < classes


def test_enough_room_keeps_all() -> None:
    held = {4: 3, 1: 0, 7: 10}
    assert shared(held, 13 * 5 + 2 * 4, unit=5, each=4) == held == shared(held, 10**6, unit=5, each=4)
    assert sum(shared(held, 13 * 5 + 2 * 4 - 1, unit=5, each=4).values()) == 12


def test_what_small_classes_leave_goes_to_the_others() -> None:
    assert shared({0: 1, 1: 100, 2: 100}, room=21) == {0: 1, 1: 10, 2: 10}
    assert shared({0: 1, 1: 2, 2: 100}, room=21) == {0: 1, 1: 2, 2: 18}
    assert shared({0: 0, 1: 100}, room=7) == {0: 0, 1: 7}


def test_by_hand_with_a_price_for_each_class() -> None:
    # 10 bytes an exemplar and 4 a class: two of each class take 2 * 24 bytes; 12 left are one more for one of them
    assert sorted(shared({0: 9, 1: 9}, room=60, unit=10, each=4).values()) == [2, 3]
    assert shared({0: 9, 1: 9}, room=57, unit=10, each=4) == {0: 2, 1: 2}
    assert sorted(shared({0: 9, 1: 9}, room=27, unit=10, each=4).values()) == [0, 1]  # a second class would take 28
    assert shared({0: 9, 1: 9}, room=28, unit=10, each=4) == {0: 1, 1: 1}
    assert shared({0: 9, 1: 9}, room=13, unit=10, each=4) == {0: 0, 1: 0}


def test_where_not_every_class_fits_some_are_drawn_that_keep_one() -> None:
    held = dict.fromkeys(range(10), 5)
    drawn = Counter[int]()
    for seed in range(100):
        kept = shared(held, room=3, seed=seed)
        assert sorted(kept.values()) == [0] * 7 + [1] * 3
        drawn.update(kept)
    assert len(drawn) == 10 and all(10 <= times <= 60 for times in drawn.values())  # 30 on average


def test_the_rest_goes_to_classes_drawn_at_random() -> None:
    drawn = Counter[int]()
    for seed in range(100):
        kept = shared({0: 9, 1: 9, 2: 9, 3: 2}, room=10, seed=seed)
        assert kept[3] == 2 and sorted(kept.values()) == [2, 2, 3, 3]  # the last class has no more
        drawn.update({j: kept[j] - 2 for j in kept})
    assert all(40 <= drawn[j] <= 90 for j in (0, 1, 2))  # 67 on average


@pytest.mark.parametrize("room", [3, 23])
def test_equal_generators_draw_the_same_classes_and_others_others(room: int) -> None:
    held = dict.fromkeys(range(10), 50)
    assert shared(held, room, seed=4) == shared(held, room, seed=4)
    assert len({tuple(shared(held, room, seed=seed).items()) for seed in range(10)}) > 5


def test_nothing_is_shared_out_where_nothing_is_held_or_there_is_no_room() -> None:
    assert shared({}, 100) == {}
    assert shared({3: 0, 5: 0}, 100) == {3: 0, 5: 0}
    assert shared({3: 4, 5: 6}, 0) == {3: 0, 5: 0}


def test_an_exemplar_is_shown_beside_the_image_it_came_from() -> None:
    images = torch.randint(0, 256, (6, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = LocalData(Task(1, ((0,), (3, 4))), images, torch.tensor([3, 3, 3, 4, 4, 4]))
    codec = RawCodec((1, 8, 8))
    kept = codec.encode({}, images)
    real, shown = pictured(codec, {}, {0: kept[5:], 3: kept[2:], 9: kept[:1]}, data, (0, 3, 4))
    assert torch.equal(real[3], images[2]) and torch.equal(shown[3], images[2])
    assert torch.equal(shown[0], images[5]) and 0 not in real  # an old class
    assert torch.equal(real[4], images[3]) and 4 not in shown and 9 not in shown


KEEP_EXEMPLARS = [name for name, entry in METHODS.items() if entry.family == "exemplars"]


@pytest.mark.parametrize("method", KEEP_EXEMPLARS)
def test_the_old_model_goes_only_to_those_who_train_under_it(method: str) -> None:
    parts, _ = watched(method)
    asked: list[Seen] = parts.transport.seen  # type: ignore[attr-defined]
    old = {seen.handler for seen in asked if any(name.startswith(("old_weights/", "best_")) for name in seen.sent)}
    assert old == {"train"} and "remember" in {seen.handler for seen in asked}


@pytest.mark.parametrize("method", KEEP_EXEMPLARS)
def test_a_run_shows_what_exemplars_look_like_through_a_codec(method: str, tmp_path: Path) -> None:
    list(execute(tiny_plan(method, exemplar_codec="dct:20", tasks=2), tmp_path, "cpu", workers=1))
    assert (tmp_path / "replay.png").stat().st_size > 500
    pictures = Gallery(tmp_path).pictures
    kept = {name for name in pictures if "/kept/" in name}
    assert kept and all(pictures[name].any() for name in kept)
    assert any(
        not torch.equal(pictures[name], pictures.get(name.replace("kept", "real"), pictures[name])) for name in kept
    )


def test_of_images_in_colour_webp_files_may_be_kept_and_new_images_pass_them_too() -> None:
    images, tests = (own[-80:] for own in photos(32))  # below the sky
    labels, wanted = torch.arange(80) % 4, replace(TINY, tasks=2, alpha=0.0)
    photographs = Dataset("photographs", images, labels, tests, labels, ("a", "b", "c", "d"), "their own", 0)
    plan = tiny_plan("icarl", wanted, exemplar_codec="webp:300")
    parts = assemble(plan, "cpu", Scenario(wanted, 0, photographs), workers=1)
    lines = list(learn(parts.scenario, parts.server, parts.door, parts.engine))
    client: Any = parts.engine.client
    data = parts.scenario.local(0, parts.scenario.tasks[1])
    memory = parts.transport.memories[0]  # type: ignore[attr-defined]
    kept = torch.cat(list(memory.exemplars.values()))
    assert memory.exemplars.keys() == {0, 1, 2, 3} and kept.shape[1:] == (300,)
    assert all(bytes(file[:4].tolist()) == b"RIFF" for file in kept)
    pool = next(client.train(memory, data, parts.server.state)).pool
    shown, codec = pool.images[: len(data.labels)], client.codec
    assert torch.equal(shown, codec.decode({}, codec.encode({}, data.images))) and 20 < psnr(data.images, shown) < 40
    for j in (0, 1):
        assert torch.equal(pool.images[pool.labels == j], codec.decode({}, memory.exemplars[j]))
    assert 300 < lines[-1]["kept_max"] <= parts.scenario.budget.per_client


def test_what_could_be_kept_are_the_images_at_hand_and_exemplars_of_all_other_classes() -> None:
    task, labels = Task(1, ((0, 1), (2, 3))), torch.tensor([3, 1, 3, 3])
    data = LocalData(task, torch.arange(4, dtype=torch.uint8).view(4, 1, 1, 1), labels)
    assert list(holdings({1: torch.zeros(9, 2), 0: torch.zeros(5, 2)}, data).items()) == [(0, 5), (1, 1), (3, 3)]
    assert {j: own.flatten().tolist() for j, own in new_images(data).items()} == {3: [0, 2, 3]}, "1 is of a task before"
