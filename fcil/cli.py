"""The command line: arguments and printing, nothing else. What is heavy is imported when a command needs it."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fcil import __version__
from fcil.errors import UserError
from fcil.knobs import Knob, knobs
from fcil.methods import DEFAULT, METHODS
from fcil.scenario import benchmarks as known

if TYPE_CHECKING:
    from fcil.plan import Plan

app = typer.Typer(
    name="fcil", help="Federated class-incremental learning: ever more classes, without sharing images.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
console = Console(highlight=False)

Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change a knob of the method, protocol or benchmark; repeat it."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Runs = Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.", metavar="RUNS...")]
Folder = Annotated[Path, typer.Argument(help="The folder of a finished run.", metavar="RUN")]


@app.command()
def run(
    method: Annotated[str, typer.Argument(help="A name from `fcil methods`, or your own .py file.")] = DEFAULT,
    benchmark: Annotated[str, typer.Option(help="A name from `fcil benchmarks`, or your own .toml file.")] = "digits",
    data: Annotated[str, typer.Option(help="Your own images: a folder of class folders, or parquet files.")] = "",
    tasks: Annotated[int, typer.Option(help="With --data: the classes are split into so many tasks.")] = 5,
    clients: Annotated[int, typer.Option(help="With --data: number of clients.")] = 10,
    active: Annotated[int, typer.Option(help="With --data: clients that train in a round.")] = 5,
    protocol: Annotated[str, typer.Option(help="quick, short or paper; the benchmark's own if not given.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of partition, client sampling and training.")] = 0,
    set_: Settings = [],  # noqa: B006 - typer copies it
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/BENCHMARK/METHOD/SEED]")] = None,
    device: Device = "auto",
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder; all else is read from there.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Also write curves for TensorBoard to this folder.")] = None,
) -> None:
    """Run a method on a benchmark. The same command again goes on where it stopped, or shows what came out."""
    from fcil.plan import Plan, own_data, plan

    if resume is not None:
        wanted, folder = Plan.read(resume), resume
    else:
        chosen = own_data(data, tasks, clients, active) if data else known.benchmark(benchmark)
        command = shlex.join(["fcil", *sys.argv[1:]])
        wanted = plan(method, chosen, protocol or None, seed, _settings(set_), command)
        folder = out or wanted.folder()
    _execute(wanted, folder, device, tensorboard)
    _show_result(folder)


@app.command()
def methods(name: Annotated[str, typer.Argument(help="Show every knob of this method.")] = "") -> None:
    """List the methods, or the knobs of one."""
    if not name:
        table = _table("method", "family", "what it does")
        for key, entry in METHODS.items():
            table.add_row(key, entry.family, entry.sentence)
        return console.print(table)
    from fcil.methods import method

    made = method(name)
    module = sys.modules[made.server.__module__]
    console.print((module.__doc__ or "").strip(), soft_wrap=True)
    _print_knobs(f"\nKnobs of {name}, changed by --set knob=value", knobs(made.config))  # type: ignore[arg-type]
    console.print("Every method also has the knobs of the protocol and the benchmark: fcil benchmarks NAME")


@app.command()
def benchmarks(
    name: Annotated[str, typer.Argument(help="Show this benchmark: a name, or your own .toml file.")] = "",
    show: Annotated[
        bool, typer.Option("--show", help="Deal the images: print and draw who holds how much of which class.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    set_: Settings = [],  # noqa: B006 - typer copies it
    out: Annotated[Path | None, typer.Option(help="With --show: the picture [default: NAME-shares.png]")] = None,
) -> None:
    """List the benchmarks, or show one."""
    if not name:
        table = _table("benchmark", "T/K/C/A", "what it is")
        for b in known.BENCHMARKS.values():
            table.add_row(b.name, f"{b.tasks}/{b.classes_per_task}/{b.clients}/{b.active}", known.ABOUT[b.name])
        console.print(table)
        return console.print("T tasks of K classes, C clients of which A train in a round; more: fcil benchmarks NAME")
    chosen = known.benchmark(name)
    if not show:
        _print_knobs(f"Benchmark {chosen.name}, changed by --set knob=value", knobs(type(chosen)), chosen)
        timing = known.protocol(chosen.protocol)
        return _print_knobs(f"\nProtocol {timing.name}, changed by --set knob=value", knobs(type(timing)), timing)
    from fcil.plan import plan
    from fcil.report.shares import describe, draw_shares, shares_table
    from fcil.scenario.scenario import Scenario

    scenario = Scenario(plan(DEFAULT, chosen, settings=_settings(set_), seed=seed).benchmark, seed)
    console.print(describe(scenario), soft_wrap=True)
    console.print(shares_table(scenario))
    picture = out or Path(f"{chosen.name}-shares.png")
    draw_shares(scenario, picture)
    console.print(f"drawn in {picture}", soft_wrap=True)


@app.command()
def sweep(
    methods: Annotated[str, typer.Option(help="Method names, separated by commas.")] = DEFAULT,
    benchmarks: Annotated[str, typer.Option(help="Benchmark names, separated by commas.")] = "digits",
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0-9 or 0,3,5-7.")] = "0-2",
    protocol: Annotated[str, typer.Option(help="quick, short or paper; the benchmark's own if not given.")] = "",
    set_: Settings = [],  # noqa: B006 - typer copies it
    out: Annotated[Path, typer.Option(help="Folder that the run folders lie in.")] = Path("runs"),
    device: Device = "auto",
) -> None:
    """Run all combinations that are missing; `--set memory=1,2,4` is an axis. It may be killed and started again."""
    from fcil.experiment import finished
    from fcil.plan import plan
    from fcil.report.tables import as_rich, compare
    from fcil.results.runs import find

    axes = [
        [(k, v) for v in (text.split(",") if k != "class_order" else [text])] for k, text in _settings(set_).items()
    ]
    plans = [
        plan(m, b, protocol or None, seed, dict(chosen), shlex.join(["fcil", *sys.argv[1:]]))
        for b, m, chosen, seed in product(benchmarks.split(","), methods.split(","), product(*axes), _seeds(seeds))
    ]
    missing = [p for p in plans if not finished(p.folder(out), p)]
    console.print(f"{len(plans)} runs, {len(plans) - len(missing)} of them finished before")
    failed = 0
    for number, wanted in enumerate(missing, 1):
        console.print(f"run {number} of {len(missing)}: {wanted.folder(out)}", soft_wrap=True)
        try:
            _execute(wanted, wanted.folder(out), device)
        except UserError as error:
            failed += 1
            Console(stderr=True, highlight=False).print(f"fcil: {error}", soft_wrap=True, markup=False)
    done = [p.folder(out) for p in plans if finished(p.folder(out), p)]
    if done:
        console.print(as_rich(compare(find(done)), console.width))
    if failed:
        raise UserError(f"{failed} of {len(plans)} runs did not finish; the same command tries them again")


@app.command()
def table(
    runs: Runs,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX with booktabs.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute every result from its ledger, and say what differs.")
    ] = False,
) -> None:
    """Compare finished runs: mean and standard error over seeds, the paper's claims beside ours."""
    from fcil.report.tables import as_csv, as_latex, as_markdown, as_rich, compare
    from fcil.results.ledger import verify as differences
    from fcil.results.runs import find

    found = find(runs)
    if verify:
        wrong = [sentence for run in found for sentence in differences(run.folder)]
        for sentence in wrong:
            console.print(sentence, soft_wrap=True)
        if wrong:
            raise UserError(f"{len(wrong)} differences between results and ledgers in {len(found)} runs")
        return console.print(f"{len(found)} runs verified: every result follows from its ledger")
    comparison = compare(found)
    for asked, render in ((markdown, as_markdown), (latex, as_latex), (csv, as_csv)):
        if asked:
            return print(render(comparison), end="")
    console.print(as_rich(comparison, console.width))


