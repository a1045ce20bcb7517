"""A node's own images: a folder of class folders, read when a task begins.

What has arrived since the last task is the data of this one. A tenth is held out, by a digest of the file, and never
trained on: the node answers for it when the server asks how good the model is. No path, image or digest leaves the
node; names of classes and numbers of images do.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcil.deploy.registry import normal
from fcil.errors import UserError
from fcil.files import write_text
from fcil.records import read_tensors, write_tensors
from fcil.scenario.images import pixels_of
from fcil.scenario.sources import folders_in, images_in

LOG = logging.getLogger(__name__)
HELD_OUT = 10  # one image in so many


@dataclass(frozen=True)
class Arrival:
    """What came to a node with one task."""

    images: Tensor  # uint8 (N, 3, size, size)
    labels: Tensor  # int64 (N,)
    tested: Tensor  # images that are held out
    answers: Tensor  # and their labels


def check_folder(root: Path) -> None:
    """Say so where images lie in no class folder; that there is nothing yet is no mistake."""
    sorted_in = sum(inventory(root).values())
    if loose := len(images_in(root)) - sorted_in:
        advice = "put those of each class into a folder of its name"
        if not sorted_in:
            raise UserError(f"the images in {root} are of no class; {advice}")
        LOG.warning("fcil: images in %s that are of no class, and not used: %d; %s", root, loose, advice)


def inventory(root: Path) -> dict[str, int]:
    """Return how many images of each class lie in a folder, without reading them."""
    return {name: len(files) for name, files in _listed(root).items() if files}


def _listed(root: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    try:
        for folder in folders_in(root):
            found.setdefault(normal(folder.name), []).extend(images_in(folder))
    except OSError as error:
        raise UserError(f"{root} cannot be read ({error.strerror}); it must be a folder of class folders") from None
    return found


class Arrivals:
    """Keeps in `place` what came with each task; whatever is there is whole, and stays the same for its task."""

    def __init__(self, root: Path, place: Path, size: int):
        self.root, self.place, self.size = root, place, size

    def of(self, task: int, slots: Mapping[str, int]) -> Arrival:
        """Return what came with a task, reading the folder when it is first asked for."""
        manifest = self.place / f"{task}.json"
        if _manifest(manifest).get("slots") != dict(slots):
            self._take_in(task, slots)
        try:
            train, test = (read_tensors(file)[0] for file in self._files(task))
        except UserError:  # lost or torn: the images are still in the folder
            self._take_in(task, slots)
            train, test = (read_tensors(file)[0] for file in self._files(task))
        return Arrival(train["images"], train["labels"], test["images"], test["labels"])

    def tested(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images held out of every task so far, and their labels."""
        for task in self._tasks():
            test = read_tensors(self._files(task)[1])[0]
            yield test["images"], test["labels"]

    def held(self, classes: int) -> list[int]:
        """Count the training images of each class that this node has had so far."""
        counts = [0] * classes
        for task in self._tasks():
            for slot, n in _manifest(self.place / f"{task}.json").get("held", {}).items():
                counts[int(slot)] += n
        return counts

    def forget_before(self, task: int) -> None:
        """Remove the training images of earlier tasks: they are over."""
        for over in self._tasks():
            if over < task:
                self._files(over)[0].unlink(missing_ok=True)

    def _files(self, task: int) -> tuple[Path, Path]:
        return self.place / f"train-{task}.safetensors", self.place / f"held-out-{task}.safetensors"

    def _tasks(self) -> list[int]:
        return sorted(int(path.stem) for path in self.place.glob("*.json") if path.stem.isdigit())

    def _take_in(self, task: int, slots: Mapping[str, int]) -> None:
        earlier = [_manifest(self.place / f"{t}.json") for t in self._tasks() if t < task]
        used = {digest for manifest in earlier for digest in manifest.get("files", [])}
        tested = {int(slot) for manifest in earlier for slot in manifest.get("tested", {})}
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)  # its files are images
        trained, held_out, skipped = _sorted_out(self.root, slots, used, tested, self.size)
        if skipped:
            LOG.warning("fcil: files in %s that cannot be read as images, and are left out: %d", self.root, skipped)
        for file, chosen in zip(self._files(task), (trained, held_out), strict=True):
            write_tensors(file, _stacked(chosen, self.size))
        about = {
            "slots": dict(slots),
            "files": [digest for digest, _, _ in (*trained, *held_out)],
            "held": _counts(trained),
            "tested": _counts(held_out),
            "skipped": skipped,
        }
        write_text(self.place / f"{task}.json", json.dumps(about))


Image = tuple[str, int, Any]  # digest of the file, slot, pixels


def _sorted_out(
    root: Path, slots: Mapping[str, int], used: set[str], tested: set[int], size: int
) -> tuple[list[Image], list[Image], int]:
    """Read the files that have not been used yet: for training, held out, and how many cannot be read."""
    trained: list[Image] = []
    held_out: list[Image] = []
    skipped, used = 0, set(used)
    for name, files in sorted(_listed(root).items(), key=lambda item: slots.get(item[0], -1)):
        if name not in slots:
            continue
        mine: list[Image] = []
        for file in files:
            data = _bytes(file)
            digest = hashlib.blake2b(data, digest_size=16).hexdigest()
            pixels = None if digest in used else pixels_of(data, size)
            skipped += pixels is None and digest not in used
            used.add(digest)
            if pixels is not None:
                mine.append((digest, slots[name], pixels))
        chosen = {digest for digest, _, _ in mine if int(digest[:8], 16) % HELD_OUT == 0}
        if len(mine) > 1 and (len(chosen) == len(mine) or not (chosen or slots[name] in tested)):
            chosen = {min(digest for digest, _, _ in mine)}  # some of a class are for either
        held_out += [image for image in mine if image[0] in chosen]
        trained += [image for image in mine if image[0] not in chosen]
    return trained, held_out, skipped


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""  # counted with the unreadable ones


def _stacked(images: list[Image], size: int) -> dict[str, Tensor]:
    pixels = np.stack([p for _, _, p in images]) if images else np.zeros((0, size, size, 3), dtype=np.uint8)
    labels = torch.tensor([slot for _, slot, _ in images], dtype=torch.int64)
    return {"images": torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), "labels": labels}


def _counts(images: list[Image]) -> dict[str, int]:
    slots = [slot for _, slot, _ in images]
    return {str(slot): slots.count(slot) for slot in sorted(set(slots))}


def _manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
