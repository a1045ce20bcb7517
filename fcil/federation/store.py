"""Checkpoints on disk: the server's state, the clients' memories, and where the run stands.

A checkpoint is a manifest `N.json` and the safetensors files it names, each with its digest. Files are written under
new names, synced and renamed; the manifest comes last, so a torn checkpoint is one without a valid manifest and is
passed over. Memories that did not change are not written again: a later manifest names the older file.

A file of memories holds two tensors of bytes: everything end to end, and JSON that says what is in it. A thousand
clients with a few classes each have tens of thousands of tensors of a few bytes, which take far more by themselves.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcil.errors import UserError
from fcil.files import sha256, write_text
from fcil.records import Weights, read_tensors, write_tensors

MOST_FILES = 20  # memory files that a manifest may name before all memories are written anew into one


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds."""

    facts: dict[str, Any]
    state: Weights
    memories: dict[int, Weights]


class Checkpoints:
    """Saves to `folder` in the background, at most every `every` seconds; 0 is after each round, waiting if need be."""

    def __init__(self, folder: Path, every: float = 10.0):
        self.folder, self.every = folder, every
        self.number = max((int(p.stem) for p in folder.glob("*.json") if p.stem.isdigit()), default=0)
        self.memory_files: dict[int, str] = {}  # client -> the file that holds its memory
        self.digests: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._last = time.monotonic()

    def due(self) -> bool:
        """Tell whether enough time has passed, and the last checkpoint is on disk."""
        return self.every == 0 or (time.monotonic() - self._last >= self.every and not self._busy())

    def save(self, facts: Mapping[str, Any], state: Weights, memories: Callable[[bool], Mapping[int, Weights]]) -> None:
        """Copy now, write in the background; `memories(all)` gives the changed memories, or all of them."""
        self.wait()
        self.folder.mkdir(parents=True, exist_ok=True)
        everything = len(set(self.memory_files.values())) >= MOST_FILES or not self.memory_files
        changed = memories(everything)
        copied = packed(changed) if changed else None
        self.number += 1
        self._thread = threading.Thread(
            target=self._write, args=(self.number, dict(facts), _copy(state), list(changed), copied), daemon=True
        )
        self._thread.start()
        self._last = time.monotonic()

    def join(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk, and pass on what went wrong there."""
        self.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def latest(self) -> Saved | None:
        """Read the newest checkpoint whose files are all there and whole."""
        for manifest in sorted(
            self.folder.glob("*.json"), key=lambda p: int(p.stem) if p.stem.isdigit() else -1, reverse=True
        ):
            try:
                return self._read(manifest)
            except (FileNotFoundError, ValueError, KeyError, TypeError, UserError):
                continue
        return None

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _write(
        self, number: int, facts: dict[str, Any], state: Weights, changed: list[int], memories: Weights | None
    ) -> None:
        try:
            files = {f"state-{number}.safetensors": state}
            if memories is not None:
                files[f"memories-{number}.safetensors"] = memories
            for name, flat in files.items():
                write_tensors(self.folder / name, flat)
                self.digests[name] = sha256(self.folder / name)
            self.memory_files |= dict.fromkeys(changed, f"memories-{number}.safetensors")
            used = {f"state-{number}.safetensors", *self.memory_files.values()}
            self.digests = {name: self.digests[name] for name in sorted(used)}
            manifest = {
                "facts": facts,
                "state": f"state-{number}.safetensors",
                "memories": self.memory_files,
                "digests": self.digests,
            }
            write_text(self.folder / f"{number}.json", json.dumps(manifest))
            self._sweep(number, used)
        except BaseException as error:
            self._error = error

    def _read(self, manifest: Path) -> Saved:
        content = json.loads(manifest.read_text())
        for name, digest in content["digests"].items():
            if sha256(self.folder / name) != digest:
                raise ValueError(f"{name} is torn")
        files = {int(client): name for client, name in content["memories"].items()}
        memories: dict[int, Weights] = {}
        for name in set(files.values()):
            found = unpacked(read_tensors(self.folder / name)[0])
            memories |= {client: flat for client, flat in found.items() if files.get(client) == name}
        state = read_tensors(self.folder / content["state"])[0]
        self.memory_files, self.digests = files, dict(content["digests"])
        return Saved(content["facts"], state, memories)

    def _sweep(self, newest: int, used: set[str]) -> None:
        """Remove what no longer serves; the manifest before the newest stays as a fallback, with its files."""
        keep = set(used)
        for path in self.folder.glob("*.json"):
            if not path.stem.isdigit() or int(path.stem) < newest - 1:
                path.unlink(missing_ok=True)
            elif int(path.stem) == newest - 1:
                try:
                    keep |= set(json.loads(path.read_text())["digests"])
                except (ValueError, KeyError):
                    path.unlink(missing_ok=True)
        for path in [*self.folder.glob("*.safetensors"), *self.folder.glob("*.partial")]:
            if path.name not in keep:
                path.unlink(missing_ok=True)


def packed(memories: Mapping[int, Mapping[str, Tensor]]) -> Weights:
    """Lay the tensors of all clients end to end, with an index of whose and what they are."""
    index: dict[int, list[tuple[str, str, list[int]]]] = {}
    content = bytearray()
    for client, flat in memories.items():
        index[client] = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in flat.items()]
        for tensor in flat.values():
            content += tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return {"content": _bytes(content), "index": _bytes(bytearray(json.dumps(index).encode()))}


def unpacked(flat: Mapping[str, Tensor]) -> dict[int, Weights]:
    """Invert `packed`."""
    memories: dict[int, Weights] = {}
    start = 0
    for client, listed in json.loads(flat["index"].numpy().tobytes()).items():
        memories[int(client)] = mine = {}
        for name, kind, shape in listed:
            dtype: torch.dtype = getattr(torch, kind)
            end = start + math.prod(shape) * dtype.itemsize
            mine[name] = flat["content"][start:end].clone().view(dtype).view(shape)
            start = end
    return memories


def _bytes(content: bytearray) -> Tensor:
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def _copy(flat: Mapping[str, Tensor]) -> Weights:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in flat.items()}
