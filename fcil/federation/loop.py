"""The whole experiment, in one loop.

It yields a line of the ledger whenever something ended: a round, an evaluation, a task. Whoever consumes the lines shows
progress, writes the ledger, saves checkpoints or stops; there are no callbacks.
"""

import time
from collections.abc import Iterator
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
    for task in scenario.tasks[clients.cursor.task :]:
        clients.begin(task)
        for _ in server.learn_task(task, clients):
            clients.finish()
            line = _round_line(clients)
            yield line
            every = clients.protocol.evaluate_every
            if every and (clients.round + 1) % every == 0:
                yield {"kind": "evaluation", "task": task.index, "round": clients.round, **_counts(scenario, task, server, engine)}
        clients.finish()
        line = _task_line(scenario, task, server, clients, engine)
        clients.cursor.task, clients.cursor.once, clients.cursor.rounds = task.index + 1, [], {}
        yield line


def _round_line(clients: Door) -> Line:
    tally, clients.tally = clients.tally, Tally()
    loss = tally.loss()
    if loss is not None and not torch.isfinite(torch.tensor(loss)):
        raise UserError(
            f"training diverged in task {clients.task.index + 1}, round {clients.round + 1}: the loss is {loss}; "
            "set a smaller lr, or a smaller clip"
        )
    return {
        "kind": "round", "task": clients.task.index, "stage": clients.stage, "round": clients.round, "rounds": clients.of,
        "clients": tally.clients, "lost": tally.lost, "loss": loss, "seconds": dict(tally.seconds),
        "down": tally.down, "up": tally.up,
    }  # fmt: skip


def _task_line(scenario: Scenario, task: Task, server: Server, clients: Door, engine: Engine) -> Line:
    tally, clients.tally = clients.tally, Tally()
    start = time.perf_counter()
    counts = _counts(scenario, task, server, engine)
    tally.seconds["evaluate"] += time.perf_counter() - start
    present = clients.everyone()
    kept = [clients.cursor.kept.get(c, 0) for c in present]
    held = [scenario.held(c, task) for c in present]
    return {
        "kind": "task", "task": task.index, **counts, "per_client": per_client(counts["per_class"], held),
        "clients": len(present), "lost": tally.lost, "seconds": dict(tally.seconds), "down": tally.down, "up": tally.up,
        "kept": sum(kept), "kept_max": max(kept, default=0),
    }  # fmt: skip


def _counts(scenario: Scenario, task: Task, server: Server, engine: Engine) -> Line:
    """Classify the test images of every task so far with what a device was sent, and nothing else."""
    message = engine.receive(server.broadcast())
    right: list[Tensor] = []
    labels: list[Tensor] = []
    for earlier in scenario.tasks[: task.index + 1]:
        images, truth = scenario.test(earlier)
        right.append(engine.classify(message, images).cpu() == truth.cpu())
        labels.append(truth.cpu())
    truth, hits = torch.cat(labels), torch.cat(right)
    total = torch.bincount(truth, minlength=scenario.capacity)
    correct = torch.bincount(truth[hits], minlength=scenario.capacity)
    return {
        "correct": [int(r.sum()) for r in right],
        "total": [len(r) for r in right],
        "per_class": [round(100 * c / n, 4) if n else None for c, n in zip(correct.tolist(), total.tolist(), strict=True)],
    }
