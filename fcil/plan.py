"""A plan: everything needed to repeat a run, as names and numbers, and as `config.toml`."""

import hashlib
import json
import operator
import platform
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fcil import __version__
from fcil.errors import UserError, unknown
from fcil.files import sha256
from fcil.knobs import changed, knobs
from fcil.methods import DEFAULT, METHODS, method
from fcil.results.runs import FORMAT
from fcil.scenario import benchmarks
from fcil.scenario.benchmarks import Benchmark, Protocol

if TYPE_CHECKING:
    from fcil.method import Method

FIXED = {Protocol: {"name"}, Benchmark: {"name", "protocol"}}  # what is chosen by name, and no knob
LONGEST = 160  # bytes of a folder's name, which systems limit
MOST_TOLD = 4  # settings that are named where a run is another one


@dataclass(frozen=True)
class Plan:
    """One run: a method on a benchmark under a protocol, with a seed."""

    method: str
    benchmark: Benchmark
    protocol: Protocol
    config: Any
    seed: int = 0
    settings: dict[str, str] = field(default_factory=dict)  # what was set beyond the defaults
    command: str = ""
    source: str = ""  # digest of the user's own method file
    nodes: tuple[str, ...] = ()  # folders of simulated nodes, by name, which gives them their numbers
    images: str = ""  # digest of the user's own images, as a run that has begun has loaded them
    copy: str = ""  # of the user's own method file, where that is not what it was any more

    def folder(self, root: Path = Path("runs")) -> Path:
        """Return where such a run belongs: BENCHMARK/METHOD/SEED, with what was set beside the method's name."""
        label = ",".join([self.name.removesuffix(".py"), *(f"{k}={v}" for k, v in sorted(self.settings.items()))])
        if len(label.encode()) > LONGEST:
            digest = hashlib.blake2b(label.encode(), digest_size=4).hexdigest()
            label = f"{label.encode()[:LONGEST].decode(errors='ignore')}~{digest}"
        return root / self.benchmark.name.replace("/", "_") / label.replace("/", "_") / str(self.seed)

    @property
    def name(self) -> str:
        """Return what the method is called: its name, or that of its file."""
        return Path(self.method).name if self.method.endswith(".py") else self.method

    @property
    def code(self) -> str:
        """Return what the method is loaded from: its name, or its file."""
        return self.copy or self.method

    def same_as(self, other: "Plan") -> bool:
        """Tell whether two plans describe the same run, however it was typed."""
        typed = {"method", "command", "settings", "images", "copy"}  # a user's own Config is new whenever it is read
        mine, theirs = ({k: v for k, v in asdict(p).items() if k not in typed} for p in (self, other))
        return self.name == other.name and mine == theirs

    def other_than(self, wanted: "Plan") -> str:
        """Say, behind the words "another run", what is other in this plan than in the one that is wanted."""
        if self.name != wanted.name:
            return f" ({self.command})"
        if self.nodes != wanted.nodes:
            names = [Path(node).name for node in self.nodes]
            alike = names == [Path(node).name for node in wanted.nodes]  # in other places
            return f" (nodes {', '.join(self.nodes if alike else names)})" if names else f" ({self.command})"
        mine, theirs = (_flat(plan) for plan in (self, wanted))
        moved = [f"{k} was {_text(v)}, now {_text(theirs[k])}" for k, v in mine.items() if v != theirs.get(k, v)]
        more = [f"and {len(moved) - MOST_TOLD} more"] if len(moved) > MOST_TOLD else []
        return f": {'; '.join([*moved[:MOST_TOLD], *more])}" if moved else f" ({self.command})"

    def to_toml(self) -> str:
        """Write the plan down."""
        import torch

        top = {
            "format": FORMAT,
            "method": self.method,
            "seed": self.seed,
            "command": self.command,
            "source": self.source,
            **({"nodes": list(self.nodes)} if self.nodes else {}),
            **({"images": self.images} if self.images else {}),
        }
        versions = {"fcil": __version__, "torch": torch.__version__, "python": platform.python_version()}
        tables = {
            "settings": self.settings,
            "benchmark": asdict(self.benchmark),
            "protocol": asdict(self.protocol),
            "config": asdict(self.config),
            "versions": versions,
        }
        parts = [_lines(top), *(f"[{name}]\n{_lines(table)}" for name, table in tables.items())]
        return "\n".join(parts)

    @staticmethod
    def read(folder: Path) -> "Plan":
        """Read the plan of a run folder."""
        path = folder / "config.toml"
        try:
            text = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            what = "is not a run folder: it has no config.toml" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {what}; a run folder is what `fcil run` leaves") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is damaged ({error}); start the run again in another folder") from None
        found = Plan.parse(text, path)
        return found if found.nodes else replace(found, nodes=_nodes_beside(path))

    @staticmethod
    def parse(text: str, path: Path, advice: str = "start the run again in another folder (--out)") -> "Plan":
        """Read a plan that `to_toml` wrote; `path` is where it was found, and `advice` helps where it does not fit."""
        try:
            content = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{path} is damaged ({error}); start the run again in another folder") from None
        if content.get("format") != FORMAT:
            raise UserError(
                f"{path.parent} is of format {content.get('format')}; this version of fcil ({__version__}) reads "
                f"format {FORMAT} only"
            )
        own, source = str(content.get("method", "")), str(content.get("source", ""))
        copy = _copy_of(Path(own), source, path.parent) if own.endswith(".py") else ""
        try:
            return Plan(
                content["method"],
                changed(Benchmark(), content["benchmark"]),
                changed(Protocol(), content["protocol"]),
                changed(method(copy or own).config(), content["config"]),
                int(content["seed"]),
                dict(content["settings"]),
                str(content["command"]),
                source,
                tuple(map(str, content.get("nodes", ()))),
                str(content.get("images", "")),
                copy,
            )
        except UserError as error:
            raise UserError(f"{path}: {error}; if fcil has changed since, {advice}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{path} is damaged ({type(error).__name__}: {error}); start the run again in another folder"
            ) from None


