"""Runs side by side: grouped by benchmark, protocol, method and settings, and averaged over seeds."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import Any

from fcil.errors import UserError
from fcil.methods import METHODS, family, method
from fcil.report.paper import PAPER_FINAL, Claim, claim, paper_name
from fcil.results.metrics import mean_and_sem
from fcil.results.runs import Run
from fcil.scenario.benchmarks import Benchmark, Protocol

BOUNDS = {"finetune": "lower", "joint": "upper"}

_PAPER_ORDER = list(PAPER_FINAL["cifar100-10x10"])

# Settings of the benchmark under which the paper's number still speaks of the same experiment.
_SAME_EXPERIMENT = {"partition_seed", "sampling_seed", "memory_scope", "protocol"}

_NAMES = {"name", "protocol"}  # which a section has in its title

_OTHER_EXPERIMENT = {f.name for f in fields(Benchmark)} - _SAME_EXPERIMENT


@dataclass(frozen=True)
class Measured:
    """A mean over seeds and its standard error, which one seed does not have."""

    mean: float
    sem: float | None

    def __str__(self) -> str:
        """Say the value so that nobody takes one seed for more."""
        return f"{number(self.mean)} (1 seed)" if self.sem is None else f"{number(self.mean)} ± {number(self.sem)}"


@dataclass(frozen=True)
class Row:
    """A method with its settings, over its seeds."""

    method: str
    settings: dict[str, Any]
    seeds: tuple[int, ...]
    final: Measured
    average: Measured
    forgetting: Measured
    bwt: Measured
    memory_bytes: float
    seconds: float
    paper: Claim | None
    folders: tuple[Path, ...]  # of its runs, seed by seed
    ran: tuple[tuple[str, ...], ...]  # by what, seed by seed

    @property
    def label(self) -> str:
        """Return the method and what was set beyond its defaults."""
        name = shown_name(self.method)
        return f"{name} ({settings_text(self.settings)})" if self.settings else name


@dataclass(frozen=True)
class Section:
    """All rows of one benchmark under one protocol."""

    benchmark: str
    protocol: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """Name the benchmark and the protocol."""
        return f"{self.benchmark}, {self.protocol} protocol"

    @property
    def best(self) -> Row | None:
        """Return the method with the highest final accuracy, bounds and settings but the learning rate aside."""
        rivals = [row for row in self.rows if not row.settings.keys() - {"lr"} and family(row.method) != "bound"]
        return max(rivals, key=lambda row: row.final.mean) if len(rivals) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    sections: tuple[Section, ...]


def compare(runs: Iterable[Run]) -> Comparison:
    """Group runs by benchmark, protocol, method and settings, and average each group over its seeds."""
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        section = groups.setdefault((run.result["benchmark"], run.result["protocol"]), {})
        beyond = {key: value for key, value in run.settings.items() if key != "protocol"}  # it names the section
        section.setdefault((shown_name(run.result["method"]), json.dumps(beyond, sort_keys=True)), []).append(run)
    return Comparison(
        tuple(
            Section(
                benchmark, protocol,
                tuple(sorted((_row(*part) for alike in rows.values() for part in _apart(alike)), key=_place)),
            )
            for (benchmark, protocol), rows in sorted(groups.items())
        )
    )  # fmt: skip


def shown_name(method: str) -> str:
    """Return what a method is called: its name, or that of the user's own file."""
    return PurePath(method).name if method.endswith(".py") else method


def settings_text(settings: Mapping[str, Any]) -> str:
    """Say what was set beyond the defaults."""
    return ", ".join(f"{name}={_setting(value)}" for name, value in sorted(settings.items()))


