"""The bench's work on pfl-research: its FedAvg and simulated backend, one process, one thread. Needs pfl 0.6.

Generous to pfl: nothing is evaluated, and no metric is written.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from fcil.bench import task
from fcil.bench.task import Clock, Rounds
from fcil.federation.engine import threads


def measure(heavy: bool, rounds: int) -> Rounds | None:
    """Do the work on pfl-research, in a process of its own; None where it is not installed."""
    if find_spec("pfl") is None:
        return None
    return task.apart("fcil.bench.pfl", "pfl-research", heavy, rounds)


def work(heavy: bool, rounds: int, folder: str) -> Rounds:
    """Do the work on pfl-research, in this process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    clock = Clock(heavy)

    class Timed(TrainingProcessCallback):  # type: ignore[misc]
        """Takes the time when a round ends."""

        def on_train_begin(self, *, model: Any) -> Any:
            clock.start()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            clock.round_ended()
            return False, Metrics()

    def shuffled(turn: tuple[int, int]) -> Any:
        data, index = task.shares()[turn[0]], task.rows(*turn).flatten()
        return Dataset((data.images[index], data.labels[index]), user_id=str(turn[0]))

    with threads(1):
        net = task.network(heavy)
        net.metrics = lambda *data: {}  # type: ignore[assignment]
        model = PyTorchModel(
            net,
            local_optimizer_create=partial(torch.optim.SGD, fused=True),
            central_optimizer=torch.optim.SGD(net.parameters(), 1.0),
        )
        clients = FederatedDataset(shuffled, partial(next, _turns()))
        FederatedAveraging().run(
            NNAlgorithmParams(
                central_num_iterations=task.WARM_UP + rounds, evaluation_frequency=10**9,
                train_cohort_size=task.ACTIVE, val_cohort_size=0,
            ),
            SimulatedBackend(clients, clients), model,
            NNTrainHyperParams(local_num_epochs=1, local_learning_rate=task.LR, local_batch_size=task.BATCH),
            callbacks=[Timed()], send_metrics_to_platform=False,
        )  # fmt: skip
    return clock.rounds("pfl-research", 1, net.state_dict())


def _turns() -> Iterator[tuple[int, int]]:
    """Yield (client, round) in the order in which they train."""
    round = 0
    while True:
        yield from ((client, round) for client in task.cohort(round))
        round += 1
