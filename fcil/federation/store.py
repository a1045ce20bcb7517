"""Checkpoints on disk: the server's state, the clients' memories, and where the run stands.

A checkpoint is a manifest `N.json` and the safetensors files it names, each with its digest. Files are written under
new names, synced and renamed; the manifest comes last, so a torn checkpoint is one without a valid manifest and is
passed over. Memories that did not change are not written again: a later manifest names the older file.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
    """Saves to `folder` in the background, at most every `every` seconds."""

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
        return time.monotonic() - self._last >= self.every and not self._busy()

    def save(self, facts: Mapping[str, Any], state: Weights, memories: Callable[[bool], Mapping[int, Weights]]) -> None:
        """Copy now, write in the background; `memories(all)` gives the changed memories, or all of them."""
        self.wait()
        self.folder.mkdir(parents=True, exist_ok=True)
        everything = len(set(self.memory_files.values())) >= MOST_FILES or not self.memory_files
        copied = {client: _copy(flat) for client, flat in memories(everything).items()}
        self.number += 1
        self._thread = threading.Thread(
            target=self._write, args=(self.number, dict(facts), _copy(state), copied), daemon=True
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

    def _write(self, number: int, facts: dict[str, Any], state: Weights, memories: dict[int, Weights]) -> None:
        try:
            files = {f"state-{number}.safetensors": state}
            if memories:
                files[f"memories-{number}.safetensors"] = {
                    f"{client}/{name}": tensor for client, flat in memories.items() for name, tensor in flat.items()
                }
            for name, flat in files.items():
                write_tensors(self.folder / name, flat)
                self.digests[name] = sha256(self.folder / name)
            self.memory_files |= dict.fromkeys(memories, f"memories-{number}.safetensors")
            used = {f"state-{number}.safetensors", *self.memory_files.values()}
            manifest = {
                "facts": facts,
                "state": f"state-{number}.safetensors",
                "memories": self.memory_files,
                "digests": {name: self.digests[name] for name in sorted(used)},
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
        memories: dict[int, Weights] = {client: {} for client in files}
        for name in set(files.values()):
            for key, tensor in read_tensors(self.folder / name)[0].items():
                client, _, field = key.partition("/")
                if files.get(int(client)) == name:
                    memories[int(client)][field] = tensor
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


def _copy(flat: Mapping[str, torch.Tensor]) -> Weights:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in flat.items()}
