"""`fcil bench`: how fast the simulator is, as ratios that are measured in one run.

Seconds of another machine or another day say little, so whatever is compared does the same work in the same run, after
a warm-up, with repetitions whose spread is shown; runtimes have their turns one after the other, several times.
"""

import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from fcil.bench import flower, growth, page, pfl, steps, task
from fcil.errors import UserError
from fcil.federation.engine import cores

PARTS = ("engine", "flower", "pfl", "growth", "page")
METHODS = ("finetune", "hr", "hr-literal")
TURNS = 3  # times that each runtime has its turn

Found = dict[str, Any]  # what one part of the bench found: "part", and the rest by name


def bench(parts: tuple[str, ...], device: str, rounds: int) -> Iterator[Found]:
    """Yield the machine, then what each part measured, as it is known; a part that cannot be is a sentence."""
    yield {"part": "machine", **machine(device)}
    if "engine" in parts:
        for method in METHODS:
            yield engine(method, device, rounds)
    rivals = [part for part in parts if part in ("flower", "pfl")]
    for heavy in (False, True) if rivals else ():
        yield from against(rivals, heavy, rounds)
    if "growth" in parts:
        for row in growth.growth():
            yield {
                "part": "growth",
                "says": str(row),
                "seconds": row.seconds_ratio,
                "memory": row.mib_ratio,
                **asdict(row),
            }
    if "page" in parts:
        try:
            loaded = page.measure()
            yield {"part": "page", "says": str(loaded), "ratio": loaded.ratio, **asdict(loaded)}
        except UserError as error:
            yield {"part": "missing", "name": "page", "says": str(error), "needed": len(parts) == 1}


def machine(device: str) -> Found:
    """Say what all of this was measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "cores": cores(), "torch": torch.__version__, "python": platform.python_version()}


def engine(method: str, device: str, rounds: int) -> Found:
    """Compare the engine with the plain loop of the same method."""
    found = steps.speed(method, device, rounds)
    result = {"part": "engine", "ratio": found.ratio, "rate": found.rate, **asdict(found)}
    if method == "finetune":  # whose step is the encoder's forward and backward, and nothing else
        result["matrix_rate"], result["share"] = steps.encoder_share(device, found.rate)
    return result


def against(rivals: list[str], heavy: bool, rounds: int) -> Iterator[Found]:
    """Compare rounds, and what they cost beyond their bare local steps, with other runtimes', turn by turn."""
    runtimes: dict[str, Callable[[int], task.Rounds | None]] = {
        **({"Flower": lambda turn: flower.measure(heavy, turn)} if "flower" in rivals else {}),
        **({"pfl-research": lambda turn: pfl.measure(heavy, turn)} if "pfl" in rivals else {}),
        "fcil, loop": lambda turn: task.ours(heavy, turn, workers=1),
        "fcil, workers": lambda turn: task.ours(heavy, turn, workers=max(2, cores())),
    }
    model, found = "45 MB" if heavy else "98 KB", dict[str, task.Rounds]()
    for _ in range(TURNS):
        for name, measure in list(runtimes.items()):
            if len(runtimes) == 2:  # nobody is left to compare with
                return
            try:
                took, why = measure(-(-rounds // TURNS)), f"{name} is not installed: pip install 'pfl==0.6.*'"
            except UserError as error:
                took, why = None, str(error)
            if took is None:
                del runtimes[name]
                needed = name == "Flower" or len(rivals) == 1  # pfl-research is compared with where it is there
                yield {"part": "missing", "name": name, "model": model, "says": why, "needed": needed}
            else:
                found[name] = took if name not in found else task.joined(found[name], took)
    for name, took in found.items():
        yield {
            "part": "rounds", "model": model, "name": name, "processes": took.processes, "seconds": took.seconds,
            "bare": took.bare, "median": took.median, "overheads": took.overheads, "overhead": took.overhead,
            "difference": task.difference(found["fcil, loop"], took),
        }  # fmt: skip
