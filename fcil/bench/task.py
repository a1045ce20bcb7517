"""The work that `fcil bench` gives to every runtime: federated averaging of a small network over made-up images.

50 clients with 100 images each, 5 of them in a round, 5 steps of SGD with 20 images each. The file has the work, its
bare local steps without any federation, and, being a method's file, the same work on fcil.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fcil
from fcil.blocks.training import loaded, weights_of
from fcil.errors import UserError
from fcil.federation.engine import seeded, threads
from fcil.federation.fitting import order
from fcil.federation.loop import learn
from fcil.federation.rounds import fedavg
from fcil.knobs import knob
from fcil.method import Batch, Clients, Fit, Method, Nets, Pool, Setting, Training, remote
from fcil.parts import Parts, assemble
from fcil.plan import plan
from fcil.records import Nothing, Update, Weights, read_tensors, record, write_tensors
from fcil.scenario.benchmarks import Benchmark
from fcil.scenario.datasets import Dataset
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import LocalData, Task
from fcil.seeds import seed_of

CLIENTS, ACTIVE, EACH, CLASSES = 50, 5, 100, 10
STEPS, BATCH, LR, SEED = 5, 20, 0.01, 0
WARM_UP = 5  # rounds that are not measured: processes start, libraries load, buffers are made
LONGEST, PATIENCE = 1800, 10  # seconds that another runtime may take, and may take to end when it is told to
BALLAST = 45_000_000 // 4  # numbers, about those of a ResNet-18

BENCHMARK = Benchmark(
    "bench", "made-up", tasks=1, classes_per_task=CLASSES, clients=CLIENTS, active=ACTIVE,
    augment="none", class_order="natural", alpha=0,
)  # fmt: skip


# -- the work ---------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Two convolutions and two linear layers, 98 KB; the heavy one has 45 MB more that travel and compute nothing."""

    def __init__(self, heavy: bool):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(1024, 21), nn.ReLU(), nn.Linear(21, CLASSES),
        )  # fmt: skip
        if heavy:
            self.ballast = nn.Parameter(torch.rand(BALLAST))  # pfl-research sends parameters only

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy; bytes are scaled to 0..1."""
        return F.cross_entropy(self(images / 255 if images.dtype == torch.uint8 else images), labels)


def network(heavy: bool) -> Network:
    """Return the network with its first weights, the same in every process."""
    with seeded(SEED, "network"):
        return Network(heavy)


@cache
def scenario() -> Scenario:
    """Return who holds what and who takes part when."""
    generator = torch.Generator().manual_seed(SEED)
    labels = torch.arange(CLIENTS * EACH) % CLASSES
    images = torch.randint(0, 256, (len(labels), 3, 32, 32), dtype=torch.uint8, generator=generator)
    names = tuple(str(j) for j in range(CLASSES))
    made_up = Dataset("made-up", images, labels, images[:CLASSES], labels[:CLASSES], names, "made up", 0)
    return Scenario(BENCHMARK, SEED, made_up)


@cache
def shares() -> list[LocalData]:
    """Return what every client holds."""
    return [scenario().local(client, scenario().tasks[0]) for client in range(CLIENTS)]


@cache
def cohort(round: int) -> list[int]:
    """Return the clients of a round, which counts from 0."""
    return scenario().sample(scenario().tasks[0], "train", round)


def rows(client: int, round: int) -> Tensor:
    """Return which of its images a client takes in each step of a round: (STEPS, BATCH)."""
    generator = torch.Generator().manual_seed(seed_of(SEED, client, round + 1))
    return order(EACH, STEPS * BATCH, generator).view(STEPS, BATCH)


def train(net: Network, client: int, round: int, layout: torch.memory_format = torch.contiguous_format) -> None:
    """Take the local steps of one client, from the weights that are in `net`."""
    data, optimizer = shares()[client], torch.optim.SGD(net.parameters(), LR, fused=True)
    for index in rows(client, round):
        optimizer.zero_grad()
        images = data.images[index].contiguous(memory_format=layout)
        net.loss(images, data.labels[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def bare_steps(net: Network, round: int, layout: torch.memory_format = torch.contiguous_format) -> float:
    """Return the seconds that the clients of a round train, one after the other, with no federation around them."""
    with threads(1):
        start = time.perf_counter()
        for client in cohort(round):
            train(net, client, round, layout)
        return time.perf_counter() - start


# -- what a runtime took ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """What one runtime took for the work."""

    name: str
    seconds: list[float]  # of each round measured
    bare: list[float]  # of the bare local steps of a round, each measured right after that round
    processes: int  # that compute at once
    weights: Weights = field(default_factory=dict, repr=False)  # what was learned, all but the ballast

    @property
    def median(self) -> float:
        """Seconds of a round."""
        return median(self.seconds)

    @property
    def overheads(self) -> list[float]:
        """Seconds of each round less the bare local steps of the process that has most clients: none can be split."""
        share = -(-ACTIVE // self.processes) / ACTIVE
        return [whole - steps * share for whole, steps in zip(self.seconds, self.bare, strict=True)]

    @property
    def overhead(self) -> float:
        """Seconds of overhead a round: the median, since a busy machine slows a round and its bare steps alike."""
        return median(self.overheads)


class Clock:
    """Takes the time of a runtime's rounds, and after each of them that of its bare local steps, in its own layout."""

    def __init__(self, heavy: bool, layout: torch.memory_format = torch.contiguous_format):
        self.net = network(heavy).to(memory_format=layout)  # type: ignore[call-overload]
        self.layout, self.seconds, self.bare = layout, list[float](), list[float]()

    def start(self) -> None:
        """Begin the first round."""
        self._began = time.perf_counter()

    def round_ended(self) -> None:
        """Stop the time; the next round begins when this returns."""
        self.seconds.append(time.perf_counter() - self._began)
        self.bare.append(bare_steps(self.net, len(self.bare), self.layout))
        self._began = time.perf_counter()

    def rounds(self, name: str, processes: int, weights: Mapping[str, Tensor]) -> Rounds:
        """Return what was measured after the warm-up, with what the steps can have changed of the weights."""
        kept = {name: tensor.detach().clone() for name, tensor in weights.items() if name != "ballast"}
        return Rounds(name, self.seconds[WARM_UP:], self.bare[WARM_UP:], processes, kept)


