"""What the server's process does: reads its run folder, and serves it over a wire."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fcil.deploy.asking import Log, Rules, Wire
from fcil.deploy.plans import read_config
from fcil.deploy.registry import CAPACITY
from fcil.deploy.server import serve
from fcil.errors import UserError
from fcil.files import write_text
from fcil.plan import Plan

NEVER = 10**9


@dataclass(frozen=True)
class Terms:
    """How a deployment is served; kept in deploy.json of its run folder, beside the plan."""

    min_nodes: int = 1
    enough: int = 1
    every: float = 0.0
    capacity: int = CAPACITY
    timeout: float = 1800.0
    look_every: float = 60.0
    listen: str = ""
    tls: str = ""
    nodes: tuple[str, ...] = ()  # folders, where the nodes are simulated

    def write(self, run: Path) -> None:
        """Keep them in a run folder."""
        run.mkdir(parents=True, exist_ok=True)
        write_text(run / "deploy.json", json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def read(run: Path) -> "Terms":
        """Read those of a run folder."""
        path = run / "deploy.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            return Terms(**{**found, "nodes": tuple(found.get("nodes", ()))})
        except FileNotFoundError:
            raise UserError(f"{run} is not the folder of a deployment: it has no deploy.json") from None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is damaged ({error})") from None

    @property
    def rules(self) -> Rules:
        """When the server goes on."""
        return Rules(self.min_nodes, self.enough, self.every, self.look_every, ends=bool(self.nodes))


def script(config: Mapping[str, Any], wire: Callable[[float], Wire]) -> None:
    """Serve a run folder to its end; what stops it is said in its log."""
    run = Path(str(config["run"]))
    if not str(config["run"]) or not run.is_absolute():
        raise UserError("say which run folder to serve, as an absolute path: -c 'run=\"/...\"'")
    run.mkdir(parents=True, exist_ok=True)
    _end_with(os.getppid())
    log = log_to(run / "server.log")
    try:
        wanted, terms = _prepared(run, config)
        log(f"serving {wanted.name} as process {os.getpid()}")
        for line in serve(wanted, run, wire(terms.timeout), terms.rules, log, terms.capacity):
            log(said(line))
        log("finished")
    except UserError as error:
        log(f"stopped: {error}")
        raise


def _end_with(parent: int) -> None:
    """End when the process that started us does: without a SuperLink nobody can be asked, and the run must be free."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _prepared(run: Path, config: Mapping[str, Any]) -> tuple[Plan, Terms]:
    if (run / "deploy.json").exists():
        return Plan.read(run), Terms.read(run)
    if not config.get("config"):
        raise UserError(f"{run} holds no deployment; begin one with -c 'config=\"FILE.toml\"'")
    terms = Terms(
        int(config["min-nodes"]), int(config["task-when"]), float(config["task-every"]), int(config["capacity"]),
        float(config["timeout"]),
    )  # fmt: skip
    wanted = read_config(Path(str(config["config"])), terms.capacity, "flwr run")
    write_text(run / "config.toml", wanted.to_toml())
    terms.write(run)
    return wanted, terms


def log_to(path: Path) -> Log:
    """Return what appends lines with their time to a file."""

    def log(sentence: str) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {' '.join(sentence.split())}\n")

    return log


def said(line: Mapping[str, Any]) -> str:
    """Say what a line of the ledger says."""
    if line["kind"] == "round":
        loss = "" if line["loss"] is None else f", loss {line['loss']:.3f}"
        lost = f", {line['lost']} without an answer" if line["lost"] else ""
        return f"task {line['task'] + 1}, {line['stage']} round {line['round'] + 1} of {line['rounds']}{loss}{lost}"
    asked = sum(line["total"])
    right = f"{100 * sum(line['correct']) / asked:.1f} %" if asked else "nothing"
    after = f"round {line['round'] + 1}" if line["kind"] == "evaluation" else "learned"
    classes = "1 class" if len(line["per_class"]) == 1 else f"{len(line['per_class'])} classes"
    return f"task {line['task'] + 1}, {after}: {right} of {asked} held-out images, {classes} so far"
