"""A run from beginning to end: builds what the plan names, drives the loop, writes the run folder.

The folder holds config.toml, ledger.jsonl, checkpoint/, replay.png where clients can show what they replay, further
pictures where a server has some, releases.log where sums are private, and at the end model.safetensors and result.json.
What is in it is never half-written, so a run killed at any moment goes on from its last checkpoint and ends as if
nothing had happened.
"""

import errno
import fcntl
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fcil.errors import UserError, quoted
from fcil.federation.adaptive import crew
from fcil.federation.calls import Call
from fcil.federation.clients import Cursor, Door
from fcil.federation.engine import Engine, seeded, threads
from fcil.federation.in_process import InProcess
from fcil.federation.loop import Line, learn
from fcil.federation.privacy import spent
from fcil.federation.store import Checkpoints, Saved
from fcil.files import append_line, set_aside, sha256, write_text
from fcil.machine import commit, keep_memory, peak, reset_peak
from fcil.method import Method, Pictures, Server, Setting
from fcil.methods import DEFAULT, family, method
from fcil.plan import Plan, plan, repeating
from fcil.records import flatten, unflatten, write_tensors
from fcil.results.gallery import Gallery, pictured, save_grid, shown
from fcil.results.ledger import Ledger, read, result_of
from fcil.results.runs import FORMAT, read_result
from fcil.scenario.datasets import Dataset, load
from fcil.scenario.memory import NODES, budget
from fcil.scenario.scenario import Scenario
from fcil.scenario.tasks import Task


def run(
    name: str = DEFAULT,
    benchmark: str = "digits",
    protocol: str | None = None,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    device: str = "auto",
    workers: int = 0,
    eager: bool = False,
) -> dict[str, Any]:
    """Run a method on a benchmark and return its result; an unfinished run of the same plan goes on."""
    made = plan(name, benchmark, protocol, seed, settings, command="fcil.run")
    folder = Path(out) if out is not None else made.folder()
    if not finished(folder, made):
        for _ in execute(made, folder, device, workers=workers, eager=eager):
            pass
    return read_result(folder)


