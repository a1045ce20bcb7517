"""Runs on disk: which are finished and what they found, which are still under way.

A finished run is a folder with a result.json of `FORMAT`; one with a ledger or a config but no result is unfinished.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcil.errors import UserError, quoted

FORMAT = 1  # of a run folder; raised when an older one can no longer be read

_TEXTS = ("method", "benchmark", "protocol")
_NUMBERS = ("seed", "final", "average", "forgetting", "bwt", "memory_bytes")


@dataclass(frozen=True)
class Run:
    """A finished run: where it lies and what its result.json says."""

    folder: Path
    result: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """Return what the run changed from the defaults."""
        settings: dict[str, Any] = self.result.get("settings", {})
        return settings

    def knobs(self) -> dict[str, dict[str, Any]]:
        """Return all that decided the run, set or not, as its config.toml has it; nothing where that cannot be read."""
        found = self._config()
        return {
            table: found[table] for table in ("benchmark", "protocol", "config") if isinstance(found.get(table), dict)
        }

    def source(self) -> str:
        """Return the beginning of the digest of the user's own method file that was run; nothing for a known method."""
        return str(self._config().get("source", ""))[:8]

    def _config(self) -> dict[str, Any]:
        try:
            return tomllib.loads((self.folder / "config.toml").read_text())
        except (OSError, ValueError):
            return {}


def find(paths: Iterable[Path], left_out: list[str] | None = None) -> list[Run]:
    """Return the finished runs in `paths`, each a run's folder or a folder of runs at any depth.

    What is no run, or a damaged one, is an error; or, with `left_out`, a sentence there, as long as any run is left.
    """
    runs: dict[Path, Run] = {}
    waiting: list[Path] = []
    for path in paths:
        try:
            folders = list(_run_folders(path))
            if not folders:
                raise UserError(f"{path} holds no run; a run is a folder with a result.json, such as `fcil run` leaves")
        except UserError as error:
            _leave_out(error, left_out)
            continue
        for folder in folders:
            try:
                if (folder / "result.json").exists():
                    runs.setdefault(folder.resolve(), Run(folder, read_result(folder)))
                else:
                    waiting.append(folder)
            except UserError as error:
                _leave_out(error, left_out)
    if waiting and not runs:
        raise UserError(f"no run has finished yet; continue with: fcil run --resume {quoted(waiting[0])}")
    if left_out and not runs:
        raise UserError("; ".join(left_out))
    return list(runs.values())


def _leave_out(error: UserError, left_out: list[str] | None) -> None:
    if left_out is None:
        raise error
    left_out.append(str(error))


def unfinished(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of the runs in `paths` that have begun and not finished."""
    folders = [folder for path in paths for folder in _run_folders(path) if not (folder / "result.json").exists()]
    return list({folder.resolve(): folder for folder in folders}.values())


def folders(path: Path) -> list[Path]:
    """Return the folders of all runs in `path`, finished or not."""
    return list(_run_folders(path))


def read_result(folder: Path) -> dict[str, Any]:
    """Return the result.json of a run, or say what is wrong with it."""
    path = folder / "result.json"
    try:
        result = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"there is no {path}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not readable ({error}); remove it, and `fcil run --resume {quoted(folder)}` makes it again"
        ) from None
    if not isinstance(result, dict) or "format" not in result:
        raise UserError(f"{path} is not the result of a run: it names no format")
    if result["format"] != FORMAT:
        raise UserError(f"{path} has format {result['format']}; this fcil reads format {FORMAT}")
    if wrong := _wrong_key(result):
        raise UserError(f"{path} is not a whole result: {wrong!r} is missing or of the wrong kind")
    return result


def read_audit(folder: Path) -> dict[str, Any]:
    """Return the audit.json of a run, empty where it was not audited, or say what is wrong with it."""
    path = folder / "audit.json"
    try:
        audit = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable ({error}); `fcil audit {quoted(folder)}` makes it again") from None
    rows = audit.get("membership") if isinstance(audit, dict) else None
    if not isinstance(rows, list) or not all(map(_is_attack, rows)):
        raise UserError(f"{path} is not an audit of a run; `fcil audit {quoted(folder)}` makes it again")
    return dict(audit)


def _is_attack(row: object) -> bool:
    texts, numbers = ("images", "attack"), ("value", "low", "high")
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in texts)
        and all(_is_number(row.get(name)) for name in numbers)
    )


def _wrong_key(result: dict[str, Any]) -> str | None:
    seconds = result.get("seconds")
    sound = {
        **{key: isinstance(result.get(key), str) for key in _TEXTS},
        **{key: _is_number(result.get(key)) for key in _NUMBERS},
        "matrix": _is_matrix(result.get("matrix")),
        "overall": _are_numbers(result.get("overall", [])),
        **{key: _are_numbers(result.get(key, []), or_none=True) for key in ("per_class", "per_client")},
        "classes": isinstance(names := result.get("classes", []), list) and all(isinstance(n, str) for n in names),
        "engine": isinstance(result.get("engine", ""), str),
        "old": result.get("old") is None or _is_number(result["old"]),
        **{key: isinstance(result.get(key, {}), dict) for key in ("measured", "refused", "privacy")},
        "seconds": isinstance(seconds, dict) and _is_number(seconds.get("total")),
        "settings": isinstance(result.get("settings", {}), dict),
    }
    return next((key for key, good in sound.items() if not good), None)


def _is_matrix(value: object) -> bool:
    """Tell whether these are accuracies on tasks 0..t, for each t."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(_are_numbers(row) and len(row) == t + 1 for t, row in enumerate(value))
    )


def _are_numbers(value: object, or_none: bool = False) -> bool:
    return isinstance(value, list) and all(_is_number(one) or (or_none and one is None) for one in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _run_folders(path: Path) -> Iterator[Path]:
    if not path.exists():
        raise UserError(f"there is no folder {path}; give folders of runs, such as `fcil run` leaves in runs")
    for folder, inner, files in os.walk(path):
        if {"result.json", "ledger.jsonl", "config.toml"} & set(files):
            yield Path(folder)
        # A run's own folders hold thousands of files and no runs; a config.toml alone may be another program's.
        done = {"result.json", "ledger.jsonl"} & set(files)
        inner[:] = [] if done else sorted(name for name in inner if not name.startswith("."))