@app.command()
def predict(
    run: Folder,
    images: Annotated[list[Path], typer.Argument(help="Image files.", metavar="IMAGE...")],
    top: Annotated[int, typer.Option(help="How many classes to name per image.", min=1)] = 3,
) -> None:
    """Classify images with a finished run."""
    from fcil.model import predict as classify

    for path, named in zip(images, classify(run, images, top), strict=True):
        console.print(
            f"{path}: " + ", ".join(f"{name} ({share:.0%})" for name, share in named), soft_wrap=True, markup=False
        )


@app.command()
def export(
    run: Folder,
    onnx: Annotated[Path | None, typer.Option(help="Write an ONNX file, checked with onnxruntime.")] = None,
    safetensors: Annotated[Path | None, typer.Option(help="Write a safetensors file with the class names.")] = None,
) -> None:
    """Write the model of a finished run for use elsewhere."""
    from fcil.model import export_onnx, export_safetensors

    if onnx is None and safetensors is None:
        raise UserError("say where to: --onnx FILE, --safetensors FILE, or both")
    if safetensors is not None:
        export_safetensors(run, safetensors)
        console.print(f"written: {safetensors}", soft_wrap=True)
    if onnx is not None:
        gap = export_onnx(run, onnx)
        console.print(f"written: {onnx} (scores agree with PyTorch's to {gap:.1e})", soft_wrap=True)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Federated class-incremental learning: clients that come and go learn ever more classes together."""
    if show:
        console.print(f"fcil {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; what a user can mend is said in one sentence, without a traceback."""
    with _plain_errors():
        app()


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        Console(stderr=True, highlight=False).print(f"fcil: {error}", soft_wrap=True, markup=False)
        sys.exit(2)
    except BrokenPipeError:  # the reader of our output has gone, as in `fcil methods | head -1`
        sys.stderr.close()
        sys.exit(0)


