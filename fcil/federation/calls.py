"""A question on its way to a client, and what comes back beside the reply."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from fcil.scenario.tasks import LocalData


class Call(NamedTuple):
    """Where in the run a question is asked: what seeds the answer and sets its learning rate."""

    seed: int
    task: int
    step: int  # questions asked so far
    round: int = 0
    rounds: int = 1
    new: tuple[int, ...] = ()  # classes that are new in the task


class Question(NamedTuple):
    """One client that is asked, with what it has to answer from."""

    who: int
    memory: Any  # the client's record, which an answer updates in place
    data: Callable[[], LocalData]  # made when the client's turn comes
    version: int = 0  # how often its memory has changed


class Origin(NamedTuple):
    """What a reply from another machine says it belongs to."""

    experiment: str
    version: str  # of fcil
    step: int  # the question that it answers
    answer: str  # and by which of the client's answers


class Answered(NamedTuple):
    """A reply with what the client measured while answering."""

    reply: Any  # a record; or its flat tensors, as they came from another machine
    kept: int  # bytes in its memory
    loss: float | Tensor = float("nan")
    images: int = 0  # trained on
    origin: Origin | None = None  # None where the reply never left this machine
