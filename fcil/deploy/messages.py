"""What passes between the server and its nodes: facts as JSON, and tensors."""

from typing import Any, NamedTuple

from fcil.records import Weights

VERSION = 1  # of what is said below; nodes and server must agree

LOOK, ASK, EVALUATE = "look", "ask", "evaluate"
KINDS = (LOOK, ASK, EVALUATE)


class Request(NamedTuple):
    """A question to a node. All but LOOK belong to a task and say where the server stands:

    version, experiment, plan (as TOML), client (the node's number), names (classes by slot), capacity, groups (the
    classes of each task so far), life, call, saved (the task and step of the server's last checkpoint).
    """

    kind: str
    facts: dict[str, Any]
    tensors: Weights


class Reply(NamedTuple):
    """What a node answers; `error` says in a sentence why it cannot."""

    facts: dict[str, Any]
    tensors: Weights
    error: str = ""


def shown(words: Any, most: int = 300) -> str:
    """Return what a node wrote as one short line that can be printed."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(words)[:most])
