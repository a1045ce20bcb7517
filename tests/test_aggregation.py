"""Robust averages: beside Flower's own where it has them, and in whole runs with a liar among the clients."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.experiment import execute
from fcil.federation.calls import Answered
from fcil.federation.loop import learn
from fcil.federation.replies import Replies
from fcil.parts import assemble
from fcil.plan import plan
from fcil.records import Done, Update, Weights, flatten, record, unflatten
from fcil.results.metrics import summary
from fcil.scenario.benchmarks import BENCHMARKS, Protocol
from fcil.scenario.tasks import Task
from tests.conftest import tiny_plan


@record
class Sent:
    weights: Weights


def updates(clients: int, seed: int = 0, counts: list[int] | None = None) -> list[Update]:
    draws = torch.Generator().manual_seed(seed)
    shapes = {"conv": (3, 2, 2), "bias": (5,)}
    return [
        Update(
            {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}
            | {"steps": torch.tensor(7 + c)},
            counts[c] if counts else 1,
        )
        for c in range(clients)
    ]


def averaged(ups: list[Update], sent: Any = None, **protocol: Any) -> Weights:
    return Replies(Update, iter(ups), sent or Done(), Protocol(**protocol)).mean("weights")


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Flower's strategies, in a process that passes for one of its tasks, as whoever makes a message must be."""
    strategies = pytest.importorskip("flwr.serverapp.strategy")
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(identity, f"_{name}", 1)
    return strategies


def by_flower(ups: list[Update], strategy: Any) -> dict[str, np.ndarray]:
    """What a strategy of Flower makes of the same updates, as the messages that it works on."""
    import flwr.app as flwr

    messages = []
    for number, up in enumerate(ups):
        arrays = flwr.ArrayRecord({name: t for name, t in up.weights.items() if t.is_floating_point()})
        content = flwr.RecordDict({"arrays": arrays, "metrics": flwr.MetricRecord({"num-examples": up.count})})
        asked = flwr.Message(flwr.RecordDict(), dst_node_id=number + 1, message_type="train")
        messages.append(flwr.Message(content, reply_to=asked))
    arrays, _ = strategy.aggregate_train(1, messages)
    return {name: array.numpy() for name, array in arrays.items()}


def alike(mine: Weights, theirs: dict[str, np.ndarray]) -> bool:
    floats = {name: tensor.numpy() for name, tensor in mine.items() if tensor.is_floating_point()}
    return floats.keys() == theirs.keys() and all(np.allclose(floats[n], theirs[n], atol=1e-6) for n in theirs)


@pytest.mark.parametrize("clients", [1, 2, 5, 8])
def test_the_median_is_flowers(clients: int, flower: Any) -> None:
    strategy = flower.FedMedian()
    ups = updates(clients)
    assert alike(averaged(ups, aggregate="median"), by_flower(ups, strategy))


@pytest.mark.parametrize(("clients", "share"), [(4, 0.25), (5, 0.2), (10, 0.1), (10, 0.3), (8, 0.0)])
def test_the_trimmed_mean_is_flowers_where_the_share_is_of_whole_clients(
    clients: int, share: float, flower: Any
) -> None:
    strategy = flower.FedTrimmedAvg(beta=share)
    ups = updates(clients)
    assert alike(averaged(ups, aggregate="trimmed", trim=share), by_flower(ups, strategy))


def test_where_it_is_of_a_part_of_a_client_one_more_is_cut_than_flower_would(flower: Any) -> None:
    strategy = flower.FedTrimmedAvg(beta=0.1)
    ups = updates(5)
    ups[0].weights["bias"][:] = 1e6
    assert by_flower(ups, strategy)["bias"].max() > 1e5, "a tenth of five clients is nobody"
    assert averaged(ups, aggregate="trimmed", trim=0.1)["bias"].abs().max() < 10


@pytest.mark.parametrize("counts", [[1, 1, 1], [30, 10, 5]])
def test_the_mean_by_samples_is_flowers(counts: list[int], flower: Any) -> None:
    strategy = flower.FedAvg()
    ups = updates(3, counts=counts)
    assert alike(averaged(ups, weighting="samples"), by_flower(ups, strategy))


# -- clipped updates --------------------------------------------------------------------------------------------------


def a_sent() -> Sent:
    return Sent({name: torch.full_like(t, 2) for name, t in updates(1)[0].weights.items()})


def distance(weights: Weights, sent: Sent) -> float:
    moved = [(t - sent.weights[n]).flatten() for n, t in weights.items() if t.is_floating_point()]
    return float(torch.cat(moved).norm())


def test_a_clipped_update_keeps_its_direction_and_has_the_length_allowed() -> None:
    (up,), sent = updates(1), a_sent()
    mean = averaged([up], sent, aggregate="clipped", update_norm=0.5)
    assert distance(mean, sent) == pytest.approx(0.5, rel=1e-5)
    factor = 0.5 / distance(up.weights, sent)
    expected = {n: 2 + factor * (t - 2) for n, t in up.weights.items() if t.is_floating_point()}
    assert all(torch.allclose(mean[n], expected[n], atol=1e-6) for n in expected)
    assert mean["steps"].item() == 7, "integers are counters"