def plan(
    name: str = DEFAULT,
    benchmark: str | Benchmark = "digits",
    protocol: str | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    command: str = "",
) -> Plan:
    """Put a run together from names; `settings` may change any knob of the method, the protocol or the benchmark."""
    try:
        whole = operator.index(seed)
    except TypeError:
        whole = -1
    if whole < 0:
        raise UserError(f"seed={seed} is not allowed; seed takes whole numbers at least 0")
    known = benchmarks.benchmark(benchmark) if isinstance(benchmark, str) else benchmark
    chosen = benchmarks.protocol(protocol or known.protocol)
    config = method(name).config()
    words = {key: _text(value) for key, value in (settings or {}).items()}
    if "protocol" in words:
        raise UserError(f"the protocol is no setting; choose it with --protocol {'|'.join(benchmarks.PROTOCOLS)}")
    bases = (config, chosen, known)
    made = turned(bases, words, Path(name).name)
    if made[1].quorum > made[2].active:
        raise UserError(
            f"quorum={made[1].quorum} is not allowed with active={made[2].active}; quorum takes 0 to {made[2].active}"
        )
    _check_privacy(method(name), made[0], made[1])
    if known.name in benchmarks.BENCHMARKS:  # a knob turned to where it stood is no other run
        moved = {
            k for k in words if any(getattr(a, k, 0) != getattr(b, k, 0) for a, b in zip(bases, made, strict=True))
        }
        words = {k: w for k, w in words.items() if k in moved}
    shown = words if protocol in (None, known.protocol) else {"protocol": str(protocol), **words}
    source = ""
    if name.endswith(".py"):
        name, source = str(Path(name).resolve()), sha256(Path(name))
    return Plan(name, made[2], made[1], made[0], whole, shown, command, source)


class Begun(NamedTuple):
    """Of which method a folder holds a run, and the digest of its file if that is the user's own; or nothing."""

    method: str = ""
    source: str = ""


def begun(folder: Path) -> Begun:
    """Look up what was begun in a folder, without loading anything of the user's own."""
    try:
        content = tomllib.loads((folder / "config.toml").read_text())
    except (OSError, ValueError):
        return Begun()
    known = content.get("format") == FORMAT
    return Begun(str(content.get("method", "")), str(content.get("source", ""))) if known else Begun()


def mended(wanted: Plan) -> Plan:
    """Return the plan with the user's own file as it is now, in place of the one that it was made from."""
    own = Path(wanted.method)
    words = {key: word for key, word in wanted.settings.items() if key != "protocol"}
    made = turned((method(wanted.method).config(), wanted.protocol, wanted.benchmark), words, own.name)
    return replace(wanted, config=made[0], source=sha256(own), copy="")


def settable(kind: type) -> set[str]:
    """Return the knobs of a config, a protocol or a benchmark."""
    return knobs(kind).keys() - FIXED.get(kind, set())


def turned(bases: Sequence[Any], words: Mapping[str, str], whose: str) -> list[Any]:
    """Turn the knobs of a config, a protocol and a benchmark, or some of them; each is the first's that has it."""
    homes = [settable(type(base)) for base in bases]
    values: list[dict[str, str]] = [{} for _ in bases]
    for key, word in words.items():
        owners = [number for number, known in enumerate(homes) if key in known]
        if not owners:
            raise UserError(f"{whose}: {unknown('setting', key, sorted(set().union(*homes)))}")
        values[owners[0]][key] = word
    return [changed(base, own) for base, own in zip(bases, values, strict=True)]


