"""How the cost of a run grows with its clients, its tasks and the bytes a client may keep, as ratios.

One size grows at a time, and each is measured in a process of its own, on made-up images. What must grow is said beside
what must not: the images that the simulation holds for all its clients are weighed apart from what learning takes.

    python -c "from fcil.bench.growth import growth; print(*growth(), sep='\\n')"
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from fcil.errors import UserError
from fcil.federation.engine import threads
from fcil.federation.loop import learn
from fcil.machine import peak, reset_peak
from fcil.parts import assemble
from fcil.plan import plan
from fcil.scenario import synthetic
from fcil.scenario.benchmarks import Benchmark

CLASSES = 2  # a task
ACTIVE = 5


@dataclass(frozen=True)
class Size:
    """How large a run is."""

    clients: int = 20
    tasks: int = 3
    kept: int = 128  # bytes that a client may keep
    each: int = 4  # images that a client gets in a task


@dataclass(frozen=True)
class Cost:
    """What a run takes."""

    seconds: float  # of a core in a round of the later half of the tasks, median; other work on the machine adds little
    mib: float  # most memory, beyond what the process had before and beyond the images
    images_mib: float  # images and labels of all clients and tasks
    kept: int  # bytes kept by all clients at the end


@dataclass(frozen=True)
class Row:
    """What grows, and what it costs at both ends."""

    what: str  # a field of Size
    start: int
    end: int
    costs: tuple[Cost, Cost]

    @property
    def seconds_ratio(self) -> float:
        """How many times as long a round takes."""
        return self.costs[1].seconds / self.costs[0].seconds

    @property
    def mib_ratio(self) -> float:
        """How many times as much memory learning takes."""
        return self.costs[1].mib / max(self.costs[0].mib, 2**-8)  # a page: one that took nothing

    def __str__(self) -> str:
        """Say it in a line."""
        few, many = self.costs
        return (
            f"{self.what} {self.start:,} -> {self.end:,}: a round takes x {self.seconds_ratio:.2f} "
            f"({1e3 * few.seconds:.0f} -> {1e3 * many.seconds:.0f} ms); learning takes {few.mib:.1f} -> {many.mib:.1f} "
            f"MiB beyond {few.images_mib:.1f} -> {many.images_mib:.1f} MiB of images, and keeps "
            f"{few.kept:,} -> {many.kept:,} bytes"
        )


PAIRS: tuple[tuple[str, Size, int], ...] = (
    ("clients", Size(clients=50, tasks=2), 5000),
    ("tasks", Size(tasks=10), 100),
    ("kept", Size(tasks=5, kept=128, each=200), 8192),
)


def growth(
    method: str = "hr-literal",
    pairs: Sequence[tuple[str, Size, int]] = PAIRS,
    measure: Callable[[str, Size], Cost] | None = None,
) -> list[Row]:
    """Measure each pair of sizes: what grows, from where, and to what."""
    measure = measure or apart
    for what, start, end in pairs:
        if what not in ("clients", "tasks", "kept", "each"):
            raise UserError(f"{what} does not grow here; what grows is clients, tasks, kept or each")
        if end <= getattr(start, what):
            raise UserError(f"{what} does not grow from {getattr(start, what)} to {end}; give a larger number")
    return [
        Row(what, getattr(start, what), end, (measure(method, start), measure(method, replace(start, **{what: end}))))
        for what, start, end in pairs
    ]


def apart(method: str, size: Size) -> Cost:
    """Measure in a fresh process, whose memory holds nothing else."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        fresh.submit(cost, method, Size(clients=2, tasks=2)).result()  # torch loads much of itself when first used
        return fresh.submit(cost, method, size).result()


def cost(method: str, size: Size) -> Cost:
    """Learn all tasks of a run of that size, and say what it took."""
    before = resident()
    reset_peak()
    parts = assemble(plan(method, benchmark(size)), "cpu", workers=1)  # all in this process
    data = parts.scenario.dataset
    images = sum(t.nbytes for t in (data.train_images, data.train_labels, data.test_images, data.test_labels))
    seconds, kept, start = [], 0, time.process_time()
    with threads(1):
        for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
            if line["kind"] == "round" and line["round"] and line["task"] >= size.tasks // 2:  # nothing but training
                seconds.append(time.process_time() - start)
            kept, start = line.get("kept", kept), time.process_time()
    more = max(0, peak(torch.device("cpu")) - before - images)
    return Cost(median(seconds), more / 2**20, images / 2**20, kept)


def benchmark(size: Size) -> Benchmark:
    """Return a benchmark of that size, in which every client has as many images whatever their number."""
    each = -(-size.clients * size.each // CLASSES)
    of_all = CLASSES * size.tasks * synthetic.SIDE**2  # bytes of one image of each class
    return Benchmark(
        "growth", f"synthetic-{CLASSES * size.tasks}x{each}", tasks=size.tasks, classes_per_task=CLASSES,
        clients=size.clients, active=min(ACTIVE, size.clients), protocol="brief", network="small", augment="none",
        memory=size.kept / of_all, memory_scope="client",
    )  # fmt: skip


def resident() -> int:
    """Return the memory that this process has now, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])
