"""Does a round cost more when there are more clients that it does not ask? Measured with 50 and 5,000, as ratios.

Every client holds five digits, in both cases; `joint` trains and remembers.

    python benchmarks/clients.py
"""

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch

from fcil.experiment import assemble
from fcil.federation.loop import learn
from fcil.machine import peak, reset_peak
from fcil.plan import plan
from fcil.scenario.benchmarks import BENCHMARKS
from fcil.scenario.datasets import load
from fcil.scenario.scenario import Scenario

EACH, ROUNDS = 5, 40


def measure(clients: int) -> tuple[float, float]:
    """Return the seconds of a round (median), and by how many MiB the process grew at most while the rounds ran."""
    benchmark = replace(BENCHMARKS["digits"], tasks=1, clients=clients)
    wanted = plan("joint", benchmark, settings={"rounds": ROUNDS})
    parts = assemble(wanted, "cpu", Scenario(benchmark, seed=0, dataset=digits_for(clients)))
    lines = learn(parts.scenario, parts.server, parts.door, parts.engine)
    for _ in range(5):
        next(lines)
    reset_peak()
    before = resident()
    seconds = []
    for _ in range(ROUNDS - 5):
        start = time.perf_counter()
        assert next(lines)["kind"] == "round"
        seconds.append(time.perf_counter() - start)
    return median(seconds), (peak(torch.device("cpu")) - before) / 2**20


def digits_for(clients: int):
    """Return digits, repeated until the two classes of the task have five images for each client."""
    digits = load("digits")
    times = -(-EACH * clients * 10 // (2 * len(digits.train_labels))) + 1
    images, labels = digits.train_images.repeat(times, 1, 1, 1), digits.train_labels.repeat(times)
    keep = torch.cat([(labels == j).nonzero().flatten()[: EACH * clients // 2] for j in range(10)])
    return replace(digits, train_images=images[keep], train_labels=labels[keep])


def resident() -> int:
    """Return the memory this process has now, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])


def main() -> None:
    """Print both measurements and their ratio."""
    results = []
    for clients in (50, 5000):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # each in a process of its own
            results.append(fresh.submit(measure, clients).result())
    few, many = results
    print(f"{'clients':>10} {'s/round':>10} {'MiB grown':>12}")
    for clients, (seconds, grown) in ((50, few), (5000, many)):
        print(f"{clients:>10} {seconds:>10.4f} {grown:>12.1f}")
    print(f"{'ratio':>10} {many[0] / few[0]:>10.2f}")


if __name__ == "__main__":
    main()
