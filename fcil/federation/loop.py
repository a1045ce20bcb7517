"""The whole experiment, in one loop.

It yields a line of the ledger whenever something ended: a round, an evaluation, a task. Whoever consumes the lines
shows progress, writes the ledger, saves checkpoints or stops; there are no callbacks.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fcil.analysis.decomposition import decomposition
from fcil.errors import UserError
from fcil.federation.clients import Door, Tally
from fcil.federation.engine import Engine
from fcil.method import Server
from fcil.results.metrics import per_client
from fcil.scenario.reach import at_work
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import Task

Line = dict[str, Any]
OVER = object()
Scored = list[tuple[Tensor, Tensor]]  # by task: the scores of its test images, and their labels


def learn(scenario: Scenario, server: Server, clients: Door, engine: Engine) -> Iterator[Line]:
    """Learn every task that the cursor has not passed; yield a ledger line per round and per task."""
    parts = scenario, server, clients, engine
    for task in scenario.tasks[clients.cursor.task :]:
        clients.begin(task)
        for _ in rounds_of(server.learn_task(task, clients), clients):
            clients.finish()
            every = clients.protocol.evaluate_every
            if every and clients.stage == "train" and (clients.round + 1) % every == 0:
                where = {"task": task.index, "stage": clients.stage, "round": clients.round, "rounds": clients.of}
                yield {"kind": "evaluation", **where, **_counted(_scored(task, *parts), scenario.capacity)}
            yield round_line(clients)  # last: a run that stops here has the whole round in its ledger
        clients.finish()
        line = _task_line(task, *parts)
        clients.cursor.enter(task.index + 1)
        yield line


def rounds_of(script: Iterator[None], clients: Door) -> Iterator[None]:
    """Go from one end of a round to the next; time that no answer took is the server's own."""
    if not isinstance(script, Iterator):
        raise UserError("learn_task never yields, as it must after each round; `yield from fedavg(...)` does it")
    while True:
        start, before = time.perf_counter(), sum(clients.tally.seconds.values())
        with at_work("the server"):
            over = next(script, OVER)
        asked = sum(clients.tally.seconds.values()) - before
        clients.tally.seconds["server"] += max(0.0, time.perf_counter() - start - asked)
        if over is OVER:
            return
        yield


def round_line(clients: Door) -> Line:
    """Return the ledger's line of the round that has just ended."""
    tally, clients.tally = clients.tally, Tally()
    loss = tally.loss()
    if len(tally.diverged - tally.trained) > len(tally.trained):
        raise UserError(
            f"training diverged in task {clients.task.index + 1}, round {clients.round + 1}: most clients answer with "
            "numbers that are not finite; set a smaller lr, or a clip such as 1"
        )
    return {
        "kind": "round", "task": clients.task.index, "stage": clients.stage,
        "round": clients.round, "rounds": clients.of, "clients": tally.clients, "lost": tally.lost, "loss": loss,
        "seconds": dict(tally.seconds), "down": tally.down, "up": tally.up, **tally.noted(),
    }  # fmt: skip


def _task_line(task: Task, scenario: Scenario, server: Server, clients: Door, engine: Engine) -> Line:
    scored = _scored(task, scenario, server, clients, engine)
    with clients.tally.timing("evaluate"):
        counts, apart = _counted(scored, scenario.capacity), _taken_apart(task, scored, scenario)
    held = scenario.holdings(task)[clients.everyone()].tolist()
    return task_line(task, server, clients, counts, held, apart)


def task_line(
    task: Task, server: Server, clients: Door, counts: Line, held: list[list[int]], apart: Line | None
) -> Line:
    """Return the ledger's line of a task: right answers by class, and what each client present has held of each."""
    tally, clients.tally = clients.tally, Tally()
    kept = [clients.cursor.kept.get(c, 0) for c in clients.everyone()]
    old = sum(counts["total"][:-1])
    measured: Callable[[], Line] = getattr(server, "measured", dict)
    return {
        "kind": "task", "task": task.index, **counts, "per_client": per_client(counts["per_class"], held),
        "old": round(100 * sum(counts["correct"][:-1]) / old, 4) if old else None, "measured": measured(),
        "decomposition": apart,
        "clients": len(held), "lost": tally.lost, "seconds": dict(tally.seconds), "down": tally.down, "up": tally.up,
        "kept": sum(kept), "kept_max": max(kept, default=0), **tally.noted(),
    }  # fmt: skip


def _scored(task: Task, scenario: Scenario, server: Server, clients: Door, engine: Engine) -> Scored:
    """Score the test images of every task so far with what a device was sent, and nothing else."""
    with clients.tally.timing("evaluate"):
        message, tests = engine.receive(server.broadcast()), map(scenario.test, scenario.tasks[: task.index + 1])
        return [(engine.scores(message, images), labels.cpu()) for images, labels in tests]


def _counted(scored: Scored, capacity: int) -> Line:
    right = [scores.argmax(1).cpu() == labels for scores, labels in scored]
    asked, hits = torch.cat([labels for _, labels in scored]), torch.cat(right)
    total, correct = (torch.bincount(some, minlength=capacity).tolist() for some in (asked, asked[hits]))
    return {
        "correct": [int(r.sum()) for r in right],
        "total": [len(r) for r in right],
        "per_class": by_class(correct, total),
    }


def by_class(correct: list[int], total: list[int]) -> list[float | None]:
    """Return the accuracy on each class in percent; None where there is no test image."""
    return [round(100 * c / n, 4) if n else None for c, n in zip(correct, total, strict=True)]


def _taken_apart(task: Task, scored: Scored, scenario: Scenario) -> Line:
    """Say which pairs of classes are confused, and whether they meet in one client."""
    held = [torch.from_numpy(scenario.holdings(t)) for t in scenario.tasks[max(0, task.index - 1) : task.index + 1]]
    scores, labels = (torch.cat(both) for both in zip(*scored, strict=True))
    return decomposition(scores, labels, [t.new for t in scenario.tasks[: task.index + 1]], held[-1], held[0])
