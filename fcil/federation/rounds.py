"""The rounds of federated averaging, for methods that change nothing there."""

from collections.abc import Callable, Iterator
from typing import Any

from fcil.method import Clients


def fedavg(
    server: Any, clients: Clients, train: Callable[..., Any], rounds: int = 0, stage: str = "train"
) -> Iterator[None]:
    """Broadcast, train, average the field `weights`; yield after each round."""
    for _ in clients.rounds(rounds, stage):
        updates = clients.ask(clients.sample(), train, server.broadcast())
        server.state.weights = updates.mean("weights")
        yield
