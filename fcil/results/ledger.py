"""The ledger: what happened in a run, one JSON object a line, only ever appended to.

At the start, once:
    {"kind": "run", "format": 1, "method": "hr", "benchmark": "digits", "seed": 0, ...}
At the end of a round:
    {"kind": "round", "task": 0, "stage": "train", "round": 3, "rounds": 20, "clients": 5, "lost": 0, "loss": 0.7,
     "seconds": {"train": 0.21}, "down": 51200, "up": 51200}
Inside a task, if asked for:
    {"kind": "evaluation", "task": 0, "stage": "train", "round": 10, "rounds": 20, "correct": [61], "total": [72],
     "per_class": [84.7, 85.0, null]}
At the end of a task:
    {"kind": "task", "task": 0, "correct": [70], "total": [72], "per_class": [97.2, 98.6, null],
     "per_client": [97.5, null], "old": null, "measured": {"old_exemplars": null}, "decomposition": {"parts": ...},
     "seconds": {"evaluate": 0.1},
     "down": 51200, "up": 80, "kept": 6400, "kept_max": 640, "clients": 10}

A deployment's first line has "evaluated": "by nodes", each on images it holds out; `total` may then change as nodes
come and go, and `decomposition` is null, as no scores travel.

Tasks and rounds count from 0. `correct` and `total` hold one number for each task so far; `old` is the accuracy on
all of them but the last, and `measured` is what the method says of itself. Hybrid Replay's `old_exemplars` is the
accuracy on the old exemplars that were replayed: far above `old`, it shows that replay no longer stands for the images
it was made from. `decomposition` says which pairs of classes are confused, and whether they meet in one client
(docs/forgetting.md). Seconds and bytes down and up are those since the line before, so a task line has what followed
its last round, and the cost of a task or a run is the sum over its lines. The parts of `seconds` do not overlap;
`server` is what it computed by itself. A number that is not finite is written as null. Where replies were refused,
`refused` has a client, what it was asked and why of each; where sums were made private, `releases` has how many of each
(docs/trust.md).

Each line goes to the file in one write, so a killed run leaves at most one torn line, at the end, which no reader
trusts. All results are computed from these lines.
"""

import errno
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from fcil.errors import UserError
from fcil.files import sha256
from fcil.results.metrics import summary
from fcil.results.runs import FORMAT, read_result