def own_data(path: str, tasks: int | None = None, clients: int = 10, active: int | None = None) -> Benchmark:
    """Return a benchmark over the user's own images: all classes, split evenly over the tasks, five if not said."""
    from fcil.scenario.datasets import load

    where = Path(path).expanduser().absolute()
    classes = len(load(str(where)).class_names)
    if tasks is not None and not 1 <= tasks <= classes:
        raise UserError(f"{path} has {classes} classes; tasks={tasks} is not allowed, tasks takes 1 to {classes}")
    tasks, active = tasks or min(5, classes), min(5, max(1, clients)) if active is None else active
    return changed(
        Benchmark(name=where.resolve().stem, dataset=str(where.resolve()), protocol="quick", network="small"),
        {"tasks": tasks, "classes_per_task": classes // tasks, "clients": clients, "active": active},
    )


def repeating(wanted: Plan, folder: Path) -> str:
    """Return a command that repeats the run of `folder` in one called `again`, whoever reads it and wherever.

    The run's own command may be a sweep, or write to where only its author can; and defaults may have changed since.
    """
    b, p = wanted.benchmark, wanted.protocol
    if b.name in benchmarks.BENCHMARKS and p.name in benchmarks.PROTOCOLS:
        known = benchmarks.benchmark(b.name)
        pairs = ((known, b), (benchmarks.protocol(p.name), p), (method(wanted.code).config(), wanted.config))
        moved = {k: _text(v) for base, own in pairs for k, v in asdict(own).items() if v != getattr(base, k)}
        if all(moved.values()) and _is(wanted, known, moved):
            protocol = ["--protocol", p.name] if p.name != known.protocol else []
            settings = [word for k, v in moved.items() for word in ("--set", f"{k}={v}")]
            names = [wanted.code, "--benchmark", b.name, *protocol, "--seed", str(wanted.seed)]
            return shlex.join(["fcil", "run", *names, *settings, "--out", "again"])
    files = [folder / name for name in ("config.toml", "deploy.json") if (folder / name).exists()]
    command = "serve" if len(files) == 2 and '"nodes": []' in files[1].read_text() else "run"  # nobody is simulated
    return f"mkdir again && cp {shlex.join(map(str, files))} again && fcil {command} --resume again"


def _is(wanted: Plan, known: Benchmark, moved: Mapping[str, str]) -> bool:
    """Tell whether these settings make the same plan today."""
    try:
        return plan(wanted.code, known, wanted.protocol.name, wanted.seed, moved).same_as(wanted)
    except UserError:  # as where an extra is missing that the run had
        return False


def _check_privacy(of: "Method", config: Any, protocol: Protocol) -> None:
    """Refuse at once what a server would be refused in the middle of a run."""
    if protocol.dp == "off":
        return
    from fcil.federation import privacy
    from fcil.method import answers, reply_type

    privacy.ready(protocol)
    single = getattr(of.server, "one_by_one", lambda config: ())(config)
    privacy.fits(protocol, map(reply_type, answers(of.client)), map(reply_type, single))


def about(name: str) -> str:
    """Return the sentence that says what a method is."""
    return METHODS[name].sentence if name in METHODS else "a method of your own"


def _copy_of(own: Path, source: str, folder: Path) -> str:
    """Return the copy of a user's own method that its run has, where the file itself is not what it was any more."""
    if own.is_file() and sha256(own) == source:
        return ""
    if (copy := folder / own.name).is_file():
        return str(copy.resolve())
    if not own.exists():
        raise UserError(f"{folder} is a run of {own}, which is not there; put it back as it was")
    return ""


def in_order(nodes: Iterable[Path]) -> tuple[str, ...]:
    """Return the nodes of a simulation as a plan has them: a node has its number by its name, however it was typed."""
    return tuple(map(str, sorted(nodes, key=lambda node: (node.name, node))))


def _nodes_beside(config: Path) -> tuple[str, ...]:
    """Return the nodes of a simulation whose config.toml is of a time when only deploy.json had them."""
    try:
        return in_order(map(Path, json.loads((config.parent / "deploy.json").read_text())["nodes"]))
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _flat(plan: Plan) -> dict[str, Any]:
    """Return all that decides a run, by name."""
    own = {"seed": plan.seed, **asdict(plan.config)}
    b, p = asdict(plan.benchmark), asdict(plan.protocol)
    return {**b, **p, **own, "name": "", "benchmark": b["name"], "protocol": p["name"]}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lines(table: Mapping[str, Any]) -> str:
    # the strings of JSON, its numbers and its true and false are those of TOML
    bare = {k: k if k.isascii() and k.isidentifier() else json.dumps(k) for k in table}
    return "".join(f"{bare[k]} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in table.items())
