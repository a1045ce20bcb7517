"""What methods do with their clients that is not their own: federated averaging, fitting a codec or codebooks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from fcil.blocks.codec import Statistics, TransformCodec
from fcil.blocks.quantizer import Cells, moved
from fcil.federation.fitting import rate
from fcil.method import Clients, remote
from fcil.records import Done
from fcil.scenario.benchmarks import Protocol
from fcil.scenario.tasks import LocalData, Task
from fcil.seeds import seed_of


def fedavg(
    server: Any, clients: Clients, train: Callable[..., Any], rounds: int = 0, stage: str = "train"
) -> Iterator[None]:
    """Broadcast, train, average the field `weights`; yield after each round."""
    for _ in clients.rounds(rounds, stage):
        updates = clients.ask(clients.sample(), train, server.broadcast())
        server.state.weights = updates.mean("weights")
        yield


def pace(protocol: Protocol, round: int) -> float:
    """Return the factor of the clients' learning rate in a round of a task, for what a server trains beside them."""
    return rate(protocol, round / protocol.rounds, (round + 1) / protocol.rounds)


@remote
def measure(client: Any, memory: Any, data: LocalData, message: Done) -> Statistics:
    """Answer with what `client.codec` has to know; a client has it as `measure = measure`."""
    return Statistics(client.codec.statistics(data.images))


def fit_codec(server: Any, task: Task, clients: Clients, answer: Callable[..., Any]) -> None:
    """Fit `server.codec` in the first task, from sums over all clients, where it has anything to fit."""
    if isinstance(server.codec, TransformCodec) and task.index == 0 and clients.once("codec"):
        replies = clients.ask(clients.everyone(), answer, Done())
        server.state.codec = server.codec.fitted(replies.sum("sums"))


def fit_codebooks(server: Any, clients: Clients, measure: Callable[..., Any], exchanges: int) -> Iterator[None]:
    """Find `server.state.codebooks` by exchanges of sums with everyone; yield after each."""
    for exchange in clients.rounds(exchanges, "codebooks"):
        found = clients.ask(clients.everyone(), measure, server.broadcast())
        sums, squares, counts = (found.sum(part) for part in ("sums", "squares", "counts"))
        if counts is not None:
            pooled = Cells(sums, squares, counts)
            draws = torch.Generator().manual_seed(seed_of(server.setting.seed, "codebooks", exchange))
            server.state.codebooks, server.state.fitted = moved(server.state.codebooks, pooled, draws), True
        yield
