"""A run from beginning to end: drives the loop over what the plan names, and writes the run folder as it goes.

What is in the folder (run_folder.py) is never half-written, so a run killed at any moment goes on from its last
checkpoint and ends as if nothing had happened.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fcil.errors import UserError, quoted
from fcil.federation.calls import Call
from fcil.federation.clients import Cursor
from fcil.federation.engine import threads
from fcil.federation.loop import Line, learn
from fcil.federation.store import Checkpoints, Saved
from fcil.files import append_line, set_aside, sha256, write_text
from fcil.machine import reset_peak
from fcil.method import Pictures
from fcil.methods import DEFAULT
from fcil.parts import Parts, assemble
from fcil.plan import Plan, begun, mended, plan, repeating
from fcil.records import flatten, unflatten
from fcil.results.gallery import Gallery, pictured, save_grid, shown
from fcil.results.ledger import Ledger
from fcil.results.runs import read_result
from fcil.run_folder import (
    check_copy,
    check_images,
    check_source,
    finished,
    first_line,
    is_fresh,
    keep_source,
    locked,
    said_plainly,
    write_outcome,
)
from fcil.scenario.memory import NODES
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
    when nothing is left to refuse, before anything is trained; then `told`, if the run was begun before, with where and
    with what it goes on.
    """
    with said_plainly(folder), locked(folder), threads(1):  # a server computes little; evaluation takes all cores
        reset_peak()
        fresh = is_fresh(folder)
        changed = bool(wanted.source) and Path(wanted.method).is_file() and sha256(Path(wanted.method)) != wanted.source
        if changed and fresh and begun(folder).source == wanted.source:
            wanted = mended(wanted)
        check_source(wanted, folder)
        check_copy(wanted, folder)
        parts = assemble(wanted, device, workers=workers, eager=eager)
        check_source(wanted, folder)  # somebody may have edited it while the images were loaded
        parts.door.journal = partial(append_line, folder / "releases.log")
        if (folder / "config.toml").exists() and not (fresh and wanted.source):
            check_images(Plan.read(folder), parts.scenario.dataset, folder)
        else:
            write_text(folder / "config.toml", replace(wanted, images=parts.scenario.dataset.digest).to_toml())
        keep_source(wanted, folder)
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
                    ledger.append(first_line(wanted, parts))
                ready()
                if where:
                    told(where)
                if wanted.copy and changed:
                    told(f"goes on with the copy in {folder}: {wanted.method} has changed")
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


def restored(folder: Path, device: str = "auto") -> tuple[Plan, Parts]:
    """Return the plan of a finished run, and its parts as they were at its end: state, memories and all."""
    wanted = Plan.read(folder)
    if wanted.benchmark.dataset == NODES:
        raise UserError(f"{folder} is a deployment's: the images and memories are its nodes' own, and are not here")
    if not (folder / "result.json").exists():
        raise UserError(f"{folder} is not finished; finish it with: fcil run --resume {quoted(folder)}")
    check_source(wanted, folder)
    parts = assemble(wanted, device, workers=1)
    check_images(wanted, parts.scenario.dataset, folder)
    found = _restore(wanted, parts, Checkpoints(folder / "checkpoint"), folder)
    if not found or parts.door.cursor.task < len(parts.scenario.tasks):
        raise UserError(
            f"{folder} has no whole checkpoint of its end, where the clients' memories are; `fcil run` always leaves "
            f"one, so repeat the run with: {repeating(wanted, folder)}"
        )
    return wanted, parts


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