def ran_by(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return by which code, device and engine a run was made: times of others do not compare with its own."""
    return tuple(str(result.get(key)) for key in ("commit", "device", "engine"))


def number(value: float) -> str:
    """Round to what a table shows."""
    return f"{round(value, 1) + 0.0:.1f}"  # the sum turns -0.0 into 0.0


def decided(run: Run) -> dict[str, Any]:
    """Return every knob that decided a run, set or not; none where its config.toml cannot be read."""
    knobs = run.knobs()
    if not knobs:
        return {}
    world = {**asdict(Benchmark()), **asdict(Protocol()), **knobs.get("benchmark", {}), **knobs.get("protocol", {})}
    own = {"source": run.source()} if run.source() else {}  # of a method of the user's own: another file is another
    return {**{key: world[key] for key in sorted(world.keys() - _NAMES)}, **knobs.get("config", {}), **own}


def _apart(alike: Sequence[Run]) -> list[tuple[list[Run], dict[str, Any]]]:
    """Take runs apart that are called the same and are not, with what tells them from each other.

    A file of one's own may have changed between two seeds, and so may a default. A method's knob that came later is
    told of the runs before it, and one that has gone of those that had it, so that runs of today need no explanation;
    what benchmarks and protocols got later leaves a run as it was.
    """
    parts: dict[str, list[Run]] = {}
    values: dict[str, dict[str, Any]] = {}
    for run in alike:
        own = decided(run)
        parts.setdefault(text := json.dumps(own, sort_keys=True, default=str), []).append(run)
        values[text] = own
    legible = [own for own in values.values() if own]
    known = {key for own in legible for key in own}
    kinds = {key: {json.dumps(own[key], default=str) for own in legible if key in own} for key in known}
    partial = {key for own in legible for key in known - own.keys()}
    gone = partial - _knobs_today(alike[0].result["method"], known) if partial else set()

    def told(own: Mapping[str, Any]) -> dict[str, Any]:
        later = {key: "unset" for key in known - own.keys() - gone} if own else {}
        return {**later, **{key: value for key, value in own.items() if len(kinds[key]) > 1 or key in gone}}

    return [(runs, told(values[text])) for text, runs in parts.items()]


def _knobs_today(name: str, known: set[str]) -> set[str]:
    """Return the knobs that a method has now; of a user's own file, which may be elsewhere, all that are known."""
    return {knob.name for knob in fields(method(name).config())} if name in METHODS else known


def _row(alike: Sequence[Run], differs: Mapping[str, Any]) -> Row:
    runs = _one_per_seed(alike)
    results = [run.result for run in runs]
    first = results[0]
    settings = {**differs, **{key: value for key, value in runs[0].settings.items() if key != "protocol"}}
    return Row(
        method=first["method"],
        settings=settings,
        seeds=tuple(result["seed"] for result in results),
        final=_measured(results, "final"),
        average=_measured(results, "average"),
        forgetting=_measured(results, "forgetting"),
        bwt=_measured(results, "bwt"),
        memory_bytes=mean_and_sem([result["memory_bytes"] for result in results])[0],
        seconds=mean_and_sem([result["seconds"]["total"] for result in results])[0],
        folders=tuple(run.folder for run in runs),
        ran=tuple(ran_by(result) for result in results),
        paper=claim(first["benchmark"], first["method"]) if not _OTHER_EXPERIMENT & settings.keys() else None,
    )


def _one_per_seed(runs: Sequence[Run]) -> list[Run]:
    # A repeated seed is no further evidence: counted twice, it would shrink the standard error.
    kept: dict[int, Run] = {}
    for run in runs:
        other = kept.setdefault(run.result["seed"], run)
        if other.result["matrix"] != run.result["matrix"]:
            raise UserError(
                f"{other.folder} and {run.folder} are both {run.result['method']} on {run.result['benchmark']} "
                f"with seed {run.result['seed']}, but differ in their results; leave one of them out"
            )
    return [kept[seed] for seed in sorted(kept)]


def _measured(results: Sequence[Mapping[str, Any]], name: str) -> Measured:
    return Measured(*mean_and_sem([result[name] for result in results]))


def _place(row: Row) -> tuple[Any, ...]:
    """Sort the lower bound first, then what the paper lacks, its methods in its order, ours, and the upper bound."""
    return (_rank(row.method), row.method, [(name, _order(str(row.settings[name]))) for name in sorted(row.settings)])


def _order(text: str) -> tuple[int, float, str]:
    """Sort numbers by their size, before all other text."""
    try:
        return (0, float(text), "")
    except ValueError:
        return (1, 0.0, text)


def _rank(method: str) -> int:
    if method in BOUNDS:
        return -2 if BOUNDS[method] == "lower" else 1000
    if method.startswith("hr-literal"):
        return 100 + _PAPER_ORDER.index(paper_name(method)) if paper_name(method) in _PAPER_ORDER else 199
    if method == "hr" or method.startswith("hr-"):
        return 200 + _PAPER_ORDER.index(method) if method in _PAPER_ORDER else 299
    return _PAPER_ORDER.index(method) if method in _PAPER_ORDER else -1


def _setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
