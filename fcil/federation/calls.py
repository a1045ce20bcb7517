"""A question on its way to a client, and what comes back beside the reply."""

from typing import Any, NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """Where in the run a question is asked: what seeds the answer and sets its learning rate."""

    seed: int
    task: int
    step: int  # questions asked so far
    round: int = 0
    rounds: int = 1


class Answered(NamedTuple):
    """A reply with what the client measured while answering."""

    reply: Any
    kept: int  # bytes in its memory
    loss: float | Tensor = float("nan")
    images: int = 0  # trained on
