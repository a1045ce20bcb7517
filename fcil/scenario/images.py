"""Decoded images: a source is read once and kept as one file, which later runs map into memory."""

import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fcil.errors import UserError
from fcil.scenario.sources import EITHER, TEST, TRAIN, Contents, Source

FORMAT = 1  # of the kept file and of what decoding yields
OWN_SIZE, DEFAULT_SIZE = 96, 64
WINDOW = 1024  # images in flight, so that memory stays low
MOST_NAMED = 3  # images that could not be read
LARGE = 16_384  # bytes from which decoding an image in a thread pays

Bytes = NDArray[np.uint8]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Decoded:
    """Images in RGB, those for training first."""

    images: Tensor  # uint8 (N, 3, size, size)
    labels: Tensor  # int64 (N,)
    train: int  # how many are for training
    names: tuple[str, ...]
    skipped: int  # images that could not be read
    known: str = ""  # the digest, where it was kept
    unread: tuple[str, ...] = ()  # the first of those that could not be read

    def digest(self) -> str:
        """Return what changes when an image, a label or a class does."""
        mine = self.labels.numpy(), self.images.numpy()
        return self.known or _digest(self.names, self.train, *mine, np.arange(len(self.labels)))


def decoded(source: Source, image_size: int = 0) -> Decoded:
    """Return a source's images, from the cache if its files have not changed.

    An `image_size` of 0 keeps images that are all square, alike and at most 96 pixels wide, and makes others 64. A
    class without a usable training or test image is an error. Where the cache cannot be written, nothing is kept.
    """
    cache = Path(os.environ.get("FCIL_CACHE") or Path.home() / ".cache" / "fcil")
    asked = (FORMAT, image_size, str(source.where.absolute()), source.stamp())
    key = hashlib.blake2b(repr(asked).encode(), digest_size=16).hexdigest()
    kept = cache / f"{key}.safetensors"
    found = _open(kept)
    if found:
        return found
    for place in (cache, Path(tempfile.gettempdir())):
        try:
            place.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=place, prefix=".decoding-")
        except OSError:
            continue
        try:
            with os.fdopen(handle, "wb") as file, tempfile.TemporaryFile(dir=place) as scratch:
                _decode_into(file, scratch, source, image_size)
            found = _open(Path(name))  # stays mapped when its name is gone
            if place == cache:
                os.replace(name, kept)
        except OSError:
            continue
        finally:
            Path(name).unlink(missing_ok=True)
        if found:
            return found
    raise UserError(f"neither {cache} nor {tempfile.gettempdir()} has room for the images of {source.where}")


def resized(image: Image.Image, size: int) -> Image.Image:
    """Return the centre of an image, its short side made `size`."""
    return image if image.size == (size, size) else ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)


class _Unlike(Exception):
    """Images that were to stay as they are differ in size."""


def _decode_into(file: IO[bytes], scratch: IO[bytes], source: Source, image_size: int) -> None:
    contents = source.open()
    try:
        usable, keys, size = _decode_all(contents, scratch, image_size)
    except _Unlike:
        scratch.seek(0)
        scratch.truncate()
        usable, keys, size = _decode_all(contents, scratch, DEFAULT_SIZE)
    if not len(usable):
        count = len(contents.labels)
        raise UserError(f"none of the {count} images in {source.where} can be read; they may be PNG or JPEG")
    labels = contents.labels[usable]
    train, test = _halves(source, contents.names, labels, contents.halves[usable], keys)
    order = np.concatenate([train, test])
    scratch.flush()
    images: Bytes = np.memmap(scratch, np.uint8, "r", shape=(len(usable), 3, size, size))
    about = {
        "format": str(FORMAT),
        "train": str(len(train)),
        "names": json.dumps(contents.names),
        "skipped": str(len(contents.labels) - len(usable)),
        "unread": json.dumps(_unread(source, len(contents.labels), usable)),
        "digest": _digest(contents.names, len(train), labels, images, order),
    }
    _write(file, images, order, labels[order], about)


def _unread(source: Source, count: int, usable: Indices) -> list[str]:
    """Return what the first images are called that cannot be used."""
    gone = np.setdiff1d(np.arange(count), usable)[:MOST_NAMED].tolist()
    if any(file.suffix == ".parquet" for file in source.files):
        return [f"row {i}" for i in gone]
    return [str(source.files[i].relative_to(source.where)) for i in gone]


