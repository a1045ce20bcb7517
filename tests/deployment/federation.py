"""A federation of real processes on this machine, over TLS, with keys; and ways to hurt it."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from fcil.deploy.asking import Rules
from fcil.deploy.certificates import make
from fcil.deploy.local import LocalWire, nodes_of
from fcil.deploy.plans import read_config
from fcil.deploy.processes import Address, await_listening, die_with_us, flwr, free_port, register, superlink
from fcil.deploy.server import serve
from fcil.records import read_tensors

LONG = 1200.0  # seconds that anything may take: a busy machine is no failure
ROGUE = Path(__file__).parent / "rogue"
ROOT = Path(__file__).parent.parent.parent
NODES = ("anna", "berta", "carla")
SHORT = "rounds = 1\nsteps = 3\nbatch_size = 16\nimage_size = 8\nclasses_per_task = 2\ntasks = 2\nmemory = 20\n"
HR = f'method = "hr"\n{SHORT}'


def until(met: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition; fail in words when it takes too long."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.3)


def text_of(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def rogue(told: Path) -> dict[str, str]:
    """Return the environment of a node that does what the file says, once there is one."""
    return {"PYTHONPATH": f"{ROOT}:{ROGUE}", "ROGUE": str(told)}


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def same(one: Path, other: Path) -> bool:
    """Tell whether two runs ended with the same weights, to the bit."""
    a, b = (read_tensors(run / "model.safetensors")[0] for run in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def simulated(place: Path, config: Path, folders: list[Path]) -> Path:
    """Run the same folders in this process, as `fcil run --nodes` does; return the run."""
    wire = LocalWire(nodes_of(folders, place / "nodes", "cpu"))
    for _ in serve(read_config(config, 8), place, wire, Rules(3, ends=True), lambda _: None, 8):
        pass
    return place


class Federation:
    """Certificates, a server and nodes below one folder."""

    def __init__(self, place: Path, data: Path, nodes: tuple[str, ...] = NODES):
        self.place, self.data, self.port = place, data, free_port()
        self.listen = Address("127.0.0.1", self.port)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.folders = [data / name for name in nodes]
        make(place / "tls", ["127.0.0.1", "localhost"], nodes, 30)

    def start(self, name: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
        """Start `fcil WORDS...`; what it says goes to NAME.txt."""
        command = [sys.executable, "-m", "fcil", *words]
        with (self.place / f"{name}.txt").open("ab") as said:
            process = subprocess.Popen(
                command, stdout=said, stderr=said, env={**environment(), **more}, cwd=self.place,
                preexec_fn=die_with_us,
            )  # fmt: skip
        self.processes[name] = process
        return process

    def said(self, name: str) -> str:
        """Return what a process has said."""
        path = self.place / f"{name}.txt"
        return " ".join(path.read_text().split()) if path.exists() else ""

    def join(
        self, name: str, key: Path | None = None, ca: Path | None = None, patience: int = 900, called: str = "",
        **more: str,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """Start a node, which may call itself otherwise."""
        own = self.place / "tls" / "nodes" / name
        words = ["join", "--server", str(self.listen), "--data", str(self.data / name), "--name", called or name]
        words += ["--state", str(self.place / "state" / name), "--key", str(key or own / f"{name}.key")]
        words += ["--patience", str(patience)]
        return self.start(name, *words, *([] if ca is None else ["--ca", str(ca)]), **more)

    def rejoin(self, name: str) -> None:
        """Start a node again, and wait until the server admits it."""
        (self.place / f"{name}.txt").unlink(missing_ok=True)
        self.join(name)
        until(lambda: self.ended(name) or "is admitted" in self.said(name), LONG, f"{name} is admitted")
        assert not self.ended(name), self.said(name)

    def ended(self, name: str) -> bool:
        """Tell whether a process is over."""
        return self.processes[name].poll() is not None

    def kill(self, name: str) -> None:
        """End a process and all that it started, at once."""
        process = self.processes[name]
        for pid in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """Stop everything."""
        for process in self.processes.values():
            process.terminate()
        for name, process in self.processes.items():
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            self.kill(name)


def strangers(made: Federation) -> dict[str, tuple[list[str], str]]:
    """Return who must not get in: what each is, how it knocks, and what it is told."""
    make(made.place / "other", ["127.0.0.1"], ["dora"], 30)
    theirs, ours = made.place / "other" / "nodes" / "dora", str(made.place / "tls" / "ca.crt")
    (made.data / "dora").mkdir(exist_ok=True)
    words = ["join", "--server", str(made.listen), "--data", str(made.data / "dora"), "--patience", "0"]
    key = ["--key", str(theirs / "dora.key")]
    ways = {
        "an unregistered key": ([*key, "--ca", ours], "did not admit node dora: its key is not registered there"),
        "TLS but no key": (["--insecure", "--ca", ours], "admits nodes with a key only"),
        "a wrong CA": (key, "vouches for"),
    }
    return {what: ([*words, "--state", str(made.place / what), *more], told) for what, (more, told) in ways.items()}


class Link(Federation):
    """A federation around Flower's SuperLink alone, to which runs are submitted as `flwr run` does."""

    def __init__(self, place: Path, data: Path, nodes: tuple[str, ...] = NODES):
        super().__init__(place, data, nodes)
        self.home = place / "flower"
        self.processes["superlink"] = process = superlink(self.listen, self.home, place / "tls")
        await_listening(self.listen, process, self.home / "superlink.log")
        for name in nodes:
            register(self.home, place / "tls" / "nodes" / name / f"{name}.pub")

    def submit(self, name: str, config: str, **terms: object) -> Path:
        """Begin a run; return its folder."""
        (self.place / f"{name}.toml").write_text(config)
        run = self.place / name
        words = {"run": f'"{run}"', "config": f'"{self.place / name}.toml"', "min-nodes": 3, "capacity": 8, **terms}
        done = flwr(
            self.home, "run", str(ROOT / "deploy"), "fcil", "-c", " ".join(f"{k}={v}" for k, v in words.items()),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return run


def descendants(pid: int) -> list[int]:
    """Return the processes below one, children first."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        parent = re.match(r"\d+ \(.*\) \S (\d+)", text, re.DOTALL)
        if parent and int(parent[1]) == pid:
            child = int(stat.parent.name)
            found += [*descendants(child), child]
    return found
