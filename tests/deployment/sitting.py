"""One sitting in which a federation is hurt: the log of what was done to it, and a count of faults."""

import os
import threading
import time
from pathlib import Path

from tests.deployment.conftest import digits_into
from tests.deployment.federation import NODES, ROOT, Federation

CLASSES = (0, 1, 2, 3, 4, 5)
PLAN = 'method = "hr"\nsteps = 3\nbatch_size = 16\nimage_size = 8\nclasses_per_task = 2\nmemory = 20\n'


class Sitting:
    """Where it happens, what was done, and how many faults there were."""

    def __init__(self, place: Path, log: Path):
        self.place, self.log, self.faults, self.lock = place, log, 0, threading.Lock()
        self.begun = time.monotonic()
        self.folders = [digits_into(place / "data" / name, CLASSES, 12 * n) for n, name in enumerate(NODES)]
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        os.environ["PYTHONPATH"] = str(ROOT)

    def say(self, sentence: str) -> None:
        """Write down what happens."""
        line = f"{time.monotonic() - self.begun:7.1f} s  {sentence}"
        print(line, flush=True)
        with self.log.open("a") as file:
            file.write(line + "\n")

    def fault(self, sentence: str) -> None:
        """Count a fault."""
        with self.lock:
            self.faults += 1
            self.say(f"fault {self.faults:2d}: {sentence}")

    def served(self, name: str, config: str, min_nodes: int) -> Federation:
        """Start a server."""
        part = self.place / name
        part.mkdir()
        made = Federation(part, self.place / "data")
        (part / "hr.toml").write_text(config)
        words = ["--listen", str(made.listen), "--tls", "tls", "--min-nodes", str(min_nodes), "--capacity", "8"]
        made.start("server", "serve", "hr.toml", *words, "--out", "run")
        return made
