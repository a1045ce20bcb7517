"""The same door, opened onto a Flower federation: needs the extra `flower`.

A question becomes one message `query.<answer>` per node: the record's tensors in an ArrayRecord, the call in a
ConfigRecord. Flower numbers its nodes at random; each knows which client of the scenario it is (`partition-id`) and
says so once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_type_hints

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fcil.federation.calls import Answered, Call
from fcil.federation.engine import Engine
from fcil.method import reply_type
from fcil.records import flatten, unflatten
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import Task


class OverFlower:
    """A transport whose clients are the nodes of a Flower grid."""

    def __init__(self, grid: Grid, timeout: float | None = 3600.0):
        self.grid, self.timeout = grid, timeout
        self.nodes = self._roll_call()  # client -> node

    def begin(self, task: Task) -> None:
        """Nothing to do: every message says which task it belongs to."""

    def deliver(
        self, who: Sequence[int], handler: Callable[..., Any], message: Any, call: Call
    ) -> Iterator[tuple[int, Answered]]:
        """Send to all nodes at once; yield the answers in the order of `who`, whatever the order they came in."""
        content = RecordDict(
            {"message": _arrays(message), "call": ConfigRecord(call._asdict() | {"new": list(call.new)})}
        )
        mail = [
            Message(content, dst_node_id=self.nodes[client], message_type=f"query.{handler.__name__}")
            for client in who
            if client in self.nodes
        ]
        came = {
            m.metadata.src_node_id: m
            for m in self.grid.send_and_receive(mail, timeout=self.timeout)
            if not m.has_error()
        }
        for client in who:
            if (reply := came.get(self.nodes.get(client, -1))) is not None:
                yield client, _opened(reply_type(handler), reply)

    def _roll_call(self) -> dict[int, int]:
        mail = [Message(RecordDict(), dst_node_id=n, message_type="query.hello") for n in self.grid.get_node_ids()]
        answers = [m for m in self.grid.send_and_receive(mail, timeout=self.timeout) if not m.has_error()]
        return {int(m.content["hello"]["client"]): m.metadata.src_node_id for m in answers}


def client_app(engine: Engine, scenario: Scenario, memory_type: type) -> ClientApp:
    """Return a Flower ClientApp that gives every @remote answer; a client's memory is kept in its node's state."""
    app = ClientApp()
    caches: dict[tuple[int, int], dict[str, Any]] = {}

    @app.query("hello")  # type: ignore[untyped-decorator]
    def hello(message: Message, context: Context) -> Message:
        me = ConfigRecord({"client": int(context.node_config["partition-id"])})
        return Message(RecordDict({"hello": me}), reply_to=message)

    def serve(handler: Callable[..., Any]) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            call, me = _call(message.content["call"]), int(context.node_config["partition-id"])
            asked = unflatten(get_type_hints(handler)["message"], message.content["message"].to_torch_state_dict())
            task = scenario.tasks[call.task]
            if call.step > _applied(context):  # a message that comes late does not bring its images back
                scenario.begin(task)
            for stale in [key for key in caches if key[1] != call.task]:
                del caches[stale]
            data = replace(scenario.local(me, task), cache=caches.setdefault((me, call.task), {}))
            memory, applied = engine.receive(_remembered(memory_type, context)), _applied(context)
            answered = engine.answer(me, handler, memory, data, engine.receive(asked), call)
            if call.step > applied:  # a message that is delivered twice changes the memory once
                if _changed(context, stored := _arrays(memory)):
                    context.state["memory"] = stored
                    caches.pop((me, call.task), None)  # what was derived from the old memory
                context.state["applied"] = ConfigRecord({"step": call.step})
            return Message(_closed(answered), reply_to=message)

        return answer

    for name, handler in vars(type(engine.client)).items():
        if getattr(handler, "is_remote", False):
            app.query(name)(serve(handler))
    return app


def _arrays(rec: Any) -> ArrayRecord:
    return ArrayRecord({name: tensor.detach().cpu().contiguous() for name, tensor in flatten(rec).items()})


def _closed(answered: Answered) -> RecordDict:
    measured = {
        "kept": answered.kept,
        "loss": float(answered.loss),
        "images": answered.images,
    }
    return RecordDict({"message": _arrays(answered.reply), "measured": MetricRecord(measured)})


def _opened(kind: type, reply: Message) -> Answered:
    record: Any = unflatten(kind, reply.content["message"].to_torch_state_dict())
    measured = reply.content["measured"]
    return Answered(record, measured["kept"], measured["loss"], measured["images"])


def _changed(context: Context, stored: ArrayRecord) -> bool:
    return "memory" not in context.state or context.state["memory"].object_id != stored.object_id


def _call(config: ConfigRecord) -> Call:
    numbers = {name: int(config[name]) for name in Call._fields if name != "new"}
    return Call(**numbers, new=tuple(config["new"]))


def _remembered(memory_type: type, context: Context) -> Any:
    if "memory" not in context.state:
        return memory_type()
    return unflatten(memory_type, context.state["memory"].to_torch_state_dict())


def _applied(context: Context) -> int:
    return int(context.state["applied"]["step"]) if "applied" in context.state else 0
