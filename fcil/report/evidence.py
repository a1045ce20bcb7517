"""What the runs of a page say, read once and checked: by benchmark, method with its settings, and seed.

A run that cannot be trusted is left out and named in a sentence; none of them can break a page.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fcil.errors import UserError, quoted
from fcil.report.comparison import Measured, Row, Section, compare, decided, settings_text
from fcil.results.ledger import read, result_of, verify
from fcil.results.metrics import forgotten, mean_and_sem
from fcil.results.runs import Run, folders, read_audit

MOST_BYTES = 10**18  # more than any run could send
TERMS = ("prior", "new", "intra", "inter")


@dataclass(frozen=True)
class Apart:
    """A ledger's decomposition after one task, in nats (docs/forgetting.md)."""

    parts: dict[str, float]  # TERMS, local, global, total
    means: dict[str, float | None]  # TERMS
    across: float | None
    across_before: float | None
    between: list[list[float | None]]


@dataclass(frozen=True)
class Cost:
    """What one task cost."""

    down: int
    up: int
    kept: int
    kept_max: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Round:
    """One communication round, and what its clients lost on average."""

    task: int
    stage: str
    loss: float | None


@dataclass(frozen=True)
class Trial:
    """One run with what its ledger says after each task."""

    run: Run
    overall: list[float]
    matrix: list[list[float]]
    fallen: list[float]  # forgetting after each task
    by_client: list[float | None]
    apart: list[Apart | None]
    costs: list[Cost]
    rounds: list[Round]
    classes: list[str]
    task_of_class: dict[int, int]

    @property
    def seed(self) -> int:
        """Return the run's seed."""
        seed: int = self.run.result["seed"]
        return seed


@dataclass(frozen=True)
class Group:
    """A method with its settings, and its runs."""

    row: Row
    trials: tuple[Trial, ...]
    label: str  # the method and those of its settings that not all others share


@dataclass(frozen=True)
class Evidence:
    """All that is known of one benchmark under one protocol."""

    section: Section
    groups: tuple[Group, ...]
    shared: str  # settings of all its runs

    @property
    def title(self) -> str:
        """Name the benchmark, the protocol and what was set for all runs."""
        return f"{self.section.title}, with {self.shared}" if self.shared else self.section.title


def gather(paths: Iterable[Path], unfinished: bool = False) -> tuple[list[Evidence], list[str]]:
    """Return what the runs in `paths` say, and a sentence for each that is left out."""
    trials: dict[tuple[str, ...], Trial] = {}
    left_out: list[str] = []
    for folder in _each_folder(paths, left_out):
        try:
            trial = trial_of(folder, unfinished)
        except UserError as error:
            left_out.append(_about(folder, error))
            continue
        try:
            read_audit(folder)
        except UserError as error:
            left_out.append(str(error))  # the run is shown without it
        key = _key(trial.run)
        first = trials.setdefault(key, trial)
        if first.matrix != trial.matrix:
            left_out.append(
                f"{folder}: the same method, settings and seed as {first.run.folder}, but another result; "
                "the first is shown"
            )
    return _grouped(list(trials.values())), left_out


def trial_of(folder: Path, unfinished: bool = False) -> Trial:
    """Read a run and its ledger, or say in a sentence why they cannot be trusted."""
    lines = read(folder / "ledger.jsonl")
    if (folder / "result.json").exists():
        if wrong := verify(folder):
            raise UserError(wrong[0])
        run = Run(folder, json.loads((folder / "result.json").read_bytes()))
    elif unfinished:
        run = Run(folder, _so_far(lines))
    else:
        raise UserError(f"it has not finished; go on with: fcil run --resume {quoted(folder)}")
    try:
        return _trial(run, lines)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise UserError(f"its ledger is not one of ours ({error!r})") from None


def rounds_of(lines: Iterable[Mapping[str, Any]]) -> list[Round]:
    """Return all rounds of a ledger, in order."""
    return [
        Round(int(line["task"]), str(line.get("stage", "train")), _number(line.get("loss")))
        for line in lines
        if line.get("kind") == "round"
    ]


def over_seeds(series: Iterable[Sequence[float | None]]) -> list[Measured | None]:
    """Return mean and standard error at each position; None where no run has a value."""
    rows = list(series)
    columns = [
        [value for row in rows if i < len(row) and (value := row[i]) is not None]
        for i in range(max(map(len, rows), default=0))
    ]
    return [Measured(*mean_and_sem(column)) if column else None for column in columns]