def joined(one: Rounds, other: Rounds) -> Rounds:
    """Return two turns of a runtime as one."""
    return replace(other, seconds=one.seconds + other.seconds, bare=one.bare + other.bare)


def difference(one: Rounds, other: Rounds) -> float:
    """Return the largest difference between the weights that two runtimes learned in equally many rounds."""
    if one.weights.keys() != other.weights.keys():
        raise ValueError(f"{one.name} and {other.name} did not learn the same network")
    return max(float((one.weights[name] - weight).abs().max()) for name, weight in other.weights.items())


# -- a runtime in a process of its own --------------------------------------------------------------------------------


def apart(module: str, name: str, heavy: bool, rounds: int, environment: Mapping[str, str] | None = None) -> Rounds:
    """Run `module.work(heavy, rounds, folder)` in a process of its own, which leaves neither files nor processes."""
    source = str(Path(fcil.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    with TemporaryDirectory(prefix="fcil-bench-", ignore_cleanup_errors=True) as folder:
        settings = {key: value.replace("FOLDER", folder) for key, value in (environment or {}).items()}
        script = (
            f"from {module} import work; from fcil.bench.task import tell; tell(work, {heavy}, {rounds}, {folder!r})"
        )
        with (Path(folder) / "said.txt").open("w") as said:
            child = subprocess.Popen(
                [sys.executable, "-c", script], stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **settings}, start_new_session=True,
            )  # fmt: skip
            try:
                code = child.wait(LONGEST)
            except subprocess.TimeoutExpired:
                raise UserError(f"{name} did not finish {rounds} rounds in {LONGEST} seconds") from None
            finally:
                _end(child)
        if code != 0:
            words = (Path(folder) / "said.txt").read_text(errors="replace").strip() or f"it ended with code {code}"
            raise UserError(f"{name} failed: {words.splitlines()[-1].strip()}")
        facts = json.loads((Path(folder) / "rounds.json").read_text())
        weights, _ = read_tensors(Path(folder) / "weights.safetensors")
        return Rounds(name, facts["seconds"], facts["bare"], facts["processes"], weights)


def tell(work: Any, heavy: bool, rounds: int, folder: str) -> None:
    """Do the work of a module in its own process and write down what it took."""
    took: Rounds = work(heavy, rounds, folder)
    write_tensors(Path(folder) / "weights.safetensors", took.weights)
    facts = {"seconds": took.seconds, "bare": took.bare, "processes": took.processes}
    (Path(folder) / "rounds.json").write_text(json.dumps(facts))


def _end(child: subprocess.Popen[bytes]) -> None:
    """Make sure that nothing of a process and its children is left."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE)
    with suppress(ProcessLookupError):  # raised when nobody is left of its group
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for _ in range(100):
            os.killpg(child.pid, 0)
            time.sleep(0.05)


# -- the same work on fcil --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """The knobs."""

    heavy: bool = knob(False, "send 45 MB more, which no step changes")


@record
class Model:
    """The network that is averaged."""

    weights: Weights


class Server:
    """Averages what the clients train."""

    def __init__(self, config: Config, setting: Setting):
        self.state = Model(weights_of(network(config.heavy)))

    def broadcast(self) -> Model:
        return self.state

    def learn_task(self, task: Task, clients: Clients) -> Iterator[None]:
        yield from fedavg(self, clients, Client.train)


class Client:
    """Trains on its images."""

    def __init__(self, config: Config, setting: Setting):
        self.net = network(config.heavy)

    def networks(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    @remote
    def train(self, memory: Nothing, data: LocalData, message: Model) -> Training[Update]:
        trained = yield Fit(
            loss, load={"net": message.weights}, trains=("net",), pool=Pool(data.images, data.labels), lr=LR
        )
        return Update(trained.weights, trained.count)

    def predict(self, message: Model, images: Tensor) -> Tensor:
        scores: Tensor = loaded(self.net, message.weights)(images / 255)
        return scores


def loss(nets: Nets, batch: Batch, given: None) -> Tensor:
    """Cross-entropy among all classes."""
    value: Tensor = nets["net"].loss(batch.images, batch.labels)
    return value


METHOD = Method(Config, Server, Client, Nothing)


def ours(heavy: bool, rounds: int, workers: int = 0) -> Rounds:
    """Do the work on fcil, in this process and the workers that the engine may start."""
    clock = Clock(heavy, torch.channels_last)  # as the engine has it, which makes the same steps faster
    with threads(1):
        parts = _assembled(heavy, rounds, workers)
        lines = learn(parts.scenario, parts.server, parts.door, parts.engine)
        clock.start()
        for _ in range(WARM_UP + rounds):
            next(lines)
            clock.round_ended()
        processes = parts.transport.crew.running if parts.transport.crew else 1
        parts.transport.close()
    name = "fcil, loop" if processes == 1 else f"fcil, {processes} workers"
    return clock.rounds(name, min(processes, ACTIVE), parts.server.state.weights)


def _assembled(heavy: bool, rounds: int, workers: int) -> Parts:
    settings = {
        "heavy": heavy, "rounds": WARM_UP + rounds + 1, "steps": STEPS, "batch_size": BATCH, "schedule": "constant",
        "momentum": 0, "weight_decay": 0, "clip": 0,
    }  # fmt: skip
    return assemble(plan(__file__, BENCHMARK, seed=SEED, settings=settings), "cpu", scenario(), workers)
