"""The command line: arguments and printing, nothing else. What is heavy is imported when a command needs it."""

import shlex
import sys
from collections import deque
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcil import __version__, cli_deploy, cli_known, cli_results
from fcil.cli_results import Device
from fcil.errors import NO_ROOM, UserError, empty_path, out_of_memory, quoted
from fcil.methods import DEFAULT
from fcil.scenario import benchmarks as known
from fcil.terminal import (
    Commands,
    RunCommand,
    complain,
    console,
    count,
    errors,
    from_own_code,
    option,
    plain_errors,
    refused,
    seeds_of,
    settings_of,
    show_notes,
    show_plan,
    show_result,
    show_trace,
    typed,
)

if TYPE_CHECKING:
    from fcil.plan import Plan

app = typer.Typer(
    name="fcil", help="Federated class-incremental learning: ever more classes, without sharing images.",
    cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change a knob of the method, protocol or benchmark; repeat it."),
]
LISTS = ("class_order", "dp_clip")  # settings whose value may have commas of its own: no axis of a sweep
HOW = ("resume", "device", "workers", "eager", "tensorboard")  # how a run is done, not what it is
NOT_FOR_NODES = ("benchmark", "data", "clients", "workers", "eager", "tensorboard")
WORKERS = "Clients that compute at a time, at most those of a round: processes on a CPU, streams on a GPU; 0 chooses."
Workers = Annotated[int, typer.Option(help=WORKERS, min=0)]


@app.command(cls=RunCommand, short_help="Run a method; the same command again goes on.")
def run(
    ctx: typer.Context,
    method: Annotated[str, typer.Argument(help="A name from `fcil methods`, or your own .py file.")] = DEFAULT,
    benchmark: Annotated[str, typer.Option(help="A name from `fcil benchmarks`, or your own .toml file.")] = "digits",
    data: Annotated[str, typer.Option(help="Your own images: a folder of class folders, or parquet files.")] = "",
    tasks: Annotated[
        int | None, typer.Option(help="Number of tasks; with --data, what the classes are split into [5]")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients; with --data [10]")] = None,
    active: Annotated[int | None, typer.Option(help="Clients that train in a round; with --data [5]")] = None,
    protocol: Annotated[str, typer.Option(help="brief, quick, short or paper; the benchmark's own if not given.")] = "",
    seed: Annotated[int, typer.Option(help="Seed of partition, client sampling and training.")] = 0,
    set_: Settings = [],  # noqa: B006 - typer copies it
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/BENCHMARK/METHOD/SEED]")] = None,
    device: Device = "auto",
    workers: Workers = 0,
    eager: Annotated[
        bool, typer.Option("--eager", help="On a GPU: train in a plain loop, one client at a time, as a check. Slow.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder; all else is read from there.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Also write curves for TensorBoard to this folder.")] = None,
    nodes: Annotated[
        list[Path],
        typer.Option(metavar="DIR DIR...", help="Nodes' folders of class folders, as `fcil serve` has them."),
    ] = [],  # noqa: B006 - typer copies it
    capacity: cli_deploy.Capacity = 128,
) -> None:
    """Run METHOD, a name from `fcil methods` or your own .py file; the same command again goes on where it stopped."""
    from fcil.plan import Plan, own_data, plan
    from fcil.report.paper_runs import advice

    said, settings = typed(ctx), settings_of(set_)
    if twice := [name for name in ("tasks", "clients", "active") if name in said and name in settings]:
        raise UserError(f"--{twice[0]} and --set {twice[0]}=... say the same; give one of them")
    if resume is not None:
        if others := [option(name) for name in said if name not in HOW]:
            raise UserError(f"--resume reads all else from {resume}; leave out {', '.join(others)}")
        wanted, folder = Plan.read(resume), resume
        if (resume / "deploy.json").exists():
            nodes, capacity = cli_deploy.simulated(resume)
    elif nodes:
        if others := [option(name) for name in said if name in NOT_FOR_NODES]:
            raise UserError(f"--nodes are asked one by one for their own images; leave out {', '.join(others)}")
        from fcil.deploy.local import on_nodes
        from fcil.deploy.plans import deployed

        given = {key: n for key, n in (("tasks", tasks), ("active", active)) if n is not None}
        wanted = on_nodes(deployed(method, protocol or None, seed, {**given, **settings}, capacity, _command()), nodes)
        folder = out or wanted.folder()
    else:
        if "capacity" in said:
            raise UserError("--capacity belongs to --nodes; a benchmark knows its classes")
        if "data" in said and not data:
            raise empty_path("--data")
        if data and "benchmark" in said:
            raise UserError("--data and --benchmark exclude each other; give one of them")
        given = {key: n for key, n in (("tasks", tasks), ("clients", clients), ("active", active)) if n is not None}
        chosen = own_data(data, **given) if data else known.benchmark(benchmark)
        wanted = plan(method, chosen, protocol or None, seed, {**given, **settings}, _command())
        folder = out or wanted.folder()
        if "lr" not in settings and not (folder / "result.json").exists() and (hint := advice(wanted)):
            complain(hint)
    if nodes:
        cli_deploy.simulate(wanted, folder, nodes, capacity, device)
    else:
        _execute(wanted, folder, device, workers, eager, tensorboard)
    show_result(folder)


