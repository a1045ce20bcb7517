"""Files that are whole or not there: written under another name, synced, renamed."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Give a name to write to; it becomes `path` when all went well, and else leaves `path` as it was."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        _sync_names(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def _sync_names(folder: Path) -> None:
    """Let a new name outlast a crash of the machine, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def set_aside(path: Path) -> Path:
    """Give a file a name under which nothing is yet, so that another can be written in its place."""
    name, number = path.with_name(f"{path.name}.lost"), 1
    while name.exists():
        number += 1
        name = path.with_name(f"{path.name}.lost.{number}")
    return path.replace(name)


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, so that it outlasts a crash of the machine."""
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
