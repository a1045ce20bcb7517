"""A scenario: tasks in order, each client's share of them, the test sets, the schedule of clients, the memory.

Everything follows from the benchmark and the run's seed. Images stay where the dataset has them; shares are indices.
"""

import numpy as np
import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.scenario.benchmarks import Benchmark
from fcil.scenario.datasets import LICENCES, Dataset, load
from fcil.scenario.memory import budget
from fcil.scenario.partition import Indices, partition
from fcil.scenario.schedule import Schedule
from fcil.scenario.tasks import LocalData, Task
from fcil.seeds import seed_of

NONE = np.zeros(0, dtype=np.int64)


class DataGone(Exception):
    """A method asked for the images of a task that is over."""


class Scenario:
    """Who has what data when, the same for every method."""

    def __init__(
        self, benchmark: Benchmark, seed: int, dataset: Dataset | None = None, device: str | torch.device = "cpu"
    ) -> None:
        data = load(benchmark.dataset, benchmark.image_size) if dataset is None else dataset
        self.benchmark, self.seed, self.dataset, self.device = benchmark, seed, data, torch.device(device)
        order = class_order(benchmark, data.class_names)
        size, self.capacity = benchmark.classes_per_task, len(order)
        if benchmark.stop_after > benchmark.tasks:
            raise UserError(
                f"stop_after={benchmark.stop_after} is not allowed; stop_after takes 0 to {benchmark.tasks}"
            )
        groups = tuple(tuple(range(p, p + size)) for p in range(0, self.capacity, size))
        self.tasks = [Task(h, groups[: h + 1]) for h in range(benchmark.stop_after or benchmark.tasks)]
        self.class_names = [data.class_names[j] for j in order]
        channels, height, width = data.train_images.shape[1:]
        self.shape: tuple[int, int, int] = (channels, height, width)
        self.budget = budget(benchmark, channels * height * width)

        self._train, self._test = _images_of_slots(benchmark, data, order)
        tested = data.train_images if benchmark.holdout else data.test_images
        self._images = data.train_images.to(self.device)
        self._test_images = self._images if benchmark.holdout else tested.to(self.device)
        self._slots = _slots(data.train_labels, order)

        b = benchmark
        self.partition_seed = seed if b.partition_seed == -1 else b.partition_seed
        sampling = seed if b.sampling_seed == -1 else b.sampling_seed
        self.schedule = Schedule(b.tasks, b.clients, b.active, b.joining, b.leaving, sampling)
        self._stayed: list[set[int]] = []
        self._deals: list[dict[int, Indices]] = []
        for task in self.tasks:
            self._deal(task)
        self._begun = 0
        self.warnings = self._oddities()

    def begin(self, task: Task) -> None:
        """Let the images of `task` arrive; those of earlier tasks are gone, until a new run begins with the first."""
        if 0 < task.index < self._begun:
            raise DataGone(f"task {task.index} is over: task {self._begun} has begun")
        self._begun = task.index

    def present(self, task: Task) -> list[int]:
        """Return the clients that are there in a task."""
        return self.schedule.present(task.index)

    def sample(self, task: Task, name: str, round: int) -> list[int]:
        """Return the clients of a round."""
        return self.schedule.sample(task.index, name, round)

    def local(self, client: int, task: Task) -> LocalData:
        """Return what a client holds of the task that has begun; raise `DataGone` for any other."""
        if task.index != self._begun:
            when = "is over" if task.index < self._begun else "has not begun"
            raise DataGone(f"task {task.index} {when}: clients hold the images of task {self._begun}")
        mine = self._deals[task.index].get(client, NONE)
        images = self._images[torch.from_numpy(mine).to(self.device)]
        return LocalData(task, images, torch.from_numpy(self._slots[mine]).to(self.device))

    def test(self, task: Task) -> tuple[Tensor, Tensor]:
        """Return the test images and labels of the classes that a task brings."""
        where = np.concatenate([self._test[j] for j in task.new])
        labels = np.repeat(np.array(task.new, dtype=np.int64), [len(self._test[j]) for j in task.new])
        return self._test_images[torch.from_numpy(where).to(self.device)], torch.from_numpy(labels).to(self.device)

    def shares(self) -> list[Indices]:
        """Return for each task how many images of each class every client holds: arrays (clients ever, classes)."""
        tables = [np.zeros((self.schedule.total, self.capacity), dtype=np.int64) for _ in self.tasks]
        for table, deal in zip(tables, self._deals, strict=True):
            for client, mine in deal.items():
                table[client] = np.bincount(self._slots[mine], minlength=self.capacity)
        return tables

    def held(self, client: int, task: Task) -> Indices:
        """Return how many images of each class a client has had up to and with `task`, each counted once."""
        fresh = [deal[client] for deal in self._fresh(task) if client in deal]
        return np.bincount(self._slots[np.concatenate([NONE, *fresh])], minlength=self.capacity)

    def _fresh(self, task: Task) -> list[dict[int, Indices]]:
        """Return what each task so far brought that a client did not have before."""
        upto = zip(self._deals[: task.index + 1], self._stayed, strict=False)
        return [{c: mine for c, mine in deal.items() if c not in stayed} if stayed else deal for deal, stayed in upto]

    def _deal(self, task: Task) -> None:
        b, t = self.benchmark, task.index
        seed = self.partition_seed
        stayed = self._draw_stayed(task)
        takers = [c for c in self.present(task) if c not in stayed]
        rng = np.random.default_rng(seed_of(seed, "partition") if b.reseed_per_task else seed_of(seed, "partition", t))
        pool = np.sort(np.concatenate([self._train[j] for j in task.new]))
        shares = partition(
            b.partition, self._slots[pool], len(takers), rng,
            alpha=b.alpha, class_share=b.class_share, exponent=b.exponent,
        )  # fmt: skip
        deal = {c: pool[share] for c, share in zip(takers, shares, strict=True)}
        self._deals.append(deal | {c: self._deals[-1][c] for c in stayed})
        self._stayed.append(stayed)

    def _draw_stayed(self, task: Task) -> set[int]:
        if task.index == 0 or self.benchmark.staying == 0:
            return set()
        before = set(self.present(self.tasks[task.index - 1]))
        both = [c for c in self.present(task) if c in before]
        rng = np.random.default_rng(seed_of(self.partition_seed, "staying", task.index))
        return set(rng.permutation(both)[: round(self.benchmark.staying * len(both))].tolist())

    def _oddities(self) -> list[str]:
        found = []
        data, asked, everyone = self.dataset, self.benchmark.dataset, self.schedule.total
        empty = {c for deal in self._deals for c, mine in deal.items() if len(mine) == 0}
        if empty:
            found.append(f"{len(empty)} of {everyone} clients have no image in some task; they answer with count 0")
        held = [np.unique(self._slots[np.concatenate([NONE, *deal.values()])]) for deal in self._deals]
        missing = sum(len(set(task.new) - set(some.tolist())) for task, some in zip(self.tasks, held, strict=True))
        if missing:
            found.append(f"{missing} of {self.capacity} classes are held by no client when their task comes")
        unused = len(data.class_names) - self.capacity
        if unused and self.benchmark.dataset not in LICENCES:
            found.append(f"{unused} of {len(data.class_names)} classes of {data.name} are in no task")
        if data.skipped:
            images = "1 image" if data.skipped == 1 else f"{data.skipped} images"
            found.append(f"{images} of {data.name} could not be read and were left out")
        if data.name != asked and data.name.startswith(f"{asked}-"):
            found.append(f"{data.name} stands in for {asked}: {len(data.class_names)} classes, in another order")
        return found


