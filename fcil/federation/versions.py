"""A client's memory on its own disk, and which question it has answered last.

A version is a safetensors file and a manifest that names the question it followed and the file's digest. Both are
written under another name, synced and renamed, the manifest last: one without a whole file is torn, and the version
before it stands. Versions stay until the server has saved what came after them, so that a server that goes back to its
checkpoint finds every client where it was then, and ends as if nothing had happened.

Questions are numbered by the server's life (how often it was started) and its step. One of an earlier life, or an
earlier step of this life, comes too late and changes nothing; the same one twice changes the memory once.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from fcil.errors import UserError
from fcil.files import sha256, write_text
from fcil.records import Weights, read_tensors, write_tensors


class Place(NamedTuple):
    """Which question was answered last."""

    life: int
    task: int
    step: int

    def is_after(self, life: int, step: int) -> bool:
        """Tell whether a question comes too late here."""
        return (self.life, self.step) > (life, step)


class Versions:
    """The memory of one client in one experiment, in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def applied(self) -> Place:
        """Where this client stands."""
        places = [_place(self.folder / "applied.json")]
        if places == [None]:  # lost: the memories name the questions they followed
            places = [_place(self.folder / f"{step}.json") or Place(0, 0, step) for step in self._steps()]
        return max((place for place in places if place), key=lambda p: (p.life, p.step), default=Place(0, 0, 0))

    def before(self, step: int) -> Weights | None:
        """Return the newest whole memory from before a question; None if there was none yet."""
        for earlier in sorted((s for s in self._steps() if s < step), reverse=True):
            if (flat := self._read(earlier)) is not None:
                return flat
        return None

    def apply(self, place: Place, memory: Weights | None) -> None:
        """Book a question as answered, with the memory that followed if it changed."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what is in it gives images back
        for later in (s for s in self._steps() if s > place.step or (s == place.step and memory is None)):
            self._remove(later)  # from a life of the server that was not saved
        if memory is not None:
            file = self._file(place.step)
            write_tensors(file, memory)
            about = {**place._asdict(), "file": file.name, "sha256": sha256(file)}
            write_text(self.folder / f"{place.step}.json", json.dumps(about))
        write_text(self.folder / "applied.json", json.dumps(place._asdict()))

    def forget_before(self, step: int) -> None:
        """Remove versions that no server can go back to: all older than the one that stood at `step`."""
        usable = sorted((s for s in self._steps() if s <= step), reverse=True)
        standing = next((s for s in usable if self._read(s) is not None), None)
        for older in [s for s in usable if standing is not None and s < standing]:
            self._remove(older)
        for partial in self.folder.glob("*.partial"):
            partial.unlink(missing_ok=True)

    def _steps(self) -> list[int]:
        return [int(path.stem) for path in self.folder.glob("*.json") if path.stem.isdigit()]

    def _file(self, step: int) -> Path:
        return self.folder / f"memory-{step}.safetensors"

    def _read(self, step: int) -> Weights | None:
        about, file = _json(self.folder / f"{step}.json"), self._file(step)
        try:
            return read_tensors(file)[0] if about.get("sha256") == sha256(file) else None
        except (OSError, UserError):
            return None

    def _remove(self, step: int) -> None:
        (self.folder / f"{step}.json").unlink(missing_ok=True)
        self._file(step).unlink(missing_ok=True)


def _place(path: Path) -> Place | None:
    found = _json(path)
    try:
        return Place(int(found["life"]), int(found["task"]), int(found["step"]))
    except (KeyError, TypeError, ValueError):
        return None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
