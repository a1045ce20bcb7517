import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from fcil.errors import UserError
from fcil.scenario.benchmarks import BENCHMARKS, PARTITIONS, Benchmark
from fcil.scenario.datasets import Dataset, load
from fcil.scenario.memory import budget
from fcil.scenario.reach import DataGone
from fcil.scenario.scenario import Scenario

DIGITS = BENCHMARKS["digits"]
needs_data = pytest.mark.skipif("FCIL_DATA" not in os.environ, reason="FCIL_DATA is not set")


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def toy(classes=12, train=20, test=5):
    """Images that carry their class and number in their pixels."""

    def half(count, offset):
        labels = torch.arange(classes).repeat_interleave(count)
        images = torch.stack([labels, torch.arange(classes * count) % 256, labels * 0 + offset], 1).to(torch.uint8)
        return images[:, :, None, None].expand(-1, 3, 2, 2).contiguous(), labels

    names = tuple(f"class{j}" for j in range(classes))
    return Dataset("toy", *half(train, 0), *half(test, 1), names, "none", 0)


def toy_scenario(seed=0, dataset=None, **changes):
    start = Benchmark("toy", "toy", tasks=3, classes_per_task=4, clients=6, active=3, class_order="natural")
    return Scenario(replace(start, **changes), seed, dataset or toy())


def numbers(data):
    return sorted(zip(data.labels.tolist(), data.images[:, 1, 0, 0].tolist(), strict=True))


@pytest.mark.parametrize("kind", PARTITIONS)
def test_labels_are_slots_and_fit_their_images(kind):
    scenario = toy_scenario(class_order="1993", partition=kind)
    order = np.random.RandomState(1993).permutation(12)
    assert scenario.class_names == [f"class{j}" for j in order]
    for task in scenario.tasks:
        scenario.begin(task)
        held = [scenario.local(client, task) for client in scenario.present(task)]
        for data in held:
            assert data.images.dtype == torch.uint8 and data.labels.dtype == torch.int64
            assert data.images.shape[1:] == scenario.shape
            assert set(data.classes()) <= set(task.new)
            assert data.images[:, 0, 0, 0].tolist() == [order[j] for j in data.labels.tolist()]
        if kind != "class_subset":
            assert sum(len(data.labels) for data in held) == 80
        images, labels = scenario.test(task)
        assert len(images) == 20 and set(labels.tolist()) == set(task.new)
        assert images[:, 0, 0, 0].tolist() == [order[j] for j in labels.tolist()]
        assert (images[:, 2] == 1).all()


def test_digits(digits):
    scenario = Scenario(DIGITS, 0, digits)
    assert scenario.shape == (1, 8, 8) and scenario.capacity == 10 and len(scenario.tasks) == 5
    assert [task.new for task in scenario.tasks] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    assert scenario.warnings == []
    assert sum(table.sum() for table in scenario.shares()) == len(digits.train_labels)
    assert sum(len(scenario.test(task)[1]) for task in scenario.tasks) == len(digits.test_labels)


def test_the_past_is_gone():
    scenario = toy_scenario()
    first, second, third = scenario.tasks
    scenario.begin(second)
    with pytest.raises(DataGone, match="task 0 is over"):
        scenario.local(0, first)
    assert len(scenario.local(0, second).labels)
    assert not issubclass(DataGone, UserError)
    with pytest.raises(DataGone, match="task 2 has not begun"):
        scenario.local(0, third)
    scenario.begin(third)
    with pytest.raises(DataGone, match="task 1 is over"):
        scenario.begin(second)
    scenario.begin(first)  # a new run
    assert len(scenario.local(0, first).labels)


def test_seeds_move_the_partition_and_nothing_else():
    one, same, other = toy_scenario(1), toy_scenario(1), toy_scenario(2)
    task = one.tasks[0]
    assert all(np.array_equal(a, b) for a, b in zip(one.shares(), same.shares(), strict=True))
    assert not np.array_equal(one.shares()[0], other.shares()[0])
    assert one.class_names == other.class_names
    assert torch.equal(one.test(task)[0], other.test(task)[0])
    assert not np.array_equal(one.shares()[0][:, :4], one.shares()[1][:, 4:8])
    fixed = [toy_scenario(seed, partition_seed=7, sampling_seed=8) for seed in (1, 2)]
    assert np.array_equal(fixed[0].shares()[0], fixed[1].shares()[0])
    assert fixed[0].sample(task, "rounds", 3) == fixed[1].sample(task, "rounds", 3)
    assert np.array_equal(toy_scenario(1, sampling_seed=8).shares()[0], one.shares()[0])


def test_reseeding_makes_tasks_alike():
    first, second, _ = toy_scenario(partition="dirichlet_class", reseed_per_task=True).shares()
    assert np.array_equal(first[:, :4], second[:, 4:8])