def _each_folder(paths: Iterable[Path], left_out: list[str]) -> Iterable[Path]:
    seen: set[Path] = set()
    for path in paths:
        try:
            found = folders(path)
        except UserError as error:
            left_out.append(str(error))
            continue
        if not found:
            left_out.append(f"{path}: it holds no run")
        for folder in found:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _about(folder: Path, error: UserError) -> str:
    text = str(error)
    return text if text.startswith(str(folder)) else f"{folder}: {text}"


def _so_far(lines: list[dict[str, Any]]) -> dict[str, Any]:
    named = next((line for line in lines if line.get("kind") == "run"), None)
    if named is None:
        raise UserError("its ledger does not say which run it is")
    return {**named, **result_of(lines)}


def _trial(run: Run, lines: list[dict[str, Any]]) -> Trial:
    ends = [line for line in lines if line.get("kind") == "task"]
    result = result_of(lines)
    matrix: list[list[float]] = result["matrix"]
    first_seen: dict[int, int] = {}
    for t, line in enumerate(ends):
        for j, accuracy in enumerate(line["per_class"]):
            if accuracy is not None:
                first_seen.setdefault(j, t)
    return Trial(
        run=run,
        overall=result["overall"],
        matrix=matrix,
        fallen=[fmean(forgotten(matrix[: t + 1]) or [0.0]) for t in range(len(matrix))],
        by_client=[_number(value) for value in ends[-1]["per_client"]],
        apart=[_apart(line.get("decomposition")) for line in ends],
        costs=[_cost(lines, t, line) for t, line in enumerate(ends)],
        rounds=rounds_of(lines),
        classes=[str(name) for name in run.result.get("classes", [])],
        task_of_class=first_seen,
    )


def _apart(told: Mapping[str, Any] | None) -> Apart | None:
    if told is None:
        return None
    return Apart(
        parts={name: float(told["parts"][name]) for name in (*TERMS, "local", "global", "total")},
        means={name: _number(told["means"].get(name)) for name in TERMS},
        across=_number(told.get("across")),  # earlier ledgers lack it
        across_before=_number(told.get("across_before")),
        between=[[_number(value) for value in row] for row in told["between"]],
    )


def _cost(lines: list[dict[str, Any]], task: int, end: Mapping[str, Any]) -> Cost:
    own = [line for line in lines if line.get("kind") in ("round", "task") and line.get("task") == task]
    seconds: dict[str, float] = {}
    for line in own:
        for part, value in line["seconds"].items():
            seconds[part] = seconds.get(part, 0.0) + float(value)
    down, up = (sum(int(line[way]) for line in own) for way in ("down", "up"))
    counted = (down, up, int(end["kept"]), int(end["kept_max"]))
    if not all(0 <= number < MOST_BYTES for number in counted):
        raise ValueError(f"no number of bytes: {max(counted, key=abs):.3g}")
    return Cost(*counted, seconds)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _key(run: Run) -> tuple[str, ...]:
    named = (run.result[name] for name in ("benchmark", "protocol", "method", "seed"))
    return (*map(str, named), _settings(run.settings), json.dumps(decided(run), sort_keys=True, default=str))


def _settings(settings: Mapping[str, Any]) -> str:
    return json.dumps({key: value for key, value in settings.items() if key != "protocol"}, sort_keys=True)


def _grouped(trials: list[Trial]) -> list[Evidence]:
    found = []
    for section in compare([trial.run for trial in trials]).sections:
        first, *others = [row.settings for row in section.rows]
        shared = {key: value for key, value in first.items() if all(_same(o, key, value) for o in others)}
        labels = [_label(row, shared) for row in section.rows]
        groups = tuple(
            Group(row, _of(trials, row), label if labels.count(label) == 1 else f"{label}, {row.method}")
            for row, label in zip(section.rows, labels, strict=True)
        )
        found.append(Evidence(section, groups, settings_text(shared)))
    return found


def _same(settings: Mapping[str, Any], key: str, value: Any) -> bool:
    return key in settings and bool(settings[key] == value)


def _label(row: Row, shared: Mapping[str, Any]) -> str:
    own = {key: value for key, value in row.settings.items() if key not in shared}
    return replace(row, settings=own).label


def _of(trials: list[Trial], row: Row) -> tuple[Trial, ...]:
    alike = [trial for trial in trials if trial.run.folder in row.folders]
    return tuple(sorted(alike, key=lambda trial: trial.seed))
