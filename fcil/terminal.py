"""How the command line speaks: one sentence when something is wrong, and the tables that are its own."""

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer
import typer.core
import typer.main
from rich.console import Console
from rich.table import Table
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.models import TyperPath

from fcil.errors import NO_ROOM, UserError, empty_path, out_of_memory, quoted, unknown
from fcil.knobs import Knob
from fcil.methods import OWN
from fcil.scenario.benchmarks import is_knob

if TYPE_CHECKING:
    from fcil.plan import Plan

typer.core.HAS_RICH = False  # or else it escapes the brackets of its help for HTML, which shows as \[default: 3]
MOST_SEEDS = 10_000


class Screen(Console):
    """Where words go as they are; that its reader has gone is for the command to say, where rich would end it."""

    def __init__(self, **given: Any):
        super().__init__(highlight=False, markup=False, emoji=False, **given)

    def on_broken_pipe(self) -> None:
        """Print no more."""
        self.quiet = True
        raise BrokenPipeError


console = Screen()
not_cut = Screen(width=400)  # what goes into a file or a pipe
errors = Screen(stderr=True)


class Argument(TyperArgument):
    """An argument with its help, which click 8.5 wipes out where typer 0.20 has set it."""

    def __init__(self, *, help: str | None = None, **given: Any):
        super().__init__(help=help, **given)
        self.help = help


class Place(TyperPath):
    """A path, which is not empty: that would be the folder that one is in, or the same as none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Refuse what a shell's variable is that nobody has set."""
        if value == "":
            raise empty_path(
                param.opts[0] if param.param_type_name == "option" else param.make_metavar(ctx).strip("[].")
            )
        return super().convert(value, param, ctx)


typer.main.TyperArgument = Argument  # type: ignore[attr-defined]
typer.main.TyperPath = Place  # type: ignore[attr-defined]
for kind in (TyperCommand, TyperGroup):  # typer shows arguments, and so does click 8.5: once is enough
    kind.format_arguments = lambda self, ctx, formatter: None  # type: ignore[method-assign]


class Commands(TyperGroup):
    """The commands; a wrong name gets the nearest right one, as everywhere else."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that was typed."""
        if args and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


class RunCommand(TyperCommand):
    """`fcil run`, whose --nodes takes all folders that follow it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `--nodes A B` as `--nodes A --nodes B`."""
        words, within = [], 0
        for word, after in pairwise([*args, "-"]):
            if word == "--nodes" and after.startswith("-"):
                raise UserError("--nodes takes folders of class folders, one for each node: --nodes anna/ berta/")
            within = 1 if word == "--nodes" else 0 if word.startswith("-") else within and within + 1
            words += ["--nodes", word] if within > 2 else [word]
        return list(super().parse_args(ctx, words))


@contextmanager
def plain_errors() -> Iterator[None]:
    """Say what a user can mend in one sentence, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ± or ─ is no reason to stop
    try:
        yield
        sys.stdout.flush()
    except UserError as error:
        complain(str(error))
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output has gone, as in `fcil methods | head -1`
        _silence()
        sys.exit(1)
    except OSError as error:
        complain(refused(error))
        if error.filename is None:
            _silence()
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        complain(NO_ROOM)
        sys.exit(2)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what click raises at a wrong option, whichever click typer brings
            raise
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "fcil"
        said = _knob_as_option(error, context) or error.format_message().rstrip(".")
        complain(f"{said}. See: {path} --help".replace("?.", "?"))
        sys.exit(2)


def _knob_as_option(error: Any, context: Any) -> str:
    """Say how a knob is changed that was typed as an option of its own; nothing where an error is another one."""
    option = getattr(error, "option_name", "") if hasattr(error, "possibilities") else ""
    name = option.lstrip("-").replace("-", "_")
    if not is_knob(name) or context is None or all(param.name != "set_" for param in context.command.params):
        return ""
    words = " ".join(sys.argv[1:]).replace(f"{option}=", f"{option} ").split()
    after = words[words.index(option) + 1 :] if option in words else []
    value = after[0] if after and not after[0].startswith("--") else "VALUE"
    return f"there is no option {option}; {name} is a knob, changed by --set {name}={value}"


def refused(error: OSError) -> str:
    """Say what the operating system would not do."""
    return f"{error.filename or 'the output'}: {error.strerror or error}"


def show_trace(error: Exception) -> None:
    """Show on stderr where a run broke, from the user's own code on if it broke there."""
    error.__traceback__ = from_own_code(error.__traceback__)
    errors.print("".join(traceback.format_exception(error)), soft_wrap=True, end="")


