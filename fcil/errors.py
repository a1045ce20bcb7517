"""What a user can mend, said in one sentence."""

import shlex
from collections.abc import Iterable
from difflib import get_close_matches

NO_ROOM = "there is not enough memory for this; fewer --workers, a smaller batch_size or network need less"


class UserError(Exception):
    """Something the user can mend; the text says what is wrong and what is allowed."""


def out_of_memory(error: BaseException) -> bool:
    """Say whether that is what an error means: for a CPU torch has words for it and no type."""
    words = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError) or any(one in str(error) for one in words)


def quoted(path: object) -> str:
    """Write a path as a shell takes it, for commands that are advised."""
    return shlex.quote(str(path))


def lacking(what: str, extra: str) -> UserError:
    """Return the error for something that needs a package of one of our extras; `what` says which."""
    command = f"pip install -c constraints.txt -e '.[{extra}]'"
    return UserError(f"{what}; it comes with the extra {extra}, in fcil's folder: {command}")


def empty_path(name: str) -> UserError:
    """Return the error for a path that is empty; `name` is the option that was to have it."""
    return UserError(f"{name} is empty, as a shell's variable is that nobody has set; give it a path")


def unknown(kind: str, name: str, allowed: Iterable[str]) -> UserError:
    """Return the error for a wrong `name`, with the nearest right one first."""
    names = list(allowed)
    near = [known for known in names if name and known.startswith(name.lower())]
    near = near or get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"there is no {kind} {name!r}; {hint}allowed: {', '.join(names)}")