def class_order(benchmark: Benchmark, names: tuple[str, ...]) -> list[int]:
    """Return the dataset's classes in the order in which the benchmark's tasks bring them."""
    wanted = benchmark.tasks * benchmark.classes_per_task
    if wanted > len(names):
        raise UserError(
            f"{benchmark.tasks} tasks of {benchmark.classes_per_task} classes need {wanted} classes, but "
            f"{benchmark.dataset} has {len(names)}; tasks times classes_per_task may be at most {len(names)}"
        )
    if benchmark.class_order == "1993":
        return [int(j) for j in np.random.RandomState(1993).permutation(len(names))[:wanted]]
    if benchmark.class_order == "natural":
        return list(range(wanted))
    try:
        order = [int(word) for word in benchmark.class_order.split(",")]
    except ValueError:
        order = []
    if len(set(order)) != len(order) or len(order) < wanted or not all(0 <= j < len(names) for j in order):
        raise UserError(
            f"class_order={benchmark.class_order} is not allowed; class_order takes 1993, natural, or a comma list of "
            f"at least {wanted} different numbers from 0 to {len(names) - 1}"
        )
    return order[:wanted]


def _images_of_slots(benchmark: Benchmark, data: Dataset, order: list[int]) -> tuple[list[Indices], list[Indices]]:
    """Return the training and test images of each slot; holding out and limits do not move with the run's seed."""
    train, test = [], []
    trained, tested = data.train_labels.numpy(), data.test_labels.numpy()
    for j in order:
        mine, asked = np.flatnonzero(trained == j), np.flatnonzero(tested == j)
        if benchmark.holdout:
            shuffled = np.random.RandomState(j).permutation(mine)
            cut = max(1, round(benchmark.holdout * len(mine)))
            asked, mine = shuffled[:cut], shuffled[cut:]
        if not len(mine) or not len(asked):
            raise UserError(
                f"holdout={benchmark.holdout:g} leaves class {data.class_names[j]!r} without training or test images; "
                "holdout needs at least two training images in each class"
            )
        train.append(_limited(mine, benchmark.train_limit, j))
        test.append(_limited(asked, benchmark.test_limit, j))
    return train, test


def _limited(images: Indices, limit: int, seed: int) -> Indices:
    if not 0 < limit < len(images):
        return np.sort(images)
    return np.sort(np.random.RandomState(seed).permutation(images)[:limit])


def _slots(labels: Tensor, order: list[int]) -> Indices:
    slot_of = np.full(int(labels.max()) + 1, -1, dtype=np.int64)
    for slot, j in enumerate(order):
        slot_of[j] = slot
    found: Indices = slot_of[labels.numpy()]
    return found