def _execute(wanted: "Plan", folder: Path, device: str, tensorboard: Path | None = None) -> None:
    from fcil.experiment import execute, finished
    from fcil.plan import about
    from fcil.report.progress import follow
    from fcil.report.tensorboard import mirrored

    if finished(folder, wanted):
        return console.print(f"{folder} is finished; this is what came out", soft_wrap=True)
    b, p = wanted.benchmark, wanted.protocol
    length = f"{p.steps} steps" if p.steps else f"{p.epochs} epochs"
    console.print(
        f"{wanted.method} on {b.name}: {about(wanted.method)}\n"
        f"{b.tasks} tasks of {b.classes_per_task} classes; {b.clients} clients, {b.active} of them in each of "
        f"{p.rounds} rounds a task, {length} of {p.batch_size} images; "
        f"images dealt by {b.partition} (alpha {b.alpha:g}); seed {wanted.seed}",
        soft_wrap=True,
    )
    lines = execute(wanted, folder, device)
    try:
        follow(mirrored(lines, tensorboard) if tensorboard else lines, wanted, console)
    except KeyboardInterrupt:
        lines.close()  # type: ignore[attr-defined]
        console.print(f"stopped; go on with: fcil run --resume {folder}", soft_wrap=True)
        sys.exit(130)


def _show_result(folder: Path) -> None:
    from fcil.report.tables import accuracy_table
    from fcil.results.ledger import read
    from fcil.results.runs import read_result

    for warning in read(folder / "ledger.jsonl")[0].get("warnings", []):
        console.print(f"note: {warning}", soft_wrap=True)
    console.print(accuracy_table(read_result(folder), console.width))
    console.print(f"saved in {folder}; compare runs with: fcil table {folder.parent.parent}", soft_wrap=True)


def _settings(words: list[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key or not value:
            raise UserError(f"--set {word} is not allowed; --set takes KEY=VALUE, such as --set rounds=10")
        settings[key] = value
    return settings


def _seeds(text: str) -> list[int]:
    try:
        spans = [[int(n) for n in part.split("-", 1)] for part in text.split(",")]
        seeds = [seed for span in spans for seed in range(span[0], span[-1] + 1)]
        if not seeds:
            raise ValueError(text)
        return seeds
    except ValueError:
        raise UserError(
            f"--seeds {text} is not allowed; --seeds takes numbers and ranges, such as 0-9 or 0,3,5-7"
        ) from None


def _table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold", no_wrap=column in ("method", "benchmark", "knob"))
    return made


def _print_knobs(title: str, found: dict[str, Knob], values: Any = None) -> None:
    made = _table("knob", "value" if values else "default", "allowed", "meaning")
    for knob in found.values():
        value = getattr(values, knob.name) if values else knob.default
        made.add_row(knob.name, str(value), knob.allowed, knob.meaning)
    console.print(title)
    console.print(made)


if __name__ == "__main__":
    main()
