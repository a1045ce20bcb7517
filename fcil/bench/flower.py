"""The bench's work on Flower's own simulation runtime: its ServerApp, ClientApp, FedAvg and ray. Needs `simulation`.

Generous to Flower: as many actors as cores, one thread each; networks and images stay in the actors between messages;
nothing is evaluated and little is logged; the start of ray and the first rounds are not measured.
"""

import logging
import time
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from fcil.bench import task
from fcil.bench.task import Clock, Network, Rounds
from fcil.errors import lacking
from fcil.federation.engine import cores
from fcil.records import Weights

QUIET = {
    "FLWR_HOME": "FOLDER/flwr",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it ray warns of its own default
}


def measure(heavy: bool, rounds: int) -> Rounds:
    """Do the work on Flower, in a process of its own."""
    missing = [name for name in ("flwr", "ray") if find_spec(name) is None]
    if missing:
        raise lacking(f"the comparison with Flower's simulation needs the package {missing[0]}", "simulation")
    return task.apart("fcil.bench.flower", "Flower", heavy, rounds, QUIET)


def work(heavy: bool, rounds: int, folder: str) -> Rounds:
    """Do the work on Flower, in this process and the actors that ray starts."""
    from flwr.clientapp import ClientApp
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = ClientApp()
    app.query("hello")(_hello)
    app.train()(_train)
    clock, weights = Clock(heavy), Weights()
    ray = {"num_cpus": cores(), "include_dashboard": False, "log_to_driver": False, "_temp_dir": f"{folder}/ray"}
    run_simulation(
        _server(heavy, rounds, clock, weights), app, num_supernodes=task.CLIENTS,
        backend_config={"init_args": ray, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )  # fmt: skip
    return clock.rounds("Flower", min(cores(), task.ACTIVE), weights)


def _server(heavy: bool, rounds: int, clock: Clock, weights: Weights) -> Any:
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg

    class OfTheCohort(FedAvg):  # type: ignore[misc]
        """Flower's FedAvg, which asks the clients that everyone asks."""

        nodes: dict[int, int]  # client -> node

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
            config["server-round"] = server_round
            content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
            return [
                Message(content, dst_node_id=self.nodes[client], message_type="train")
                for client in task.cohort(server_round - 1)
            ]

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
            came = list(replies)
            if len(came) < task.ACTIVE or any(reply.has_error() for reply in came):
                said = next((reply.error.reason for reply in came if reply.has_error()), "a reply did not come")
                raise RuntimeError(f"round {server_round}: {said}")
            return super().aggregate_train(server_round, came)

    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        strategy = OfTheCohort(fraction_evaluate=0.0)
        while len(list(grid.get_node_ids())) < task.CLIENTS:  # they are made while the server starts
            time.sleep(0.1)
        mail = [Message(RecordDict(), dst_node_id=node, message_type="query.hello") for node in grid.get_node_ids()]
        strategy.nodes = {
            int(reply.content["hello"]["client"]): reply.metadata.src_node_id for reply in grid.send_and_receive(mail)
        }

        def round_ended(number: int, arrays: Any) -> None:
            if number == 0:  # before the first round
                clock.start()
                return
            clock.round_ended()
            if number == task.WARM_UP + rounds:
                weights.update(arrays.to_torch_state_dict())

        strategy.start(
            grid, ArrayRecord(task.network(heavy).state_dict()), num_rounds=task.WARM_UP + rounds,
            train_config=ConfigRecord({"heavy": heavy}), evaluate_fn=round_ended,
        )  # fmt: skip

    return server


# -- in the actors ----------------------------------------------------------------------------------------------------


def _hello(message: Any, context: Any) -> Any:
    """Say which client a node is."""
    from flwr.app import ConfigRecord, Message, RecordDict

    me = ConfigRecord({"client": int(context.node_config["partition-id"])})
    return Message(RecordDict({"hello": me}), reply_to=message)


def _train(message: Any, context: Any) -> Any:
    """Take a client's local steps."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    config = message.content["config"]
    net = _network(bool(config["heavy"]))
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    task.train(net, int(context.node_config["partition-id"]), int(config["server-round"]) - 1)
    reply = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": task.EACH})}
    return Message(RecordDict(reply), reply_to=message)


@cache
def _network(heavy: bool) -> Network:
    torch.set_num_threads(1)
    return task.network(heavy)
