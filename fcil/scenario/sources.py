"""Where images come from: folders of class folders, and parquet files as on the Hugging Face hub.

Listing a source is cheap and says whether its cached form is still good; `open` then reads labels and bytes.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcil.errors import UserError

HALVES = ("test", "val", "valid", "validation")  # folders beside train/ whose images are for testing: the first of them
NUMBERED = re.compile(r"(.*?)(\d+)-of-(\d+)")  # the name of one of several files, as on the hub
IMAGE_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
TRAIN, TEST, EITHER = 0, 1, 2  # which half an image belongs to; EITHER is for us to hold out
LAYOUTS = "a folder of class folders, a parquet file, or a folder of parquet files"


@dataclass(frozen=True)
class Contents:
    """All images of a source: labels at once, bytes one after the other."""

    names: tuple[str, ...]
    labels: NDArray[np.int64]  # -1 where there is none
    halves: NDArray[np.int64]
    read: Callable[[], Iterator[tuple[bytes, bytes]]]  # what decides on holding it out, the encoded image


@dataclass(frozen=True)
class Source:
    """A list of files, and how to open it."""

    where: Path
    files: list[Path]
    open: Callable[[], Contents]

    def stamp(self) -> list[tuple[str, int, int]]:
        """Return what changes when a file changes."""
        return [(str(file.absolute()), *_size_and_time(file)) for file in self.files]


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:  # a broken link: reading it will count as an unreadable image
        return -1, -1
    return stat.st_size, stat.st_mtime_ns


def find(path: Path) -> Source:
    """Return the source at a path, or say what may stand there."""
    try:
        if path.is_dir():
            shards = _shards(path)
            return parquet_source(path, shards) if shards else folder_source(path)
        if path.suffix == ".parquet" and path.exists():
            return parquet_source(path, [path])
        exists = path.exists()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); data may be {LAYOUTS}") from None
    raise UserError(f"{path} {'is another kind of file' if exists else 'does not exist'}; data may be {LAYOUTS}")


# Folders


def folder_source(root: Path, choose: Callable[[list[str]], list[str]] = sorted) -> Source:
    """Return the images below class folders; `choose` picks and orders the classes.

    A folder with train/ and test/, val/ or valid/ holds a split of its own. So does one without train/ where test/ has
    class folders called like those beside it: these are for training. A test/ with images only is a class of that name,
    and one with folders of other names is refused, as it may be either. A class folder without images is no class.
    """
    below = {folder.name: folder for folder in folders_in(root)}
    apart = [below[name] for name in HALVES if name in below and ("train" in below or _is_half(below[name], below))]
    if "train" in below and apart:
        roots = [(below["train"], TRAIN), (apart[0], TEST)]
    elif apart:
        roots = [(root, TRAIN), (apart[0], TEST)]
    else:
        roots = [(below["train"] if list(below) == ["train"] else root, EITHER)]
    per_root = [{f.name: f for f in folders_in(folder) if f not in apart} for folder, _ in roots]
    for (folder, _), classes in zip(roots, per_root, strict=True):
        if not classes:
            raise UserError(f"{folder} has no class folders; put the images of each class into a folder of its own")
    found: list[tuple[Path, str, int]] = []
    names = []
    for name in choose(sorted({name for classes in per_root for name in classes})):
        mine = [
            (file, half)
            for (_, half), classes in zip(roots, per_root, strict=True)
            if name in classes
            for file in images_in(classes[name])
        ]
        names += [name] if mine else []
        found += [(file, name, half) for file, half in mine]
    files = [file for file, _, _ in found]
    _require_classes(root, len(names))
    number = {name: j for j, name in enumerate(names)}

    def read() -> Iterator[tuple[bytes, bytes]]:
        for file in files:
            try:
                data = file.read_bytes()
            except OSError:
                data = b""  # counted with the corrupt ones
            yield file.relative_to(root).as_posix().encode(), data

    labels = np.array([number[name] for _, name, _ in found], dtype=np.int64)
    halves = np.array([half for _, _, half in found], dtype=np.int64)
    return Source(root, files, lambda: Contents(tuple(names), labels, halves, read))


def _is_half(folder: Path, beside: Collection[str]) -> bool:
    """Tell whether a folder called test is a test set in itself, with the classes beside it."""
    classes = {inner.name for inner in folders_in(folder)} if len(beside) > 1 else set()
    if classes and not classes & set(beside):
        shown = ", ".join(sorted(classes)[:3])
        raise UserError(
            f"{folder} holds folders ({shown}) and none of them is called like a class beside it; if it is a test set, "
            f"put the training images under {folder.parent / 'train'}, and if it is a class, give it another name"
        )
    return bool(classes)


def is_empty(folder: Path) -> bool:
    """Tell whether a folder holds no source at all: neither parquet files nor a class folder with an image."""
    return not _shards(folder) and not any(map(images_in, folders_in(folder)))


def folders_in(root: Path) -> list[Path]:
    """Return the visible folders in a folder, in order."""
    return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def images_in(folder: Path) -> list[Path]:
    """Return the images below a folder, in order, by their names."""
    found = []
    for place, below, names in os.walk(folder, onerror=_fail):
        below[:] = sorted(name for name in below if not name.startswith("."))
        found += [
            Path(place, name)
            for name in sorted(names)
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES
        ]
    return found


def _fail(error: OSError) -> None:
    raise error


def _require_classes(where: Path, count: int) -> None:
    if count == 0:
        raise UserError(f"{where} has no images; data may be {LAYOUTS}")
    if count == 1:
        raise UserError(f"{where} has one class only; there must be at least two")


# Parquet


def parquet_source(where: Path, shards: list[Path]) -> Source:
    """Return the rows of parquet files; train* and test*, valid* or val* are halves, else test images are held out."""
    tested = [shard for shard in shards if shard.name.startswith("test")] or [
        shard for shard in shards if shard.name.startswith("val")
    ]
    trained = [shard for shard in shards if shard.name.startswith("train")] or [
        shard for shard in shards if not shard.name.startswith(("test", "val"))
    ]
    if len(shards) == 1:
        trained, tested = shards, []
    if not trained:
        raise UserError(f"{where} has no file named train*.parquet; it has {', '.join(s.name for s in shards)}")
    if where.is_dir():
        _require_all(where, trained + tested)
    halves = [TRAIN if tested else EITHER] * len(trained) + [TEST] * len(tested)
    return Source(where, trained + tested, lambda: _open_parquet(where, trained + tested, halves))


def _require_all(where: Path, shards: list[Path]) -> None:
    """Refuse a folder that lacks files whose names say of how many they are one: train-00000-of-00002.parquet."""
    there: dict[tuple[Path, str, str], set[int]] = {}
    for shard in shards:
        if named := NUMBERED.match(shard.name):
            first, number, of = named.groups()
            there.setdefault((shard.parent, first, of), set()).add(int(number))
    for (folder, first, of), numbers in there.items():
        if len(numbers) < int(of):
            start = int(int(of) in numbers)  # some count from 1
            gone = [f"{first}{n:0{len(of)}}-of-{of}" for n in range(start, start + int(of)) if n not in numbers]
            others = f" and {len(gone) - 1} more" if gone[1:] else ""
            raise UserError(
                f"{where} has only {len(numbers)} of the {int(of)} files {first}*-of-{of} that their names promise; "
                f"put {gone[0]}.parquet{others} into {folder}, too"
            )


def _shards(folder: Path) -> list[Path]:
    for pattern in ("*.parquet", "*/*.parquet"):  # the hub keeps them one level down
        found = [file for file in folder.glob(pattern) if not file.relative_to(folder).as_posix().startswith(".")]
        shards = sorted(file for file in found if not file.name.startswith("."))
        if shards:
            return shards
    return []


def _open_parquet(where: Path, shards: list[Path], halves: list[int]) -> Contents:
    tables = [_labels_of(shard) for shard in shards]
    listed = list(dict.fromkeys(name for names, _ in tables for name in names))
    known = set(listed)
    unlisted = {label for names, labels in tables if not names for label in labels if label is not None}
    listed += [str(label) for label in sorted(unlisted, key=_in_order) if str(label) not in known]
    number = {name: j for j, name in enumerate(listed)}
    labels = np.array([_number(label, names, number) for names, column in tables for label in column], dtype=np.int64)
    used, compact = np.unique(labels[labels >= 0], return_inverse=True)  # a name without rows is no class
    labels[labels >= 0] = compact
    _require_classes(where, len(used))

    def read() -> Iterator[tuple[bytes, bytes]]:
        for shard in shards:
            for data in _bytes_of(shard):
                yield data, data

    rows = np.repeat(np.array(halves, dtype=np.int64), [len(column) for _, column in tables])
    return Contents(tuple(listed[j] for j in used), labels, rows, read)


def _in_order(label: Any) -> tuple[bool, Any]:
    return isinstance(label, str), label


def _number(label: Any, names: list[str], number: dict[str, int]) -> int:
    if label is None or (names and not 0 <= label < len(names)):
        return -1
    return number[names[label] if names else str(label)]


def _labels_of(shard: Path) -> tuple[list[str], list[Any]]:
    """Return the class names that a file lists, if any, and its labels."""
    import pyarrow as pa

    with _parquet(shard) as file:
        _, column = _columns(shard, file.schema_arrow.names)
        kind = file.schema_arrow.field(column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UserError(f"column {column!r} of {shard} holds {kind}; labels are whole numbers or text")
        try:
            labels: list[Any] = file.read(columns=[column]).column(column).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise _corrupt(shard, error) from None
        listed = _listed_names(file.schema_arrow.metadata or {}, column) if pa.types.is_integer(kind) else []
    return listed, labels


def _listed_names(metadata: dict[bytes, bytes], column: str) -> list[str]:
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][column]["names"]
        return [str(name) for name in names]
    except (KeyError, TypeError, ValueError):
        return []


def _bytes_of(shard: Path) -> Iterator[bytes]:
    import pyarrow as pa

    with _parquet(shard) as file:
        column, _ = _columns(shard, file.schema_arrow.names)
        kind = file.schema_arrow.field(column).type
        nested = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        if nested:
            kind = kind.field("bytes").type
        if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise UserError(f"column {column!r} of {shard} holds {kind}; images are bytes, or a struct with `bytes`")
        try:
            for batch in file.iter_batches(256, columns=[f"{column}.bytes" if nested else column]):
                rows = batch.column(0).field("bytes") if nested else batch.column(0)
                for data in rows:
                    yield data.as_py() or b""
        except (pa.ArrowException, OSError) as error:
            raise _corrupt(shard, error) from None


def _parquet(shard: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(shard)
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(shard, error) from None


def _columns(shard: Path, names: list[str]) -> tuple[str, str]:
    image = next((name for name in ("img", "image") if name in names), None)
    label = next((name for name in ("fine_label", "label") if name in names), None)
    if image is None or label is None:
        found = ", ".join(names)
        raise UserError(f"{shard} needs a column img or image and a column fine_label or label; it has {found}")
    return image, label


def _corrupt(shard: Path, error: Exception) -> UserError:
    return UserError(f"{shard} is not a readable parquet file ({str(error).splitlines()[0] if str(error) else 'torn'})")
