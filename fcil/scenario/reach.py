"""What a method's code may look at: what it is handed, and nothing else.

While a client answers, a server's script runs or a model predicts, the images of other clients, of other tasks and of
the test are out of reach, and so are whole datasets: asking for them raises. It guards against mistakes; who wants to
get around it can.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

_AT_WORK: ContextVar[str] = ContextVar("at_work", default="")


class DataGone(Exception):
    """A method asked for images that it may not have: of a task that is over, of the test, of somebody else."""


@contextmanager
def at_work(who: str) -> Iterator[None]:
    """Put images out of reach for the code inside, which is a method's."""
    before = _AT_WORK.set(who)
    try:
        yield
    finally:
        _AT_WORK.reset(before)


def handing_over() -> AbstractContextManager[None]:
    """Let images be fetched for a method whose code waits for them."""
    return at_work("")


def within_reach(what: str) -> None:
    """Raise where a method's code asks for this."""
    if who := _AT_WORK.get():
        raise DataGone(f"{who} asks for {what}; a method has what its answers are handed, and no more")
