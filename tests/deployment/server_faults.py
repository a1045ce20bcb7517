"""Faults of a server: it is killed in every part of a run, and goes on."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from fcil.results.ledger import verify
from tests.deployment.federation import LONG, NODES, Federation, descendants, same, simulated, text_of, until
from tests.deployment.sitting import PLAN, Sitting

SERVER = f"{PLAN}rounds = 2\ntasks = 2\n"
KILLS = (  # when it says this, what is killed
    ("task 1, train round 1", "server"), ("task 1, train round 2", "script"), ("task 1, learned", "superlink"),
    ("task 2, train round 1", "server"), ("task 2, train round 1", "script"), ("task 2, train round 2", "superlink"),
)  # fmt: skip
PROGRAMS = {"superlink": "flower-superlink", "script": "flwr-serverapp"}


def hurt_the_server(soak: Sitting) -> None:
    """Kill the server, its SuperLink or its script in every part of a run; compare the end with a simulation."""
    made = soak.served("server", SERVER, 3)
    try:
        for name in NODES:
            made.join(name)
        run, chance = made.place / "run", random.Random(0)
        for mark, what in KILLS:
            until(lambda mark=mark: mark in text_of(run / "server.log"), LONG, mark)
            time.sleep(chance.uniform(0, 8))
            assert not (run / "result.json").exists()
            _kill(made, what)
            soak.fault(f"SIGKILL of the {what}, after: {mark}")
            made.start("server", "serve", "--resume", "run")
            lives = text_of(run / "server.log").count("going on in task")
            until(lambda n=lives: text_of(run / "server.log").count("going on in task") > n, LONG, "it goes on")
        until((run / "result.json").exists, LONG, "the run is finished")
        assert same(run, simulated(made.place / "here", made.place / "hr.toml", soak.folders)) and verify(run) == []
        soak.say(
            f"{len(KILLS)} times killed, the server ends with the weights of an uninterrupted simulation, to the bit"
        )
    finally:
        made.close()


def _kill(made: Federation, what: str) -> None:
    if what == "server":
        return made.kill("server")
    process = made.processes["server"]
    for pid in [pid for pid in descendants(process.pid) if PROGRAMS[what] in _command(pid)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert process.wait(LONG) == 2, "fcil serve notices that what it started is gone"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