def from_own_code(trace: TracebackType | None) -> TracebackType | None:
    """Leave out of a traceback what leads to a method's file of the user's own, if it leads there."""
    found, frame, inside = trace, trace, False
    while frame is not None:
        before, inside = inside, frame.tb_frame.f_globals.get("__name__", "").startswith(OWN)
        if inside and not before:
            found = frame
        frame = frame.tb_next
    return found


def complain(sentence: str) -> None:
    """Say on stderr, in one line, what is wrong."""
    errors.print(f"fcil: {' '.join(sentence.split())}", soft_wrap=True)


def _silence() -> None:
    # What is still in the buffer cannot be written; Python would complain about it when it ends.
    if sys.__stdout__ is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())


def settings_of(words: list[str]) -> dict[str, str]:
    """Read what was given with --set; of a key given twice the last counts."""
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise UserError(f"--set {word} is not allowed; --set takes KEY=VALUE, such as --set rounds=10")
        settings[key.strip()] = value.strip()
    return settings


def seeds_of(text: str) -> list[int]:
    """Read what was given with --seeds, each seed once."""
    allowed = UserError(f"--seeds {text} is not allowed; --seeds takes numbers and ranges, such as 0-9 or 0,3,5-7")
    try:
        spans = [[int(n) for n in part.split("-", 1)] for part in text.split(",")]
    except ValueError:
        raise allowed from None
    if any(span[0] > span[-1] for span in spans):
        raise allowed
    if sum(span[-1] - span[0] + 1 for span in spans) > MOST_SEEDS:
        raise UserError(f"--seeds {text} is not allowed; --seeds takes at most {MOST_SEEDS:,} seeds")
    return list(dict.fromkeys(seed for span in spans for seed in range(span[0], span[-1] + 1)))


def plain_table(*columns: str) -> Table:
    """Return a table without lines, as for lists of names."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column in ("method", "benchmark", "knob"))
    return made


def print_knobs(title: str, found: dict[str, Knob], values: Any = None) -> None:
    """Show every knob with its value, what it takes and what it means."""
    made = plain_table("knob", "value" if values else "default", "allowed", "meaning")
    for knob in found.values():
        value = getattr(values, knob.name) if values else knob.default
        made.add_row(knob.name, str(value), knob.allowed, knob.meaning)
    console.print(title)
    console.print(made)


def show_plan(wanted: "Plan") -> None:
    """Say what a run is going to do."""
    from fcil.plan import about
    from fcil.report.shares import dealt

    b, p = wanted.benchmark, wanted.protocol
    length = count(p.steps, "step") if p.steps else count(p.epochs, "epoch")
    tasks = f"the first {b.stop_after} of {b.tasks} tasks" if b.stop_after else count(b.tasks, "task")
    console.print(
        f"{wanted.name} on {b.name}: {about(wanted.method)}\n"
        f"{tasks} of {count(b.classes_per_task, 'class', 'es')}; {count(b.clients, 'client')}, "
        f"{b.active} of them in each round; {count(p.rounds, 'round')} a task, {length} of {p.batch_size} images; "
        f"images dealt by {dealt(b)}; seed {wanted.seed}",
        soft_wrap=True,
    )


def count(n: int, thing: str, plural: str = "s") -> str:
    """Say how many there are of a thing."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}{plural}"


def show_notes(folder: Path) -> None:
    """Say what a run found odd: clients without images, images that could not be read."""
    from fcil.results.ledger import read

    try:
        first = read(folder / "ledger.jsonl")[:1]
    except UserError as error:
        return console.print(f"note: {error}", soft_wrap=True)
    for warning in [sentence for line in first for sentence in line.get("warnings", [])]:
        console.print(f"note: {warning}", soft_wrap=True)


def show_result(folder: Path) -> None:
    """Show what came out of a finished run."""
    from fcil.report.outcome import accuracy_table, privacy, replay, spread, trust
    from fcil.results.runs import read_result

    result = read_result(folder)
    if ";" in (engine := result.get("engine", "")):
        console.print(f"note: trained {engine}", soft_wrap=True)
    console.print(accuracy_table(result, console.width))
    console.print(spread(result), soft_wrap=True)
    for said in (replay(result), trust(result), privacy(result)):
        if said:
            console.print(said, soft_wrap=True)
    if (folder / "replay.png").exists():
        console.print(f"what the clients replay: {folder / 'replay.png'}", soft_wrap=True)
    root = folder.parent.parent if folder.name == str(result["seed"]) else folder
    console.print(f"saved in {folder}; compare runs with: fcil table {quoted(root)}", soft_wrap=True)


def typed(ctx: typer.Context) -> list[str]:
    """Return the names of the options that were given."""
    return [name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]


def option(name: str) -> str:
    """Return what an option is called where it is typed."""
    return {"method": "METHOD", "set_": "--set"}.get(name, f"--{name}")
