"""What share of a run of `hr` its codec takes: fitting, encoding, decoding, and making images up.

`FCIL_DATA=... python benchmarks/codec_share.py` learns the first three tasks of cifar100-10x10 with clocks around the
codec, and prints the seconds of each of its parts and of the whole. Arguments are settings: with
`network=small` it takes seven minutes of one core, and training is cheap, so that the share is high; on a GPU leave it
out.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

import fcil
from fcil.blocks.codec import TransformCodec

PARTS = ("statistics", "fitted", "encode", "decode", "numbers", "pictures")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
spent: Counter[str] = Counter()
running: list[str] = []


def now() -> float:
    """Return the time, once the GPU has done all it was asked for."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def clocked(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same part with a clock around it."""

    @wraps(part)
    def timed(*given: Any) -> Any:
        if running:  # some parts call others
            return part(*given)
        running.append(name)
        began = now()
        found = part(*given)
        spent[running.pop()] += now() - began
        return found

    return timed


if __name__ == "__main__":
    for name in PARTS:
        setattr(TransformCodec, name, clocked(name, getattr(TransformCodec, name)))
    settings = dict(word.split("=", 1) for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        began = now()
        fcil.run(
            "hr",
            "cifar100-10x10",
            settings={"stop_after": 3, **settings},
            out=f"{folder}/run",
            device=DEVICE,
            workers=1,
        )
        whole = now() - began
    for name in PARTS:
        print(f"{name:<11}{spent[name]:8.2f} s")
    print(f"{'codec':<11}{sum(spent.values()):8.2f} s of {whole:.1f}: {100 * sum(spent.values()) / whole:.2f} %")
