"""How fast the engine trains: against the plain loop of the same method, and against what the machine can do."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch.utils.flop_counter import FlopCounterMode

from fcil.federation.engine import cores, threads
from fcil.federation.loop import learn
from fcil.networks import build
from fcil.parts import assemble
from fcil.plan import plan
from fcil.scenario.benchmarks import BENCHMARKS, PROTOCOLS, Benchmark
from fcil.scenario.datasets import Dataset
from fcil.scenario.scenario import Scenario

CLIENTS, WARM_UP = 5, 3  # all of them in every round; rounds that are not measured
BASES = {"cuda": "cifar100-10x10", "cpu": "digits"}  # a ResNet-18 step takes a second on two cores


@dataclass(frozen=True)
class Speed:
    """Rounds of one method in its second task, where it has something to replay."""

    method: str
    engine: str  # how it was trained, in words
    images: int  # that are trained on in a round
    plain: list[float]  # seconds a round: one client after the other, eager, fp32
    fast: list[float]

    @property
    def ratio(self) -> float:
        """How many times as fast the engine is."""
        return median(self.plain) / median(self.fast)

    @property
    def rate(self) -> float:
        """Images a second through forward and backward, whole rounds with all that belongs to them."""
        return self.images / median(self.fast)


def speed(method: str, device: str, rounds: int) -> Speed:
    """Measure a method on made-up images of the benchmark's size."""
    base = BENCHMARKS[BASES[device]]
    benchmark = replace(base, clients=CLIENTS, active=CLIENTS, stop_after=2)
    protocol = PROTOCOLS[base.protocol]
    scenario = Scenario(benchmark, 0, made_up(benchmark), device)
    plain, _ = _rounds(method, scenario, rounds, eager=True)
    fast, engine = _rounds(method, scenario, rounds, eager=False)
    return Speed(method, engine, CLIENTS * protocol.steps * protocol.batch_size, plain, fast)


def encoder_share(device: str, rate: float) -> tuple[float, float]:
    """Return the rate of matrix products that was measured, and the share of it that `rate` images a second reach.

    Both in operations a second: half precision on a GPU, single precision on all cores of a CPU.
    """
    benchmark = BENCHMARKS[BASES[device]]
    shape = (1, 8, 8) if device == "cpu" else (3, 32, 32)
    net, count = build(benchmark.network, shape, 100), 8
    with FlopCounterMode(display=False) as counter:
        net(torch.rand(count, *shape)).sum().backward()
    most = matrix_rate(device)
    return most, rate * counter.get_total_flops() / count / most


def matrix_rate(device: str) -> float:
    """Return the operations a second of a large product of matrices."""
    side, kind = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))

    def product() -> None:
        for _ in range(10):
            a @ b

    with threads(cores()):
        product()
        return 10 * 2 * side**3 / min(_timed(product, device) for _ in range(3))


def made_up(benchmark: Benchmark) -> Dataset:
    """Return images of the benchmark's size that differ by class."""
    generator = torch.Generator().manual_seed(0)
    classes, each = benchmark.tasks * benchmark.classes_per_task, 100
    shape = (1, 8, 8) if benchmark.dataset == "digits" else (3, 32, 32)
    middles = torch.randint(0, 200, (classes, *shape), generator=generator)

    def some(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(classes).repeat_interleave(count)
        noise = torch.randint(0, 56, (len(labels), *shape), generator=generator)
        return (middles[labels] + noise).to(torch.uint8), labels

    names = tuple(str(j) for j in range(classes))
    return Dataset(benchmark.dataset, *some(each), *some(10), names, "made up", 0)


def _rounds(method: str, scenario: Scenario, rounds: int, eager: bool) -> tuple[list[float], str]:
    """Return the seconds of the measured rounds, and how they were computed."""
    settings = {"rounds": rounds + WARM_UP, **({"precision": "fp32"} if eager else {})}
    wanted = plan(method, scenario.benchmark, settings=settings)
    device, seconds = scenario.device.type, []
    many = 0 if device == "cuda" else min(cores(), CLIENTS)
    parts = assemble(wanted, device, scenario, workers=1 if eager else many, eager=eager)
    lines = learn(parts.scenario, parts.server, parts.door, parts.engine)
    last = len(scenario.tasks) - 1
    for line in lines:
        if line["kind"] == "round" and line["task"] == last:
            break
        if line["kind"] == "round" and line["round"] == WARM_UP:  # one look at the first task is enough
            parts.door.cursor.rounds["train"] = wanted.protocol.rounds
    for _ in range(WARM_UP - 1):
        next(lines)
    for _ in range(rounds):
        seconds.append(_timed(lambda: next(lines), device))
    parts.transport.close()
    return seconds, parts.transport.described()


def _timed(work: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start
