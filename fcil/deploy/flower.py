"""The wire that Flower is, and the two apps behind `flwr run`: needs the extra `flower`.

A question is one message `query.fcil`, and one local training is one question: each starts a process on the node. What
a node keeps lies in its own folders, for Flower's context is lost when a node restarts.
"""

import io
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fcil.deploy.messages import LOOK, Reply, Request, shown
from fcil.deploy.node import Node
from fcil.errors import UserError

KIND = "query.fcil"
PULL = 0.3  # seconds between two looks for answers
LOOKING = 120.0  # seconds for saying who one is, which takes no training
MOST_BYTES = 2**31  # of a reply


class FlowerWire:
    """Nodes of a Flower grid; their addresses are Flower's node ids."""

    def __init__(self, grid: Grid, timeout: float):
        self.grid, self.timeout = grid, timeout

    def online(self) -> dict[int, str]:
        """Return the nodes that Flower has heard of lately, with the names that their keys were registered under."""
        found = {int(node.node_id): str(node.name) for node in self.grid.get_nodes()}
        return dict(sorted(found.items()))

    def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
        """Send all at once; return the answers that came in time, and leave out nodes that are gone."""
        if not mail:
            return {}
        looking = all(request.kind == LOOK for request in mail.values())
        timeout = min(self.timeout, LOOKING) if looking else self.timeout
        messages = [
            Message(_closed(*request), dst_node_id=address, message_type=KIND, ttl=timeout + 60)
            for address, request in mail.items()
        ]
        waiting = {id: address for id, address in zip(self.grid.push_messages(messages), mail, strict=False) if id}
        until, came = time.monotonic() + timeout, {}
        while waiting and time.monotonic() < until:
            for id, address in list(waiting.items()):
                for reply in self._pulled(id):
                    waiting.pop(id, None)
                    if reply is not None:
                        came[address] = reply
            time.sleep(PULL if waiting else 0)
        return came

    def _pulled(self, id: str) -> list[Reply | None]:
        """Return the answer to one message if it is there, alone: one that Flower cannot read takes no other along."""
        try:
            return [None if m.has_error() else _opened(m) for m in self.grid.pull_messages([id])]
        except (OSError, httpx.HTTPError):  # the SuperLink is gone
            raise
        except Exception as error:
            return [_unread(error)]


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
    """Read a reply; one that cannot be read, whatever is wrong with it, says so."""
    try:
        text, arrays = str(message.content["facts"]["json"]), message.content["tensors"]
        if (size := len(text) + sum(len(array.data) for array in arrays.values())) > MOST_BYTES:
            raise ValueError(f"{size:,} bytes, and at most {MOST_BYTES:,} are read")
        for array in arrays.values():
            _require_whole(array)
        facts = json.loads(text)
        error = shown(facts.pop("error", ""))
        return Reply(facts, arrays.to_torch_state_dict(), error)
    except Exception as error:
        return _unread(error)


def _require_whole(array: Any) -> None:
    """Say so where an array's bytes are not the numbers that its own header promises, before room is made for them."""
    file = io.BytesIO(array.data)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, kind = read(file)
    if kind.kind not in "biuf" or any(n < 0 for n in shape):
        raise ValueError(f"an array of {shown(kind, 30)} and shape {shown(shape, 60)}")
    if len(array.data) - file.tell() != math.prod(shape) * kind.itemsize:
        raise ValueError(f"an array has {len(array.data) - file.tell():,} bytes, not those of its {shown(shape, 60)}")


def _unread(error: Exception) -> Reply:
    return Reply({}, {}, shown(f"its reply cannot be read ({type(error).__name__}: {error})"))
