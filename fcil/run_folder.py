"""The folder of a run: whose it is, who may write it, and what stands in it at the beginning and at the end.

It holds config.toml, a copy of the method where it is the user's own, ledger.jsonl, checkpoint/, replay.png where
clients can show what they replay, further pictures where a server has some, releases.log where sums are private, and
at the end model.safetensors and result.json.
"""

import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from fcil.errors import UserError, quoted
from fcil.federation.loop import Line
from fcil.federation.privacy import spent
from fcil.files import sha256, whole, write_text
from fcil.machine import commit, peak
from fcil.method import Server, Setting
from fcil.parts import Parts
from fcil.plan import Plan, begun
from fcil.records import flatten, write_tensors
from fcil.results.ledger import read, result_of
from fcil.results.runs import FORMAT, read_result
from fcil.scenario.datasets import Dataset, load
from fcil.scenario.memory import NODES


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
    if wanted.source and is_fresh(folder):
        own = begun(folder).method
        if not own:
            raise UserError(f"{folder} holds other files and no run; choose a different --out")
        if Path(own).name == wanted.name:
            return False  # a file of one's own that failed at first may be mended, and begins there
    other = Plan.read(folder)
    if other.name == wanted.name and other.source != wanted.source:
        if Path(other.method) != Path(wanted.method):
            raise UserError(
                f"{folder} is a run of {other.method}, and {wanted.method} is another file of that name; "
                f"choose a different --out"
            )
        raise UserError(f"{wanted.name} has changed since {folder} was begun; choose a different --out, or remove it")
    if not other.same_as(wanted):
        what = other.other_than(wanted)
        raise UserError(f"{folder} holds another run{what}; choose a different --out, or remove it")
    if "result.json" not in names:
        return False
    again = other.images and not wanted.images  # what --resume only shows needs no images
    if again and os.path.exists(other.benchmark.dataset):
        check_images(other, load(other.benchmark.dataset, other.benchmark.image_size), folder)
    return bool(read_result(folder))


def is_fresh(folder: Path) -> bool:
    """Tell whether no round of a run was done in a folder yet, so that there is nothing to lose."""
    if any((folder / name).exists() for name in ("checkpoint", "result.json", "deploy.json")):
        return False
    ledger = folder / "ledger.jsonl"
    return not ledger.exists() or len(read(ledger)) <= 1


def check_source(wanted: Plan, folder: Path) -> None:
    """Refuse to go on with a method of the user's own that is another one by now."""
    if wanted.source and wanted.source != sha256(Path(wanted.code)):
        raise UserError(f"{wanted.copy or wanted.name} has changed since {folder} was begun; put it back as it was")


def check_copy(wanted: Plan, folder: Path) -> None:
    """Refuse to write over a file where the copy of a user's own method belongs, unless it is one."""
    copy = folder / wanted.name
    if wanted.source and copy.exists() and sha256(copy) not in (wanted.source, begun(folder).source):
        raise UserError(f"{copy} is no copy of {wanted.method}, which belongs there; move it away and begin again")


def keep_source(wanted: Plan, folder: Path) -> None:
    """Copy a method of the user's own to its run, which then needs nothing else to go on."""
    copy = folder / wanted.name
    if wanted.source and not (copy.exists() and sha256(copy) == wanted.source):
        with whole(copy) as partial:
            shutil.copyfile(wanted.code, partial)
            if sha256(partial) != wanted.source:
                raise UserError(f"{wanted.name} has changed while {folder} was begun; begin it again")


def check_images(was: Plan, data: Dataset, folder: Path) -> None:
    """Refuse to go on with images of the user's own that are others by now; runs from before this know no digest."""
    if was.images and was.images != data.digest:
        raise UserError(
            f"the images in {was.benchmark.dataset} have changed since {folder} was begun; put them back as they "
            f"were, or begin a new run in another folder"
        )


def first_line(wanted: Plan, parts: Parts) -> Line:
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
        "method": wanted.name,
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
        has_begun = (folder / "config.toml").exists()
        then = f"what was saved is whole, go on with: {again} {quoted(folder)}" if has_begun else "nothing was begun"
        raise UserError(f"cannot write to {folder}: the disk is full; {then}") from error