def _decode_all(contents: Contents, scratch: IO[bytes], size: int) -> tuple[Indices, list[bytes], int]:
    """Write all readable images to `scratch`; return which they are, their keys for holding out, and their size."""
    usable: list[int] = []
    keys: list[bytes] = []
    side = size
    count = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4) as pool:
        rows = contents.read()
        while window := list(islice(rows, WINDOW)):
            raw = [data for _, data in window]
            run = pool.map if max(map(len, raw)) > LARGE else map
            for (key, _), pixels in zip(window, run(lambda data: pixels_of(data, size), raw), strict=True):
                if pixels is not None and contents.labels[count] >= 0:
                    side = side or pixels.shape[0]
                    if pixels.shape[:2] != (side, side) or (not size and side > OWN_SIZE):
                        raise _Unlike
                    scratch.write(pixels.transpose(2, 0, 1).tobytes())
                    usable.append(count)
                    keys.append(hashlib.blake2b(key, digest_size=8).digest())
                count += 1
    return np.array(usable, dtype=np.int64), keys, side


def pixels_of(data: bytes, size: int) -> Bytes | None:
    """Return an encoded image as (height, width, 3), its side made `size` unless 0; None if it cannot be read."""
    try:
        with Image.open(BytesIO(data)) as opened:
            if size:
                opened.draft("RGB", (2 * size, 2 * size))  # large JPEGs: skips detail that resizing would drop
            image = rgb(ImageOps.exif_transpose(opened))
            return np.asarray(resized(image, size) if size else image)
    except Exception:  # Pillow raises almost anything on a damaged file; such images are skipped and counted
        return None


def rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode in red, green and blue, 8 bits each."""
    if image.mode.startswith("I"):  # 16 bit grey, which Pillow would clip
        return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P":
        image = image.convert("RGBA")
    return image.convert("RGB")


def _halves(
    source: Source, names: tuple[str, ...], labels: Indices, halves: Indices, keys: list[bytes]
) -> tuple[Indices, Indices]:
    """Return the training and the test images; a fifth of each class is held out where the source has no test half."""
    train, test = halves == TRAIN, halves == TEST
    for j, name in enumerate(names):
        ours = np.flatnonzero((labels == j) & (halves == EITHER))
        ranked = sorted(ours.tolist(), key=lambda i: (keys[i], i))
        held_out = max(1, round(len(ours) / 5))
        test[ranked[:held_out]] = True
        train[ranked[held_out:]] = True
        for what, half in (("training", train), ("test", test)):
            if not (half & (labels == j)).any():
                lacks = f"no {what} image that can be read"
                if (halves == EITHER).any():
                    few = "only one image" if len(ours) else "no image"
                    lacks = f"{few} that can be read, and needs two: one for training, one held out for testing"
                raise UserError(f"class {name!r} in {source.where} has {lacks}; add images or remove the class")
    return np.flatnonzero(train), np.flatnonzero(test)


def _digest(names: tuple[str, ...], train: int, labels: Indices, images: Bytes, order: Indices) -> str:
    """Return a digest of labels and pixels in an order, and of what they are called."""
    found = hashlib.blake2b(repr((names, train, images.shape[1:])).encode(), digest_size=16)
    found.update(labels[order].astype("<i8").tobytes())
    for start in range(0, len(order), WINDOW):
        found.update(images[order[start : start + WINDOW]].tobytes())
    return found.hexdigest()


def _write(file: IO[bytes], images: Bytes, order: Indices, labels: Indices, about: dict[str, str]) -> None:
    # The format of safetensors, written by hand because its own writer wants all images in memory.
    shape = [len(order), *images.shape[1:]]
    end = int(np.prod(shape))
    pad = -end % 8
    header = {
        "__metadata__": about,
        "images": {"dtype": "U8", "shape": shape, "data_offsets": [0, end]},
        "pad": {"dtype": "U8", "shape": [pad], "data_offsets": [end, end + pad]},
        "labels": {"dtype": "I64", "shape": [len(order)], "data_offsets": [end + pad, end + pad + 8 * len(order)]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for start in range(0, len(order), WINDOW):
        file.write(images[order[start : start + WINDOW]].tobytes())
    file.write(bytes(pad) + labels.astype("<i8").tobytes())
    file.flush()
    os.fsync(file.fileno())


def _open(file: Path) -> Decoded | None:
    """Map a kept file; None if there is none, or it is torn or not ours."""
    try:
        with safe_open(file, "pt") as kept:
            about = kept.metadata()
            images, labels = kept.get_tensor("images"), kept.get_tensor("labels")
        names, train = tuple(json.loads(about["names"])), int(about["train"])
        fits = about["format"] == str(FORMAT) and images.shape[1] == 3 and len(images) == len(labels) > train > 0
        fits = fits and int(labels.min()) >= 0 and int(labels.max()) < len(names)
        unread = tuple(map(str, json.loads(about.get("unread", "[]"))))
        known = about.get("digest", "")
        return Decoded(images, labels, train, names, int(about["skipped"]), known, unread) if fits else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None