app.command()(cli_known.methods)
app.command()(cli_known.benchmarks)


@app.command(short_help="Run all combinations that are missing.")
def sweep(
    ctx: typer.Context,
    methods: Annotated[str, typer.Option(help="Method names, separated by commas.")] = DEFAULT,
    benchmarks: Annotated[str, typer.Option(help="Benchmark names, separated by commas.")] = "digits",
    seeds: Annotated[str, typer.Option(help="Seeds, such as 0-9 or 0,3,5-7.")] = "0-2",
    paper: Annotated[
        str, typer.Option(help="The runs of the paper's table2, table3 or memory sweep; --benchmarks takes some of it.")
    ] = "",
    protocol: Annotated[str, typer.Option(help="brief, quick, short or paper; the benchmark's own if not given.")] = "",
    set_: Settings = [],  # noqa: B006 - typer copies it
    out: Annotated[Path, typer.Option(help="Folder that the run folders lie in.")] = Path("runs"),
    device: Device = "auto",
    workers: Workers = 0,
) -> None:
    """Run all combinations that are missing; `--set memory=1,2,4` is an axis. It may be killed and started again."""
    from fcil.plan import plan
    from fcil.results.runs import find

    said = typed(ctx)
    axes = [[(k, v) for v in (text.split(",") if k not in LISTS else [text])] for k, text in settings_of(set_).items()]
    asked = [b.strip() for b in benchmarks.split(",")]
    if paper:
        from fcil.report.paper_runs import runs_of

        if "methods" in said:
            raise UserError("--paper names the methods itself; leave out --methods")
        wanted = runs_of(paper, asked if "benchmarks" in said else (), protocol)
        chosen_runs = [(run.benchmark, run.method, run.settings) for run in wanted]
    else:
        chosen_runs = [(b, m.strip(), {}) for b, m in product(asked, methods.split(","))]
    plans = [
        plan(m, b, protocol or None, seed, {**own, **dict(chosen)}, _command())
        for (b, m, own), chosen, seed in product(chosen_runs, product(*axes), seeds_of(seeds))
    ]
    plans = list({(p.folder(out), p.method, p.benchmark, p.protocol): p for p in plans}.values())  # each once
    done, missing, clashes = _sorted_out(plans, out)
    if len(clashes) == len(plans):
        raise UserError(
            f"none of {len(plans)} runs can begin, the first because {clashes[0]}" if clashes[1:] else clashes[0]
        )
    console.print(f"{count(len(plans), 'run')}, {len(done)} of them finished before")
    for sentence in clashes:
        complain(f"1 run left out: {sentence}")
    ready = _with_data(missing)
    failed = len(clashes) + (0 if paper else len(missing) - len(ready))
    for number, one in enumerate(ready, 1):
        console.print(f"run {number} of {len(ready)}: {one.folder(out)}", soft_wrap=True)
        try:
            _execute(one, one.folder(out), device, workers)
            done.add(one.folder(out))
        except BrokenPipeError:
            raise
        except (UserError, OSError) as error:
            failed += 1
            complain(refused(error) if isinstance(error, OSError) else str(error))
        except Exception as error:  # a bug in a method of one's own is no reason to keep the others from running
            failed += 1
            show_trace(error)
    if done:
        cli_results.print_comparison(
            find(p.folder(out) for p in plans if p.folder(out) in done), "" if axes else paper
        )  # with settings of one's own it is no table of the paper
    if failed or not done:
        raise UserError(
            f"{failed or len(plans)} of {len(plans)} runs did not finish; the same command tries them again"
        )


def _sorted_out(plans: "list[Plan]", out: Path) -> "tuple[set[Path], list[Plan], list[str]]":
    """Return the folders of finished runs, the plans of missing ones, and why folders refuse others."""
    from fcil.run_folder import finished

    done, missing, clashes = set(), [], []
    for one in plans:
        try:
            if finished(one.folder(out), one):
                done.add(one.folder(out))
            else:
                missing.append(one)
        except UserError as error:
            clashes.append(str(error))
    return done, missing, clashes


def _with_data(plans: "list[Plan]") -> "list[Plan]":
    """Return the plans whose dataset is here, and say of each dataset that is not how many runs wait for it."""
    from fcil.scenario.datasets import require

    ready = plans
    for dataset in dict.fromkeys(p.benchmark.dataset for p in plans):
        try:
            require(dataset)
        except UserError as error:
            waiting = sum(p.benchmark.dataset == dataset for p in plans)
            complain(f"{count(waiting, 'run')} left out: {error}")
            ready = [p for p in ready if p.benchmark.dataset != dataset]
    return ready


