"""A scenario: tasks in order, each client's share of them, the test sets, the schedule of clients, the memory.

Everything follows from the benchmark and the run's seed. Images stay where the dataset has them; shares are indices.
"""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.scenario.benchmarks import Benchmark
from fcil.scenario.datasets import LICENCES, Dataset, load
from fcil.scenario.memory import budget
from fcil.scenario.partition import Indices, partition
from fcil.scenario.reach import DataGone, within_reach
from fcil.scenario.schedule import Schedule
from fcil.scenario.tasks import LocalData, Task
from fcil.seeds import seed_of

NONE = np.zeros(0, dtype=np.int64)


class Deal:
    """Who got which images in a task: all shares in one array, as many small ones would outweigh what is in them."""

    def __init__(self, clients: Indices, shares: Mapping[int, Indices]) -> None:
        self.clients, mine = clients, [shares[int(c)] for c in clients]  # in order
        self.sizes = np.array([len(share) for share in mine], dtype=np.int64)
        self.ends, self.images = np.cumsum(self.sizes), np.concatenate([NONE, *mine])

    def of(self, client: int) -> Indices:
        """Return the share of one client; nothing if it was not there."""
        row = int(np.searchsorted(self.clients, client))
        if row == len(self.clients) or self.clients[row] != client:
            return NONE
        return self.images[self.ends[row] - self.sizes[row] : self.ends[row]]

    def pairs(self, without: Collection[int] = ()) -> tuple[Indices, Indices]:
        """Return the client of each image, and the image, but for the images of some clients."""
        owners = np.repeat(self.clients, self.sizes)
        chosen = ~np.isin(owners, list(without)) if without else slice(None)
        return owners[chosen], self.images[chosen]


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
        self._deals: list[Deal] = []
        for task in self.tasks:
            self._deal(task)
        self.lags = self._draw_lags()
        if b.lag:
            self._deals, self._stayed = self._delayed()
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

    def loses(self, client: int, task: Task, where: str, times: int) -> bool:
        """Draw whether a message is lost: methods that ask more often lose the same messages of a round."""
        share, key = self.benchmark.lost, (client, task.index, where, times)
        return share > 0 and seed_of(self.schedule.seed, "lost", *key) / 2**63 < share

    def local(self, client: int, task: Task) -> LocalData:
        """Return what a client holds of the task that has begun; raise `DataGone` for any other."""
        within_reach(f"what client {client} holds")
        if task.index != self._begun:
            when = "is over" if task.index < self._begun else "has not begun"
            raise DataGone(f"task {task.index} {when}: clients hold the images of task {self._begun}")
        mine = self._deals[task.index].of(client)
        images = self._images[torch.from_numpy(mine).to(self.device)]
        return LocalData(task, images, torch.from_numpy(self._slots[mine]).to(self.device))

    def test(self, task: Task) -> tuple[Tensor, Tensor]:
        """Return the test images and labels of the classes that a task brings."""
        within_reach("test images")
        where = np.concatenate([self._test[j] for j in task.new])
        labels = np.repeat(np.array(task.new, dtype=np.int64), [len(self._test[j]) for j in task.new])
        return self._test_images[torch.from_numpy(where).to(self.device)], torch.from_numpy(labels).to(self.device)

    def trained(self) -> tuple[Tensor, Tensor]:
        """Return every training image that some client has held, once, and its label; no client sees so much."""
        within_reach("what all clients hold")
        where = np.unique(np.concatenate([NONE, *(deal.images for deal in self._deals)]))
        return self._images[torch.from_numpy(where).to(self.device)], torch.from_numpy(self._slots[where]).to(
            self.device
        )

    def share(self, task: Task) -> Indices:
        """Return how many images of each class every client holds in a task: an array (clients ever, classes)."""
        return self._counted([self._deals[task.index].pairs()])

    def shares(self) -> list[Indices]:
        """Return the arrays of all tasks; one after the other they take far less memory."""
        return [self.share(task) for task in self.tasks]

    def holdings(self, task: Task) -> Indices:
        """Return how many images of each class every client has had up to and with `task`, each counted once."""
        so_far = zip(self._deals[: task.index + 1], self._stayed, strict=False)
        return self._counted([deal.pairs(without=stayed) for deal, stayed in so_far])

    def held(self, client: int, task: Task) -> Indices:
        """Return the row of one client in `holdings`."""
        mine: Indices = self.holdings(task)[client]
        return mine

    def _counted(self, pairs: list[tuple[Indices, Indices]]) -> Indices:
        """Count images by client and class."""
        shape = self.schedule.total, self.capacity
        cells = np.concatenate([clients * self.capacity + self._slots[images] for clients, images in pairs])
        return np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)

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
        dealt = {c: pool[share] for c, share in zip(takers, shares, strict=True)}
        kept = {c: self._deals[-1].of(c) for c in stayed}
        self._deals.append(Deal(np.array(self.present(task), dtype=np.int64), dealt | kept))
        self._stayed.append(stayed)

    def _draw_stayed(self, task: Task) -> set[int]:
        if task.index == 0 or self.benchmark.staying == 0:
            return set()
        before = set(self.present(self.tasks[task.index - 1]))
        both = [c for c in self.present(task) if c in before]
        rng = np.random.default_rng(seed_of(self.partition_seed, "staying", task.index))
        return set(rng.permutation(both)[: round(self.benchmark.staying * len(both))].tolist())

    def _draw_lags(self) -> Indices:
        """Return by how many tasks each client is behind."""
        rng = np.random.default_rng(seed_of(self.partition_seed, "lag"))
        return rng.integers(0, self.benchmark.lag + 1, self.schedule.total)

    def _delayed(self) -> tuple[list[Deal], list[set[int]]]:
        """Return what clients hold, and which of them stayed, each in its own time: behind by its lag."""
        deals, stayed = [], []
        for task in self.tasks:
            present = self.present(task)
            own = {c: task.index - int(self.lags[c]) for c in present}
            shares = {c: self._deals[t].of(c) if t >= 0 else NONE for c, t in own.items()}
            deals.append(Deal(np.array(present, dtype=np.int64), shares))
            stayed.append({c for c, t in own.items() if t >= 0 and c in self._stayed[t]})
        return deals, stayed

    def _oddities(self) -> list[str]:
        found = []
        data, asked, everyone = self.dataset, self.benchmark.dataset, self.schedule.total
        empty = {c for deal in self._deals for c in deal.clients[deal.sizes == 0].tolist()}
        if empty:
            found.append(f"{len(empty)} of {everyone} clients have no image in some task; they answer with count 0")
        held = [np.unique(self._slots[deal.images]) for deal in self._deals]
        missing = sum(len(set(task.new) - set(some.tolist())) for task, some in zip(self.tasks, held, strict=True))
        if missing:
            found.append(f"{missing} of {self.capacity} classes are held by no client when their task comes")
        unused = len(data.class_names) - self.capacity
        if unused and self.benchmark.dataset not in LICENCES:
            found.append(f"{unused} of {len(data.class_names)} classes of {data.name} are in no task")
        if data.skipped:
            images = "1 image is" if data.skipped == 1 else f"{data.skipped} images are"
            named = ", ".join(data.unread) + (", ..." if data.skipped > len(data.unread) else "")
            found.append(
                f"{images} left out of {data.name}, which could not be read{f': {named}' if data.unread else ''}"
            )
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