def test_clients_without_images_are_ordinary():
    scenario = toy_scenario(clients=200, active=10)
    empty = [c for c in range(200) if scenario.shares()[0][c].sum() == 0]
    data = scenario.local(empty[0], scenario.tasks[0])
    assert data.images.shape == (0, 3, 2, 2) and data.labels.shape == (0,) and data.classes() == []
    assert any("of 200 clients have no image in some task" in warning for warning in scenario.warnings)


def test_staying_clients_keep_what_they_had():
    scenario = toy_scenario(staying=0.5, joining=2)
    kept = []
    for before, task in zip(scenario.tasks, scenario.tasks[1:], strict=False):
        scenario.begin(before)
        old = {c: numbers(scenario.local(c, before)) for c in scenario.present(before)}
        scenario.begin(task)
        new = {c: numbers(scenario.local(c, task)) for c in scenario.present(task)}
        kept = [c for c in old if old[c] == new[c]]
        assert len(kept) == round(0.5 * len(old))
        assert sorted(x for c in new if c not in kept for x in new[c]) == sorted(
            (j, (20 * j + i) % 256) for j in task.new for i in range(20)
        )
        first = scenario.held(kept[0], before)
        assert np.array_equal(scenario.held(kept[0], task), first)
    assert scenario.shares()[2].shape == (10, 12)


def test_held_adds_up_over_tasks():
    scenario = toy_scenario()
    total = sum(scenario.held(c, scenario.tasks[1]) for c in range(6))
    assert total.tolist() == [20] * 8 + [0] * 4


def test_joining_and_leaving_clients():
    scenario = toy_scenario(joining=2, leaving=1)
    assert [len(scenario.present(task)) for task in scenario.tasks] == [6, 7, 8]
    gone = set(scenario.present(scenario.tasks[0])) - set(scenario.present(scenario.tasks[1]))
    assert len(gone) == 1
    scenario.begin(scenario.tasks[1])
    assert len(scenario.local(gone.pop(), scenario.tasks[1]).labels) == 0


def held_by_all(scenario):
    """What each client present holds in every task, read as a run would read it."""
    found = []
    for task in scenario.tasks:
        scenario.begin(task)
        found.append({c: numbers(scenario.local(c, task)) for c in scenario.present(task)})
    return found


@pytest.mark.parametrize("more", [{}, {"joining": 2, "leaving": 1}, {"staying": 0.5}])
def test_clients_behind_have_their_share_of_a_task_so_many_tasks_later(more):
    usual, late = toy_scenario(**more), toy_scenario(lag=2, **more)
    lags, then = late.lags.tolist(), held_by_all(usual)
    assert set(lags) == {0, 1, 2} and len(lags) == late.schedule.total
    for t, held in enumerate(held_by_all(late)):
        assert held.keys() == then[t].keys(), "who is there does not change"
        for client, images in held.items():
            own = t - lags[client]
            assert images == (then[own].get(client, []) if own >= 0 else [])
    assert any(
        {j for j, _ in images} <= set(late.tasks[0].new) for c, images in held.items() if lags[c] == 2 and images
    )


def test_shares_and_holdings_are_those_of_clients_behind():
    late = toy_scenario(lag=1, staying=0.5, joining=2, leaving=1)
    held, had = held_by_all(late), {}
    for task, now in zip(late.tasks, held, strict=True):
        share, so_far = late.share(task), late.holdings(task)
        for client, images in now.items():
            had.setdefault(client, set()).update(images)
            counts = [[j for j, _ in some].count(slot) for some in (images, had[client]) for slot in range(12)]
            assert share[client].tolist() == counts[:12] and so_far[client].tolist() == counts[12:]


def test_lags_are_drawn_from_the_partitions_seed_and_nobody_is_behind_by_default():
    one, same, other = (toy_scenario(seed, lag=3, clients=30) for seed in (1, 1, 2))
    assert one.lags.tolist() == same.lags.tolist() != other.lags.tolist()
    assert toy_scenario(1, lag=3, clients=30, sampling_seed=5).lags.tolist() == one.lags.tolist()
    assert not toy_scenario().lags.any() and Benchmark().lag == 0
    assert all(np.array_equal(a, b) for a, b in zip(toy_scenario().shares(), toy_scenario(lag=0).shares(), strict=True))


def test_clients_behind_may_leave_new_classes_to_nobody():
    everyone = toy_scenario(clients=1, active=1, lag=2, seed=next(s for s in range(20) if lag_of_one(s) == 2))
    assert [table.sum() for table in everyone.shares()] == [0, 0, 80]
    assert everyone.warnings == [
        "1 of 1 clients have no image in some task; they answer with count 0",
        "12 of 12 classes are held by no client when their task comes",
    ]


def lag_of_one(seed):
    return toy_scenario(seed, clients=1, active=1, lag=2).lags[0]