@app.command(short_help="Measure speed, as ratios in one run.")
def bench(
    part: Annotated[
        list[str], typer.Option(help="engine, flower, pfl, growth or page; repeat it. All of them if not given.")
    ] = [],  # noqa: B006 - typer copies it
    rounds: Annotated[int, typer.Option(help="Rounds of each kind that are measured.", min=3)] = 21,
    json: Annotated[Path | None, typer.Option(help="Also write all that was measured to this file.")] = None,
    device: Device = "auto",
) -> None:
    """Measure speed, as ratios in one run: the engine against a plain loop, Flower and pfl-research; how costs grow."""
    from json import dumps

    from fcil.bench import PARTS
    from fcil.bench import bench as measured
    from fcil.errors import unknown
    from fcil.files import write_text
    from fcil.machine import the_device
    from fcil.report.speed import tables

    for name in part:
        if name not in PARTS:
            raise unknown("part", name, PARTS)
    if json is not None and not json.absolute().parent.is_dir():
        raise UserError(f"there is no folder {json.absolute().parent} to write {json.name} to")
    found = []
    for one in measured(tuple(part) or PARTS, the_device(device), rounds):
        found.append(one)
        if errors.is_terminal:
            errors.print(f"measured: {one['part']} {one.get('method') or one.get('name') or one.get('what') or ''}")
    for shown in tables(found):
        console.print(shown, soft_wrap=isinstance(shown, str))
    if json is not None:
        write_text(json, dumps(found, indent=1) + "\n")
        console.print(f"written: {json}", soft_wrap=True)
    if missing := {one["says"] for one in found if one.get("needed")}:
        raise UserError("; ".join(missing))


@app.callback(invoke_without_command=True)
def version(
    ctx: typer.Context, show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Federated class-incremental learning: clients that come and go learn ever more classes together."""
    if show:
        console.print(f"fcil {__version__}")
    elif ctx.invoked_subcommand is None:
        console.print(ctx.get_help(), soft_wrap=True)
    if show or ctx.invoked_subcommand is None:
        raise typer.Exit


for later, words in (
    (cli_results.table, "Compare finished runs; the paper's claims beside ours."),
    (cli_results.report, "Write one page about finished runs, in one file."),
    (cli_results.figures, "Draw the page's charts and the paper's figures."),
    (cli_results.watch, "Show the page of a run while it goes on."),
    (cli_results.audit, "Measure what a finished run tells of its images."),
    (cli_results.predict, "Classify images with a finished run."),
    (cli_results.export, "Write the model of a finished run for use elsewhere."),
    (cli_deploy.serve, "Serve a federation of nodes."),
    (cli_deploy.join, "Be a node of a federation, until stopped."),
    (cli_deploy.certs, "Make a CA, a server certificate and node keys."),
    (cli_deploy.status, "Show the nodes of a deployment."),
):
    app.command(short_help=words)(later)


def main() -> None:
    """Run the command line; what a user can mend is said in one sentence, without a traceback."""
    try:
        with plain_errors():
            code = app(prog_name="fcil", standalone_mode=False)
    except Exception as error:
        error.__traceback__ = from_own_code(error.__traceback__)
        raise
    sys.exit(code)


def _execute(
    wanted: "Plan", folder: Path, device: str, workers: int, eager: bool = False, tensorboard: Path | None = None
) -> None:
    from fcil.experiment import execute
    from fcil.machine import the_device
    from fcil.report.progress import follow
    from fcil.report.tensorboard import mirrored
    from fcil.results.ledger import read
    from fcil.run_folder import finished

    the_device(device)
    if finished(folder, wanted):
        if tensorboard:
            deque(mirrored(iter(read(folder / "ledger.jsonl")[1:]), tensorboard), maxlen=0)
        console.print(f"{folder} is finished; this is what came out", soft_wrap=True)
        return show_notes(folder)

    def ready() -> None:
        show_plan(wanted)
        show_notes(folder)

    lines = execute(
        wanted, folder, device, workers=workers, eager=eager, ready=ready,
        told=lambda sentence: console.print(sentence, soft_wrap=True),
    )  # fmt: skip
    try:
        follow(mirrored(lines, tensorboard) if tensorboard else lines, wanted, console)
    except KeyboardInterrupt:
        if not (folder / "config.toml").exists():
            complain("stopped before the run had begun; the same command begins it")
            sys.exit(130)
        complain(f"stopped; the same command goes on, and so does: fcil run --resume {quoted(folder)}")
        sys.exit(130)
    except BrokenPipeError:
        complain(f"stopped, for nobody reads what it says; go on with: fcil run --resume {quoted(folder)}")
        raise
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise UserError(NO_ROOM) from None
    finally:
        lines.close()  # type: ignore[attr-defined]


def _command() -> str:
    return shlex.join(["fcil", *sys.argv[1:]])


if __name__ == "__main__":
    main()
