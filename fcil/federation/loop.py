"""The whole experiment, in one loop.

It yields a line of the ledger whenever something ended: a round, an evaluation, a task. Whoever consumes the lines
shows progress, writes the ledger, saves checkpoints or stops; there are no callbacks.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.federation.clients import Door, Tally
from fcil.federation.engine import Engine
from fcil.method import Server
from fcil.results.metrics import per_client
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import Task

Line = dict[str, Any]


def learn(scenario: Scenario, server: Server, clients: Door, engine: Engine) -> Iterator[Line]:
    """Learn every task that the cursor has not passed; yield a ledger line per round and per task."""
    parts = scenario, server, clients, engine
    for task in scenario.tasks[clients.cursor.task :]:
        clients.begin(task)
        for _ in server.learn_task(task, clients):
            clients.finish()
            every = clients.protocol.evaluate_every
            if every and clients.stage == "train" and (clients.round + 1) % every == 0:
                where = {"task": task.index, "stage": clients.stage, "round": clients.round, "rounds": clients.of}
                yield {"kind": "evaluation", **where, **_counted(task, *parts)}
            yield _round_line(clients)  # last: a run that stops here has the whole round in its ledger
        clients.finish()
        line = _task_line(task, *parts)
        clients.cursor.enter(task.index + 1)
        yield line


def _round_line(clients: Door) -> Line:
    tally, clients.tally = clients.tally, Tally()
    loss = tally.loss()
    if loss is not None and not math.isfinite(loss):
        raise UserError(
            f"training diverged in task {clients.task.index + 1}, round {clients.round + 1}: the loss is {loss}; "
            "set a smaller lr, or a clip such as 1"
        )
    return {
        "kind": "round", "task": clients.task.index, "stage": clients.stage,
        "round": clients.round, "rounds": clients.of, "clients": tally.clients, "lost": tally.lost, "loss": loss,
        "seconds": dict(tally.seconds), "down": tally.down, "up": tally.up,
    }  # fmt: skip


def _task_line(task: Task, scenario: Scenario, server: Server, clients: Door, engine: Engine) -> Line:
    counts = _counted(task, scenario, server, clients, engine)
    tally, clients.tally = clients.tally, Tally()
    present = clients.everyone()
    kept = [clients.cursor.kept.get(c, 0) for c in present]
    held = scenario.holdings(task)[present].tolist()
    old = sum(counts["total"][:-1])
    measured: Callable[[], Line] = getattr(server, "measured", dict)
    return {
        "kind": "task", "task": task.index, **counts, "per_client": per_client(counts["per_class"], held),
        "old": round(100 * sum(counts["correct"][:-1]) / old, 4) if old else None, "measured": measured(),
        "clients": len(present), "lost": tally.lost, "seconds": dict(tally.seconds), "down": tally.down, "up": tally.up,
        "kept": sum(kept), "kept_max": max(kept, default=0),
    }  # fmt: skip


def _counted(task: Task, scenario: Scenario, server: Server, clients: Door, engine: Engine) -> Line:
    """Classify the test images of every task so far with what a device was sent, and nothing else."""
    right: list[Tensor] = []
    labels: list[Tensor] = []
    with clients.tally.timing("evaluate"):
        message = engine.receive(server.broadcast())
        for earlier in scenario.tasks[: task.index + 1]:
            images, truth = scenario.test(earlier)
            right.append(engine.classify(message, images).cpu() == truth.cpu())
            labels.append(truth.cpu())
    asked, hits = torch.cat(labels), torch.cat(right)
    total = torch.bincount(asked, minlength=scenario.capacity).tolist()
    correct = torch.bincount(asked[hits], minlength=scenario.capacity).tolist()
    return {
        "correct": [int(r.sum()) for r in right],
        "total": [len(r) for r in right],
        "per_class": [round(100 * c / n, 4) if n else None for c, n in zip(correct, total, strict=True)],
    }
