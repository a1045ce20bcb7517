"""How long a browser takes to draw the report page of many runs, against that of one run."""

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from PIL import Image

from fcil.errors import UserError
from fcil.files import sha256
from fcil.methods import METHODS
from fcil.report.page import write_page
from fcil.results.ledger import Ledger, read, result_of
from fcil.results.runs import FORMAT

TERMS = ("prior", "new", "intra", "inter")
ROUNDS = 60  # of a task, as the protocol `short` has
GALLERY = (936, 1382)  # pixels of a gallery of ten tasks of CIFAR-100


@dataclass(frozen=True)
class Loaded:
    """What a page of many runs takes."""

    runs: int
    size: int  # bytes
    written: float  # seconds
    many: list[float]  # seconds from opening the page to its last chart
    one: list[float]  # the same for a page of one run

    @property
    def ratio(self) -> float:
        """Return how much longer the page of many runs takes."""
        return median(self.many) / median(self.one)

    def __str__(self) -> str:
        """Say it in a sentence."""
        return (
            f"The page of {self.runs} runs: {self.size / 1e6:.1f} MB, written in {self.written:.1f} s, drawn in "
            f"{median(self.many):.1f} s, {self.ratio:.1f} times as long as that of one run"
        )


def measure(methods: int = 20, seeds: int = 10, turns: int = 5) -> Loaded:
    """Write and open the pages of made-up runs: ten tasks, 600 rounds and 50 clients each, one gallery a method.

    Both pages have their turns one after the other, when the browser has been opened once.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise UserError("the page cannot be opened: there is no chromium here")
    with TemporaryDirectory() as folder:
        runs, page, single = Path(folder, "runs"), Path(folder, "page.html"), Path(folder, "single.html")
        for name in list(METHODS)[:methods]:
            for seed in range(seeds):
                made_up_run(runs / name / str(seed), name, seed, rounds=ROUNDS)
            _gallery(runs / name / "0/replay.png")
        start = perf_counter()
        write_page([runs], page)
        written = perf_counter() - start
        write_page([runs / next(iter(METHODS)) / "0"], single)
        _opened(browser, single)
        found = [(_opened(browser, page), _opened(browser, single)) for _ in range(turns)]
        return Loaded(methods * seeds, page.stat().st_size, written, *map(list, zip(*found, strict=True)))


def made_up_run(
    folder: Path, method: str, seed: int, tasks: int = 10, clients: int = 50, rounds: int = 2, apart: bool = True,
    settings: Mapping[str, Any] | None = None, benchmark: str = "made-up", protocol: str = "quick",
) -> None:  # fmt: skip
    """Write the folder of a finished run whose numbers mean nothing; `apart` is whether forgetting is taken apart."""
    draw = random.Random(f"{method} {seed} {settings}")
    folder.mkdir(parents=True)
    named = {
        "format": FORMAT, "method": method, "benchmark": benchmark, "protocol": protocol, "seed": seed,
        "settings": dict(settings or {}), "classes": [f"class {j}" for j in range(2 * tasks)],
        "command": f"fcil run {method} --seed {seed}",
    }  # fmt: skip
    kept = 0 if method == "finetune" else 640
    with Ledger(folder / "ledger.jsonl") as ledger:
        ledger.append({"kind": "run", **named})
        for t in range(tasks):
            for r in range(rounds):
                ledger.append({
                    "kind": "round", "task": t, "stage": "train", "round": r, "rounds": rounds, "clients": clients,
                    "lost": 0, "loss": draw.random(), "seconds": {"train": draw.random()}, "down": 5000, "up": 4000 + r,
                })  # fmt: skip
            ledger.append({
                "kind": "task", "task": t, "correct": [draw.randrange(50, 101) for _ in range(t + 1)],
                "total": [100] * (t + 1),
                "per_class": [100 * draw.random() if j < 2 * (t + 1) else None for j in range(2 * tasks)],
                "per_client": [100 * draw.random() for _ in range(clients - 1)] + [None],
                **({"decomposition": _taken_apart(draw, t)} if apart else {}),
                "seconds": {"evaluate": draw.random(), "remember": 0.01}, "down": 700, "up": 80,
                "kept": kept * clients, "kept_max": kept,
            })  # fmt: skip
    result = {**named, **result_of(read(folder / "ledger.jsonl")), "ledger_sha256": sha256(folder / "ledger.jsonl")}
    (folder / "result.json").write_text(json.dumps(result))


def _gallery(path: Path) -> None:
    """Draw a gallery of noise that takes as much room as one of natural images."""
    small = Image.effect_noise((GALLERY[0] // 3, GALLERY[1] // 3), 40)
    small.resize(GALLERY, Image.Resampling.NEAREST).save(path)


def _taken_apart(draw: random.Random, task: int) -> dict[str, Any]:
    parts = {term: draw.random() / 9 for term in TERMS}
    parts |= {"local": parts["prior"] + parts["intra"], "global": parts["inter"], "total": sum(parts.values())}
    return {
        "parts": parts, "means": {**{term: draw.random() / 2 for term in TERMS}, "prior": None},
        "across": draw.random() / 2 if task else None, "across_before": draw.random() / 2 if task > 1 else None,
        "between": [[draw.random() / 2 for _ in range(t + 1)] for t in range(task + 1)],
    }  # fmt: skip


def _opened(browser: str, page: Path) -> float:
    """Open a page, and return after how many seconds it says that all its charts are drawn."""
    alone = ["--no-sandbox"] if os.geteuid() == 0 else []  # chromium refuses its sandbox to root
    command = [browser, "--headless=new", "--disable-gpu", *alone, "--dump-dom", page.as_uri()]
    try:
        shown = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"the page cannot be opened in {browser} ({type(error).__name__})") from None
    seconds = re.search(r'data-seconds="([\d.]+)"', shown)
    if seconds is None:
        raise UserError(f"{browser} did not draw the page")
    return float(seconds[1])