def test_updates_within_the_norm_are_averaged_as_ever() -> None:
    ups, sent = updates(4), a_sent()
    plain, clipped = averaged(ups, sent), averaged(ups, sent, aggregate="clipped", update_norm=1e4)
    assert all(torch.equal(plain[name], clipped[name]) for name in plain)


def test_without_a_norm_the_median_of_the_round_is_the_limit() -> None:
    ups, sent = updates(3), a_sent()
    lengths = sorted(distance(up.weights, sent) for up in ups)
    limited = averaged(ups, sent, aggregate="clipped", update_norm=lengths[1])
    chosen = averaged(ups, sent, aggregate="clipped")
    assert all(torch.allclose(limited[name], chosen[name], atol=1e-6) for name in limited)


def test_clipping_and_weighing_by_samples_go_together() -> None:
    ups, sent = updates(2, counts=[30, 10]), a_sent()
    mean = averaged(ups, sent, aggregate="clipped", update_norm=1.0, weighting="samples")
    each = [averaged([up], sent, aggregate="clipped", update_norm=1.0) for up in ups]
    assert torch.allclose(mean["bias"], 0.75 * each[0]["bias"] + 0.25 * each[1]["bias"], atol=1e-6)


def test_clients_that_send_a_part_are_clipped_by_that_part() -> None:
    part = Update({"bias": torch.full((5,), 102.0)}, 1)
    mean = averaged([part], a_sent(), aggregate="clipped", update_norm=1.0)
    assert mean.keys() == {"bias"} and float((mean["bias"] - 2).norm()) == pytest.approx(1.0, rel=1e-5)


def test_a_field_that_nobody_sent_has_no_change_to_clip() -> None:
    @record
    class Score:
        score: Tensor

    came = Replies(
        Score, iter([Score(torch.tensor(4.0)), Score(torch.tensor(8.0))]), a_sent(), Protocol(aggregate="clipped")
    )
    assert came.mean("score").item() == 6.0


def test_one_liar_moves_a_clipped_mean_by_no_more_than_its_share() -> None:
    ups, sent = updates(5), a_sent()
    liar = Update({n: 1e6 * t for n, t in ups[0].weights.items()}, 1)
    honest, spoilt = averaged(ups, sent), averaged([liar, *ups[1:]], sent, aggregate="clipped")
    assert distance(spoilt, sent) < 2 * distance(honest, sent)


# -- whole runs -------------------------------------------------------------------------------------------------------


class Liar:
    """The simulation's transport, in which one client turns its update around and makes it ten times as long."""

    def __init__(self, inner: Any, client: int):
        self.inner, self.client = inner, client

    def begin(self, task: Task) -> None:
        self.inner.begin(task)

    def deliver(self, who: Any, handler: Callable[..., Any], message: Any, call: Any) -> Iterator[tuple[int, Answered]]:
        sent = flatten(message)
        for client, answered in self.inner.deliver(who, handler, message, call):
            if client == self.client and isinstance(answered.reply, Update):
                flat = {
                    name: sent[name] - 10 * (tensor - sent[name])
                    if tensor.is_floating_point() and "running_var" not in name
                    else tensor
                    for name, tensor in flatten(answered.reply).items()
                }
                answered = answered._replace(reply=unflatten(Update, flat))
            yield client, answered


def final(aggregate: str, liar: bool) -> float:
    everyone = replace(BENCHMARKS["digits"], tasks=1, classes_per_task=10, clients=5, active=5, alpha=0.0)
    parts = assemble(
        plan("finetune", everyone, settings={"rounds": 8, "lr": 0.05, "aggregate": aggregate}), "cpu", workers=1
    )
    if liar:
        parts.door.transport = Liar(parts.transport, 2)
    (task,) = [line for line in learn(parts.scenario, parts.server, parts.door, parts.engine) if line["kind"] == "task"]
    return float(summary([task["correct"]], task["total"])["final"])


def test_a_liar_ruins_the_mean_and_not_the_robust_averages() -> None:
    honest, ruined = final("mean", liar=False), final("mean", liar=True)
    assert honest > 80 and ruined < honest - 30
    for aggregate in ("clipped", "trimmed", "median"):
        assert final(aggregate, liar=True) > honest - 15, aggregate


@pytest.mark.parametrize("aggregate", ["clipped", "trimmed", "median"])
@pytest.mark.parametrize("method", ["hr", "icarl", "mfcl", "remind"])
def test_every_robust_average_runs_with_every_kind_of_method(method: str, aggregate: str, tmp_path: Path) -> None:
    lines = list(execute(tiny_plan(method, aggregate=aggregate, stop_after=2), tmp_path / "run", "cpu", workers=1))
    assert [line["kind"] for line in lines].count("task") == 2 and not any("refused" in line for line in lines)


def test_an_unknown_way_to_average_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match="aggregate takes mean, clipped, trimmed, median"):
        plan("finetune", settings={"aggregate": "mode"})
