"""More than twenty faults in one sitting, nothing lost: `make soak` writes results/soak.txt.

Part one hurts the server only, and must end with the weights of an uninterrupted run, to the bit. Part two hurts nodes:
the run goes on without them, they come back, and what each remembers is whole.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fcil.deploy.asking import Rules
from fcil.deploy.certificates import make
from fcil.deploy.local import LocalWire, nodes_of
from fcil.deploy.plans import read_config
from fcil.deploy.server import serve
from fcil.federation.versions import Versions
from fcil.results.ledger import read, verify
from tests.deployment.conftest import SHARES, digits_into
from tests.deployment.federation import NODES, ROOT, SHORT, Federation, descendants, same, until

LONG = 900.0
ROGUE = Path(__file__).parent / "rogue"


class Soak:
    """A federation, the log of what was done to it, and a count of faults."""

    def __init__(self, place: Path, log: Path):
        self.place, self.log, self.faults = place, log, 0
        self.begun = time.monotonic()
        folders = sorted(SHARES.items())
        self.folders = [digits_into(place / "data" / name, have, 12 * n) for n, (name, have) in enumerate(folders)]
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
        self.faults += 1
        self.say(f"fault {self.faults:2d}: {sentence}")

    def server_faults(self, kinds: list[str]) -> None:
        """Kill the server, its SuperLink or its script at any moment; compare the end with a simulation."""
        part = self.place / "server"
        part.mkdir()
        made = Federation(part, self.place / "data")
        try:
            (part / "hr.toml").write_text(f'method = "hr"\nrounds = 4\n{SHORT}')
            words = ["--listen", str(made.listen), "--tls", "tls", "--min-nodes", "3", "--capacity", "8"]
            made.start("server", "serve", "hr.toml", *words, "--out", "run")
            for name in NODES:
                made.join(name)
            run, chance = part / "run", random.Random(0)
            for kind in kinds:
                heard = len(text_of(run / "server.log"))
                until(lambda heard=heard: moves(text_of(run / "server.log")[heard:]), LONG, "it goes on")
                time.sleep(chance.uniform(0, 12))
                if (run / "result.json").exists():
                    break
                self._hurt_server(made, run, kind)
            until((run / "result.json").exists, LONG, "the run is finished")
            self.say(f"finished after {len(kinds)} server faults; questions: {questions(run)}")
            config, here = part / "hr.toml", part / "here"
            wire = LocalWire(nodes_of(self.folders, here / "nodes", "cpu"))
            for _ in serve(read_config(config, 8), here, wire, Rules(3, ends=True), lambda _: None, 8):
                pass
            assert same(run, here) and verify(run) == []
            self.say("weights equal those of an uninterrupted simulation, to the bit; the ledger verifies")
        finally:
            made.close()

    def _hurt_server(self, made: Federation, run: Path, kind: str) -> None:
        process = made.processes["server"]
        below = {pid: command_of(pid) for pid in descendants(process.pid)}
        if kind == "server":
            made.kill("server")
        else:
            word = {"superlink": "flower-superlink", "script": "flwr-serverapp"}[kind]
            for pid in [pid for pid, command in below.items() if word in command]:
                os.kill(pid, signal.SIGKILL)
            assert process.wait(120) == 2, "fcil serve notices that what it started is gone"
        self.fault(f"SIGKILL of the {kind}")
        made.start("server", "serve", "--resume", "run")

    def node_faults(self) -> None:
        """Kill nodes, fill a disk, tear a memory, send nonsense, knock without a key."""
        part = self.place / "nodes"
        part.mkdir()
        made, told = Federation(part, self.place / "data"), part / "rogue.txt"
        disk = part / "state" / "berta"
        disk.mkdir(parents=True)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]).returncode == 0
        try:
            (part / "hr.toml").write_text(f'method = "hr"\nrounds = 14\n{SHORT}')
            words = ["--listen", str(made.listen), "--tls", "tls", "--min-nodes", "2", "--capacity", "8"]
            made.start("server", "serve", "hr.toml", *words, "--out", "run")
            rogue = {"PYTHONPATH": f"{ROOT}:{ROGUE}", "ROGUE": str(told)}
            made.join("anna", **rogue)
            for name in NODES[1:]:
                made.join(name)
            run = part / "run"
            log = run / "server.log"
            until(lambda: "train round 1 of 14" in text_of(log), LONG, "the first round")
            for how, refusal in (
                ("nan", "not finite"), ("shapes", "of shape (7, 7)"), ("counts", "less than nothing"),
                ("replay", "answers question"),
            ):  # fmt: skip
                told.write_text(how)
                self.fault(f"node anna sends {how}")
                self._until_said(log, "refused a reply of node anna", refusal)
                told.unlink()
            self._strangers(made, part)
            if mounted:
                filler = disk / "filler"
                _fill(filler)
                self.fault("the disk of node berta is full")
                self._until_said(log, "refused a reply of node berta", "No space left")
                filler.unlink()
                self.say("the disk of node berta has room again")
            for name in ("carla", "berta"):
                made.processes[name].terminate()
                made.processes[name].wait(60)
                self.fault(f"SIGTERM of node {name}")
                made.rejoin(name)
                self.say(f"node {name} is back")
            for name in ("carla", "berta", "carla"):
                made.kill(name)
                self.fault(f"SIGKILL of node {name}")
                if name == "berta":
                    self._tear(disk)
                made.rejoin(name)
                self.say(f"node {name} is back")
            until((run / "result.json").exists, LONG, "the run is finished")
            self._check_nodes(run, part)
        finally:
            made.close()
            if mounted:
                subprocess.run(["umount", "-l", str(disk)])

    def _tear(self, state: Path) -> None:
        """Cut the newest memory short, as a crash of the machine without a journal might."""
        found = sorted(state.glob("*/memory/memory-*.safetensors"), key=lambda path: path.stat().st_mtime)
        if found:
            found[-1].write_bytes(found[-1].read_bytes()[:-20])
            self.fault("the newest memory of node berta is torn")

    def _until_said(self, log: Path, *words: str) -> None:
        seen = len(text_of(log))
        until(lambda: any(all(w in line for w in words) for line in text_of(log)[seen:].splitlines()), LONG, words[0])
        line = next(line for line in text_of(log)[seen:].splitlines() if all(w in line for w in words))
        self.say(f"  the server: {line[20:170]}")

    def _strangers(self, made: Federation, part: Path) -> None:
        make(part / "other", ["127.0.0.1"], ["dora"], 30)
        theirs = part / "other" / "nodes" / "dora"
        (made.data / "dora").mkdir(exist_ok=True)
        for what, ca in (("an unregistered key", part / "tls" / "ca.crt"), ("a wrong CA", theirs / "ca.crt")):
            made.join("dora", theirs / "dora.key", ca, 0)
            self.fault(f"a stranger with {what}")
            assert made.processes["dora"].wait(120) == 2
            self.say(f"  refused: {made.said('dora')[-120:]}")
        words = ["join", "--server", str(made.listen), "--data", str(made.data / "dora"), "--state", str(part / "d")]
        made.start("keyless", *words, "--insecure")
        self.fault("a stranger without a key and without TLS")
        time.sleep(15)
        assert "is admitted" not in made.said("keyless")
        made.kill("keyless")
        self.say("  not admitted")

    def _check_nodes(self, run: Path, part: Path) -> None:
        lines = read(run / "ledger.jsonl")
        tasks = [line for line in lines if line["kind"] == "task"]
        assert len(tasks) == 2 and verify(run) == []
        experiment = json.loads((run / "experiment.json").read_text())["experiment"]
        for name in NODES:
            kept = Versions(part / "state" / name / experiment / "memory")
            assert kept.before(10**9) is not None, f"{name} has lost its memory"
        lost = sum(line["lost"] for line in lines if line["kind"] in ("round", "task"))
        refused = sum(len(line.get("refused", [])) for line in lines)
        rounds = [sum(line["seconds"].values()) for line in lines if line["kind"] == "round"]
        self.say(
            f"finished: both tasks learned, {100 * sum(tasks[-1]['correct']) / sum(tasks[-1]['total']):.1f} % right; "
            f"{lost} answers did not come, {refused} replies refused, every memory whole, the ledger verifies"
        )
        self.say(f"a round took {sorted(rounds)[len(rounds) // 2]:.1f} s in the median")


def _fill(path: Path) -> None:
    """Write until there is no room for another byte."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (4096, 1):
            with suppress(OSError):
                while True:
                    os.write(handle, bytes(size))
    finally:
        os.close(handle)


def moves(log: str) -> bool:
    """Tell whether a round or a task has ended."""
    return any(word in log for word in ("begins:", "round", "learned"))


def text_of(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def questions(run: Path) -> int:
    """Return how many questions the server's last checkpoint counts."""
    newest = max((run / "checkpoint").glob("*.json"), key=lambda path: int(path.stem))
    step: int = json.loads(newest.read_text())["facts"]["cursor"]["step"]
    return step


def main(part: Callable[[str], bool], log: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        soak = Soak(Path(place), log)
        if part("server"):
            soak.server_faults(["server", "superlink", "server", "script", "server", "superlink", "script", "server"])
        if part("nodes"):
            soak.node_faults()
        soak.say(f"{soak.faults} faults, nothing lost")


if __name__ == "__main__":
    asked = sys.argv[1:]
    main(lambda part: not asked or part in asked, ROOT / "results" / f"{'-'.join(['soak', *asked])}.txt")