def finished(folder: Path, wanted: Plan) -> bool:
    """Tell whether `folder` holds a finished run of this plan; refuse a folder that holds something else."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise UserError(f"{folder} is a file or lies below one; choose a different --out") from None
    except OSError as error:
        raise UserError(f"cannot read {folder}: {error.strerror}; choose a different --out") from None
    if all(name.endswith(".partial") or name == "lock" for name in names):
        return False
    if "config.toml" not in names:
        raise UserError(f"{folder} holds other files and no run; choose a different --out")
    if wanted.source and _is_fresh(folder):
        return False  # a file of one's own that failed at first may be mended, and begins there
    other = Plan.read(folder)
    if other.method == wanted.method and other.source != wanted.source:
        raise UserError(f"{wanted.name} has changed since {folder} was begun; choose a different --out, or remove it")
    if not other.same_as(wanted):
        what = other.other_than(wanted)
        raise UserError(f"{folder} holds another run{what}; choose a different --out, or remove it")
    if "result.json" not in names:
        return False
    again = other.images and not wanted.images  # what --resume only shows needs no images
    if again and os.path.exists(other.benchmark.dataset):
        _check_images(other, load(other.benchmark.dataset, other.benchmark.image_size), folder)
    return bool(read_result(folder))


def execute(
    wanted: Plan,
    folder: Path,
    device: str = "auto",
    every: float = 10.0,
    workers: int = 0,
    eager: bool = False,
    ready: Callable[[], None] = lambda: None,
    told: Callable[[str], None] = lambda sentence: None,
) -> Iterator[Line]:
    """Do a run, or what is left of it, in `folder`; yield the ledger's new lines as they are written.

    `workers` clients compute at a time (0 chooses); `eager` trains in a plain loop on a GPU, too. `ready` is called
    when nothing is left to refuse, before anything is trained; then `told`, if the run was begun before, with where it
    goes on.
    """
    with said_plainly(folder), locked(folder), threads(1):  # a server computes little; evaluation takes all cores
        reset_peak()
        _check_source(wanted, folder)
        parts = assemble(wanted, device, workers=workers, eager=eager)
        parts.door.journal = partial(append_line, folder / "releases.log")
        fresh = _is_fresh(folder)
        if (folder / "config.toml").exists() and not (fresh and wanted.source):
            _check_images(Plan.read(folder), parts.scenario.dataset, folder)
        else:
            write_text(folder / "config.toml", replace(wanted, images=parts.scenario.dataset.digest).to_toml())
        checkpoints = Checkpoints(folder / "checkpoint", every)
        try:
            counts, path = _restore(wanted, parts, checkpoints, folder), folder / "ledger.jsonl"
            where = f"goes on after {_place(parts.door.cursor)}" if counts else ""
            if fresh:
                path.unlink(missing_ok=True)
            elif not counts:  # no checkpoint is whole: the run starts over
                why = "no checkpoint can be read" if checkpoints.number else "there is no checkpoint"
                where = f"{why}: the run begins anew"
                if path.exists():
                    where += f", and what it had written is in {set_aside(path)}"
                Gallery.set_aside(folder)
            with Ledger.open(path, counts or None) as ledger:
                if ledger.offset == 0:
                    ledger.append(_first_line(wanted, parts))
                ready()
                if where:
                    told(where)
                for line in learn(parts.scenario, parts.server, parts.door, parts.engine):
                    ledger.append(line)
                    if line["kind"] == "task" and hasattr(parts.engine.client, "look"):
                        with parts.door.tally.timing("look"):
                            _look(parts, parts.scenario.tasks[line["task"]], Gallery(folder))
                    if line["kind"] == "task":
                        for name, pictures in getattr(parts.server, "pages", dict)().items():
                            save_grid(folder / f"{name}.png", pictures)
                    if line["kind"] == "task" or (line["kind"] == "round" and checkpoints.due()):
                        with parts.door.tally.timing("save"):
                            _save(parts, checkpoints, ledger)
                    yield line
                checkpoints.wait()
            names, how = parts.scenario.class_names, parts.transport.described()
            write_outcome(wanted, folder, parts.server, parts.setting, names, str(parts.engine.device), how)
        finally:
            parts.transport.close()
            checkpoints.join()  # nothing may be under way when the folder is let go


@dataclass
class Parts:
    """What a run is made of."""

    scenario: Scenario
    setting: Setting
    server: Server
    engine: Engine
    transport: InProcess
    door: Door
    method: Method


def assemble(
    wanted: Plan, device: str = "auto", scenario: Scenario | None = None, workers: int = 0, eager: bool = False
) -> Parts:
    """Build scenario, method, engine and door of a plan."""
    place = the_device(device)
    if place == "cpu":
        keep_memory()
    scenario = scenario or Scenario(wanted.benchmark, wanted.seed, device=place)
    setting = setting_of(wanted, scenario.capacity, scenario.shape, place)
    made = method(wanted.method)
    with seeded(wanted.seed, "initial weights"):
        server = made.server(wanted.config, setting)
        engine = Engine(made, wanted.config, setting, place, workers, eager)
    allowed = None if family(wanted.method) == "bound" else scenario.budget
    answering = (
        crew(workers, engine, scenario, method, wanted.method, wanted.config, wanted.source) if place == "cpu" else None
    )
    transport = InProcess(engine, scenario, made.memory, allowed, answering)
    return Parts(
        scenario, setting, server, engine, transport, Door(transport, scenario, wanted.protocol, wanted.seed), made
    )


def setting_of(wanted: Plan, capacity: int, shape: tuple[int, int, int], device: str = "cpu") -> Setting:
    """Return what both halves of a plan's method are told."""
    b = wanted.benchmark
    kept = budget(b, math.prod(shape))
    return Setting(capacity, shape, wanted.protocol, kept, b.network, b.augment, b.norm, device, wanted.seed)