def test_holdout_replaces_the_test_images():
    plain, held = toy_scenario(), toy_scenario(holdout=0.25)
    task = plain.tasks[0]
    images, labels = held.test(task)
    assert (images[:, 2] == 0).all() and len(images) == 4 * 5
    tested = set(zip(labels.tolist(), images[:, 1, 0, 0].tolist(), strict=True))
    trained = {x for c in range(6) for x in numbers(held.local(c, task))}
    assert not tested & trained
    assert tested | trained == {x for c in range(6) for x in numbers(plain.local(c, task))}
    assert torch.equal(images, toy_scenario(5, holdout=0.25).test(task)[0])
    with pytest.raises(UserError, match="without training or test images"):
        toy_scenario(holdout=0.5, dataset=toy(train=1))


def test_limits_take_a_fixed_part():
    scenario = toy_scenario(train_limit=7, test_limit=2)
    assert sum(table.sum() for table in scenario.shares()) == 12 * 7
    assert len(scenario.test(scenario.tasks[0])[1]) == 8

    def taken(limited):
        return sorted(x for c in range(6) for x in numbers(limited.local(c, limited.tasks[0])))

    assert taken(scenario) == taken(toy_scenario(9, train_limit=7, test_limit=2))
    assert len(taken(toy_scenario(train_limit=50))) == 80


def test_class_orders():
    cifar = toy(classes=100, train=2, test=1)
    scenario = toy_scenario(dataset=cifar, tasks=10, classes_per_task=10, class_order="1993")
    assert scenario.class_names[:5] == ["class68", "class56", "class78", "class8", "class23"]
    first = toy_scenario(dataset=cifar, tasks=2, classes_per_task=10, class_order="1993")
    assert first.class_names == scenario.class_names[:20] and first.capacity == 20
    listed = toy_scenario(tasks=1, classes_per_task=3, class_order="3, 0,11,2")
    assert listed.class_names == ["class3", "class0", "class11"]
    for wrong in ("3,3,1,2", "1,2", "0,1,2,12", "-1,0,1,2", "one", ""):
        with pytest.raises(UserError, match="class_order takes 1993, natural, or a comma list of at least 4 different"):
            toy_scenario(tasks=1, class_order=wrong)


def test_too_many_classes_or_clients_are_refused():
    with pytest.raises(UserError, match="4 tasks of 4 classes need 16 classes, but toy has 12; .* at most 12"):
        toy_scenario(tasks=4)
    with pytest.raises(UserError, match="active=7 is not allowed with clients=6"):
        toy_scenario(active=7)


def test_oddities_are_told():
    skipped = toy_scenario(dataset=replace(toy(), skipped=3))
    assert skipped.warnings == ["3 images are left out of toy, which could not be read"]
    stuck = toy_scenario(staying=1.0)
    assert stuck.warnings == ["8 of 12 classes are held by no client when their task comes"]
    instead = toy_scenario(dataset=replace(toy(), name="toy-50"))
    assert instead.warnings == ["toy-50 stands in for toy: 12 classes, in another order"]


@pytest.mark.parametrize(
    ("name", "pixels", "expected"),
    [
        ("cifar100-10x10", 3 * 32 * 32, 122_880),
        ("cifar100-20x5", 3 * 32 * 32, 122_880),
        ("digits", 64, 640),
        ("tinyimagenet-10x5", 3 * 64 * 64, 40_960),
        ("imagenet-subset-10x20", 3 * 84 * 84, 846_720),
        ("imagenet-subset-20x10", 3 * 84 * 84, 846_720),
    ],
)
def test_memory_budgets(name, pixels, expected):
    assert budget(BENCHMARKS[name], pixels).per_client == expected


def test_memory_scope_and_rule():
    cifar = BENCHMARKS["cifar100-10x10"]
    assert budget(replace(cifar, memory_scope="client"), 3072).per_client == 6_144_000
    scenario = toy_scenario(memory_rule="growing")
    full = int(20 * 12 * 12 / 6)
    assert [scenario.budget.at(task) for task in scenario.tasks] == [full // 3, full * 2 // 3, full]
    assert [toy_scenario().budget.at(task) for task in scenario.tasks] == [full] * 3


def test_images_are_not_shared_with_the_caller():
    scenario = toy_scenario()
    task = scenario.tasks[0]
    before = scenario.local(0, task).images.clone()
    scenario.local(0, task).images.zero_()
    assert torch.equal(scenario.local(0, task).images, before)


@pytest.mark.data
@needs_data
@pytest.mark.parametrize("name", ["cifar100-10x10", "tinyimagenet-10x5", "glfc-cifar100"])
def test_benchmarks_on_real_data(name):
    scenario = Scenario(BENCHMARKS[name], 0)
    sizes = {
        table[scenario.present(t)].sum(1).max() for t, table in zip(scenario.tasks, scenario.shares(), strict=True)
    }
    assert sizes == {{"cifar100-10x10": 100, "tinyimagenet-10x5": 9, "glfc-cifar100": 3000}[name]}
    data = scenario.local(3, scenario.tasks[0])
    assert data.images.float().std() > 30
    assert len(scenario.test(scenario.tasks[1])[1]) == {"tinyimagenet-10x5": 250}.get(name, 1000)
