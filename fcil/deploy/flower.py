"""The wire that Flower is, and the two apps behind `flwr run`: needs the extra `flower`.

A question is one message `query.fcil`, and one local training is one question: each starts a process on the node. What
a node keeps lies in its own folders, for Flower's context is lost when a node restarts.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fcil.deploy.messages import Reply, Request
from fcil.deploy.node import Node
from fcil.errors import UserError

KIND = "query.fcil"
PULL = 0.3  # seconds between two looks for answers


class FlowerWire:
    """Nodes of a Flower grid; their addresses are Flower's node ids."""

    def __init__(self, grid: Grid, timeout: float):
        self.grid, self.timeout = grid, timeout

    def online(self) -> list[int]:
        """Return the nodes that Flower has heard of lately."""
        return sorted(self.grid.get_node_ids())

    def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
        """Send all at once; return the answers that came in time, and leave out nodes that are gone."""
        if not mail:
            return {}
        messages = [
            Message(_closed(*request), dst_node_id=address, message_type=KIND, ttl=self.timeout + 60)
            for address, request in mail.items()
        ]
        waiting = set(self.grid.push_messages(messages))
        until, came = time.monotonic() + self.timeout, {}
        while waiting and time.monotonic() < until:
            for message in self.grid.pull_messages(list(waiting)):
                waiting.discard(message.metadata.reply_to_message_id)
                if not message.has_error():
                    came[message.metadata.src_node_id] = _opened(message)
            time.sleep(PULL if waiting else 0)
        return came


def client_app() -> ClientApp:
    """Return the app of a node; its node-config says `name`, `data` and `state`."""
    app = ClientApp()

    @app.query("fcil")  # type: ignore[untyped-decorator]
    def answer(message: Message, context: Context) -> Message:
        facts = message.content["facts"]
        try:
            config = context.node_config
            place = {key: Path(str(config[key])) for key in ("data", "state")}
            node = Node(str(config["name"]), place["data"], place["state"], str(config.get("device", "cpu")))
            tensors = message.content["tensors"].to_torch_state_dict()
            reply = node.answer(Request(str(facts["kind"]), json.loads(str(facts["json"])), tensors))
        except UserError as error:
            reply = Reply({}, {}, str(error))
        except Exception as error:  # the server is told in a sentence; Flower would pass on a number
            reply = Reply({}, {}, f"{type(error).__name__}: {error}")
        return Message(_closed("reply", {**reply.facts, "error": reply.error}, reply.tensors), reply_to=message)

    return app


def server_app() -> ServerApp:
    """Return the app of the server; its run-config says which run folder to work in."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        from fcil.deploy.script import script

        config = context.run_config
        script({str(key): value for key, value in config.items()}, lambda timeout: FlowerWire(grid, timeout))

    return app


def _closed(kind: str, facts: Mapping[str, object], tensors: Mapping[str, object]) -> RecordDict:
    about = ConfigRecord({"kind": kind, "json": json.dumps(facts)})
    return RecordDict({"facts": about, "tensors": ArrayRecord(dict(tensors))})


def _opened(message: Message) -> Reply:
    """Read a reply; one that cannot be read says so."""
    try:
        facts = json.loads(str(message.content["facts"]["json"]))
        error = str(facts.pop("error", ""))
        return Reply(facts, message.content["tensors"].to_torch_state_dict(), error)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Reply({}, {}, f"its reply cannot be read ({type(error).__name__})")