def the_device(wanted: str) -> str:
    """Return the device to compute on; `auto` takes a GPU if there is one."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f"device={wanted} is not allowed; device takes auto, cpu, cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no usable CUDA device here; choose --device cpu or auto")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def restored(folder: Path, device: str = "auto") -> tuple[Plan, Parts]:
    """Return the plan of a finished run, and its parts as they were at its end: state, memories and all."""
    wanted = Plan.read(folder)
    if wanted.benchmark.dataset == NODES:
        raise UserError(f"{folder} is a deployment's: the images and memories are its nodes' own, and are not here")
    if not (folder / "result.json").exists():
        raise UserError(f"{folder} is not finished; finish it with: fcil run --resume {quoted(folder)}")
    _check_source(wanted, folder)
    parts = assemble(wanted, device, workers=1)
    _check_images(wanted, parts.scenario.dataset, folder)
    found = _restore(wanted, parts, Checkpoints(folder / "checkpoint"), folder)
    if not found or parts.door.cursor.task < len(parts.scenario.tasks):
        raise UserError(
            f"{folder} has no whole checkpoint of its end, where the clients' memories are; `fcil run` always leaves "
            f"one, so repeat the run with: {repeating(wanted, folder)}"
        )
    return wanted, parts


def _is_fresh(folder: Path) -> bool:
    """Tell whether no round of a run was done in a folder yet, so that there is nothing to lose."""
    if any((folder / name).exists() for name in ("checkpoint", "result.json", "deploy.json")):
        return False
    ledger = folder / "ledger.jsonl"
    return not ledger.exists() or len(read(ledger)) <= 1


def _check_source(wanted: Plan, folder: Path) -> None:
    """Refuse to go on with a method of the user's own that is another one by now."""
    if wanted.source and wanted.source != sha256(Path(wanted.method)):
        raise UserError(f"{wanted.name} has changed since {folder} was begun; put it back as it was")


def _check_images(begun: Plan, data: Dataset, folder: Path) -> None:
    """Refuse to go on with images of the user's own that are others by now; runs from before this know no digest."""
    if begun.images and begun.images != data.digest:
        raise UserError(
            f"the images in {begun.benchmark.dataset} have changed since {folder} was begun; put them back as they "
            f"were, or begin a new run in another folder"
        )


def _place(cursor: Cursor) -> str:
    """Say how far a run has come, such as "round 7 of task 2"."""
    if not cursor.rounds:
        return f"task {cursor.task}" if cursor.task else "its beginning"
    stage, done = list(cursor.rounds.items())[-1]
    return f"{'' if stage == 'train' else f'{stage} '}round {done} of task {cursor.task + 1}"


def _restore(wanted: Plan, parts: Parts, checkpoints: Checkpoints, folder: Path) -> int:
    """Put a run back to its last checkpoint and return how much of the ledger counts."""
    saved = checkpoints.latest()
    try:
        return 0 if saved is None else _put_back(parts, saved)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the checkpoint of {folder} is not one of {wanted.name} ({error!r}), perhaps of another version of it; "
            f"repeat the run in a different --out"
        ) from None


def _put_back(parts: Parts, saved: Saved) -> int:
    facts = dict(saved.facts["cursor"])
    facts["kept"] = {int(client): kept for client, kept in facts["kept"].items()}
    parts.door.cursor = Cursor(**facts)
    parts.server.state = unflatten(type(parts.server.state), saved.state)
    memory = type(parts.method.memory())
    for client, flat in saved.memories.items():
        on_device = {name: tensor.to(parts.engine.device) for name, tensor in flat.items()}
        parts.transport.memories[client] = unflatten(memory, on_device)
    return int(saved.facts["ledger"])


def _save(parts: Parts, checkpoints: Checkpoints, ledger: Ledger) -> None:
    transport = parts.transport

    def memories(everything: bool) -> dict[int, dict[str, torch.Tensor]]:
        chosen = list(transport.memories) if everything else sorted(transport.changed)
        transport.changed.clear()
        return {client: flatten(transport.memories[client]) for client in chosen}

    ledger.sync()
    checkpoints.save(
        {"cursor": asdict(parts.door.cursor), "ledger": ledger.offset}, flatten(parts.server.state), memories
    )