class Ledger:
    """An open ledger.jsonl that takes one line after another."""

    def __init__(self, path: Path) -> None:
        """Open the ledger at `path` to go on after its last whole line."""
        try:
            if path.exists():
                # A line appended to a torn one would spoil both.
                os.truncate(path, _whole_lines(path)[1])
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"cannot write {path} ({error.strerror})") from None
        self.path = path

    @classmethod
    def open(cls, path: Path, offset: int | None = None) -> "Ledger":
        """Open the ledger at `path`; with an offset, drop what was written after it, as resuming writes it again."""
        if offset is not None:
            _cut(path, offset)
        return cls(path)

    @property
    def offset(self) -> int:
        """Return how many bytes the ledger has."""
        return self._file.tell()

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line, whole and at once."""
        data = json.dumps(_finite(line), allow_nan=False).encode() + b"\n"
        try:
            written = self._file.write(data)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # whoever runs the run says how to go on
            raise UserError(f"cannot write {self.path} ({error.strerror})") from None
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def sync(self) -> None:
        """Let what was appended outlast a crash of the machine."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> "Ledger":
        """Return the ledger itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


def read(path: Path) -> list[dict[str, Any]]:
    """Return all whole lines; a torn last line is skipped."""
    return _whole_lines(path)[0]


def result_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute a run's result from its ledger: the metrics, seconds by part and in total, bytes sent and kept."""
    lines = list(lines)
    versions = [line.get("format") for line in lines if line.get("kind") == "run"]
    if versions and versions[0] != FORMAT:
        raise UserError(f"the ledger has format {versions[0]}; this fcil reads format {FORMAT}")
    tasks = [line for line in lines if line.get("kind") == "task"]
    if not tasks:
        raise UserError("the ledger has no task line: no task of this run has ended")
    try:
        federated = any(line.get("evaluated") == "by nodes" for line in lines[:1])
        costly = [line for line in lines if line.get("kind") in ("round", "task")]
        return {**_accuracy(tasks, federated), **_cost(costly), **_noted(costly)}
    except KeyError as error:
        raise UserError(f"a line of the ledger lacks {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"the lines of the ledger do not fit together ({error})") from None


def verify(folder: Path) -> list[str]:
    """Return what differs between a run's result.json and its ledger, a sentence each; nothing when all is well."""
    path = folder / "ledger.jsonl"
    try:
        result, lines = read_result(folder), read(path)
        computed, digest = result_of(lines), sha256(path)
    except UserError as error:
        return [f"{folder}: {error}"]
    named: dict[str, Any] = {
        key: lines[0][key] for key in ("method", "benchmark", "protocol", "seed", "settings") if key in lines[0]
    }
    found = [
        f"{folder}: {_difference(key, result.get(key), value)}"
        for key, value in {**named, **computed}.items()
        if not _agree(result.get(key), value)
    ]
    if result.get("ledger_sha256") != digest:
        found.append(f"{folder}: the ledger is not the file that result.json was made from (its SHA-256 differs)")
    return found


def _accuracy(tasks: list[Mapping[str, Any]], federated: bool) -> dict[str, Any]:
    if [line["task"] for line in tasks] != list(range(len(tasks))):
        raise ValueError(f"they end the tasks {', '.join(str(line['task']) for line in tasks)}")
    total = [line["total"] for line in tasks] if federated else tasks[-1]["total"]
    for t, line in enumerate(tasks):
        if not federated and line["total"] != total[: t + 1]:
            raise ValueError(f"the number of test images changes after task {t}")
    return {
        **summary([line["correct"] for line in tasks], total),
        "per_class": tasks[-1]["per_class"],
        "per_client": tasks[-1]["per_client"],
        **{key: tasks[-1][key] for key in ("old", "measured") if key in tasks[-1]},  # earlier runs lack them
        "memory_bytes": max(line["kept_max"] for line in tasks),
    }


def _cost(lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    parts: dict[str, float] = {}
    for line in lines:
        for part, seconds in line["seconds"].items():
            parts[part] = parts.get(part, 0.0) + seconds
    return {
        "seconds": {**parts, "total": sum(parts.values())},
        "down": sum(line["down"] for line in lines),
        "up": sum(line["up"] for line in lines),
    }


def _noted(lines: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Count refused replies by client and private sums by what they are of, where there are any."""
    refused = Counter(str(one["client"]) for line in lines for one in line.get("refused", []))
    releases = sum((Counter(line.get("releases", {})) for line in lines), Counter[str]())
    return {name: dict(found) for name, found in (("refused", refused), ("releases", releases)) if found}


def _whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the lines that can be trusted and the offset where they end."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no ledger {path}") from None
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from None
    chunks = data.split(b"\n")[:-1]  # what follows the last newline is torn, even where it happens to parse
    lines: list[dict[str, Any]] = []
    end = 0
    for number, chunk in enumerate(chunks, start=1):
        line = _parsed(chunk)
        if line is None and number < len(chunks):
            raise UserError(f"{path} is broken at line {number}: not a JSON object")
        if line is not None:
            lines.append(line)
            end += len(chunk) + 1
    return lines, end


def _parsed(chunk: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(chunk)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _cut(path: Path, offset: int) -> None:
    try:
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if offset:
                file.seek(max(offset - 1, 0))
            if not 0 <= offset <= size or (offset and file.read(1) != b"\n"):
                raise UserError(
                    f"{path} does not belong to this checkpoint: it has no line that ends at byte {offset}; "
                    "start the run again in another folder"
                )
            file.truncate(offset)
    except FileNotFoundError:
        raise UserError(
            f"there is no ledger {path}, and without it the run cannot go on; start it again in another folder"
        ) from None
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})") from None


def _finite(value: Any) -> Any:
    """Return `value` with None for every number JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def _agree(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_agree(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-9
    return bool(one == other)


def _difference(key: str, written: Any, computed: Any) -> str:
    if isinstance(written, dict | list):
        return f"{key} in result.json is not what the ledger gives"
    return f"{key} is {written} in result.json, but the ledger gives {computed}"
