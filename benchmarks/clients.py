"""Does a round cost more when there are more clients that it does not ask? Measured with 50 and 5,000, as ratios.

python benchmarks/clients.py
"""

import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import median

from fcil.experiment import assemble
from fcil.federation.loop import learn
from fcil.plan import plan
from fcil.scenario.benchmarks import BENCHMARKS
from fcil.scenario.datasets import load
from fcil.scenario.scenario import Scenario

COPIES, ROUNDS = 20, 30  # enough digits that each of 5,000 clients has one


def measure(clients: int) -> tuple[float, int]:
    """Return the seconds of a round (median) and the peak memory of this process in KiB."""
    digits = load("digits")
    many = replace(
        digits,
        train_images=digits.train_images.repeat(COPIES, 1, 1, 1),
        train_labels=digits.train_labels.repeat(COPIES),
    )
    benchmark = replace(BENCHMARKS["digits"], tasks=1, clients=clients)
    wanted = plan("finetune", benchmark, settings={"rounds": ROUNDS})
    parts = assemble(wanted, "cpu", Scenario(benchmark, seed=0, dataset=many))
    lines = learn(parts.scenario, parts.server, parts.door, parts.engine)
    next(lines)
    seconds = []
    for _ in range(ROUNDS - 1):
        start = time.perf_counter()
        assert next(lines)["kind"] == "round"
        seconds.append(time.perf_counter() - start)
    return median(seconds), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Print both measurements and their ratio."""
    results = []
    for clients in (50, 5000):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # each with a peak of its own
            results.append(fresh.submit(measure, clients).result())
    few, many = results
    print(f"{'clients':>10} {'s/round':>10} {'peak MiB':>14}")
    for clients, (seconds, peak) in ((50, few), (5000, many)):
        print(f"{clients:>10} {seconds:>10.4f} {peak / 1024:>14.1f}")
    print(f"{'ratio':>10} {many[0] / few[0]:>10.2f} {many[1] / few[1]:>14.2f}")


if __name__ == "__main__":
    main()