def _look(parts: Parts, task: Task, gallery: Gallery) -> None:
    """Show what the clients replay: of each class one exemplar, from its real image on, and what is made up for it."""
    if not pictured(task.index, len(parts.scenario.tasks)):
        return
    message = parts.engine.receive(parts.server.broadcast())
    call = Call(parts.door.seed, task.index, parts.door.cursor.step, 0, 1)

    def seen(client: int, classes: tuple[int, ...]) -> Pictures:
        memory = parts.transport.memories.get(client) or parts.method.memory()
        return parts.engine.look(client, memory, parts.scenario.local(client, task), message, call, classes)

    present, held = parts.scenario.present(task), parts.scenario.share(task)
    rebuilt: Mapping[int, torch.Tensor] = getattr(parts.server, "look", dict)()
    for j in shown(task.new, len(parts.scenario.tasks)):
        holders = [c for c in present if held[c, j]]
        keepers = (c for c in holders if parts.door.cursor.kept.get(c) and j in seen(c, (j,)).kept)
        if holders:
            gallery.owners[j] = next(keepers, holders[0])
    for j, client in ((j, client) for j, client in gallery.owners.items() if client in present):
        found = seen(client, (j,))
        made = {j: rebuilt[j]} if j in rebuilt else found.made
        gallery.add(task.index, found.real if j in task.new else {}, found.kept, made)
    if gallery.pictures:
        gallery.save(parts.scenario.class_names, len(parts.scenario.tasks))


def _first_line(wanted: Plan, parts: Parts) -> Line:
    return {
        "kind": "run", "format": FORMAT, "method": wanted.method, "benchmark": wanted.benchmark.name,
        "protocol": wanted.protocol.name, "seed": wanted.seed, "settings": wanted.settings, "command": wanted.command,
        "device": str(parts.engine.device), "partition": wanted.benchmark.partition, "commit": commit(),
        "memory_budget": parts.scenario.budget.per_client, "classes": parts.scenario.class_names,
        "warnings": parts.scenario.warnings,
    }  # fmt: skip


def write_outcome(
    wanted: Plan, folder: Path, server: Server, setting: Setting, classes: list[str], device: str, engine: str,
    result: bool = True,
) -> None:  # fmt: skip
    """Write what a run leaves behind: the model, and the result last, if it is over."""
    facts = {
        "classes": json.dumps(classes),
        "shape": json.dumps(setting.shape),
        "capacity": json.dumps(setting.capacity),
        "method": wanted.method,
    }
    write_tensors(folder / "model.safetensors", flatten(server.broadcast()), facts)
    if not result:
        return
    found = result_of(read(folder / "ledger.jsonl"))
    if wanted.protocol.dp != "off":
        journal = folder / "releases.log"  # unlike the ledger, it also has what a crash took back
        released = Counter(journal.read_text().split()) if journal.exists() else {}
        found["privacy"] = spent(wanted.protocol, released)
    outcome = {
        "format": FORMAT,
        "method": wanted.method,
        "benchmark": wanted.benchmark.name,
        "protocol": wanted.protocol.name,
        "seed": wanted.seed,
        "settings": wanted.settings,
        "classes": classes,
        **found,
        "memory_budget": setting.budget.per_client,
        "peak_memory_bytes": peak(torch.device(device)),
        "device": device,
        "engine": engine,
        "partition": NODES if wanted.benchmark.dataset == NODES else wanted.benchmark.partition,
        "commit": commit(),
        "command": wanted.command,
        "ledger_sha256": sha256(folder / "ledger.jsonl"),
    }
    write_text(folder / "result.json", json.dumps(outcome, indent=1) + "\n")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make sure that no other process writes this run; a run that could not even begin leaves no folder behind."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "lock"
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder} is being written by another process; wait for it, or choose a different --out"
            ) from None
        try:
            yield
        finally:
            if made and [path.name for path in folder.iterdir()] == ["lock"]:
                lock.unlink()
                with suppress(OSError):  # another run may have begun beside it
                    for place in made:
                        place.rmdir()


@contextmanager
def said_plainly(folder: Path, again: str = "fcil run --resume") -> Iterator[None]:
    """Turn what the operating system refuses into a sentence."""
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads what is said: no fault of the folder
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or any(
            text in str(error) for text in ("No space left", "File too large", "quota")
        )
        if not full:
            where = error.filename or folder
            raise UserError(f"cannot write {where}: {error.strerror or error}; choose a different --out") from error
        begun = (folder / "config.toml").exists()
        then = f"what was saved is whole, go on with: {again} {quoted(folder)}" if begun else "nothing was begun"
        raise UserError(f"cannot write to {folder}: the disk is full; {then}") from error
