"""The command line: arguments and printing, nothing else. What is heavy is imported when a command needs it."""

import shlex
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcil import __version__, cli_deploy
from fcil.errors import UserError
from fcil.knobs import knobs
from fcil.methods import DEFAULT, METHODS
from fcil.scenario import benchmarks as known
from fcil.terminal import (
    Commands,
    RunCommand,
    complain,
    console,
    count,
    errors,
    plain_errors,
    plain_table,
    print_knobs,
    seeds_of,
    settings_of,
    show_notes,
    show_plan,
    show_result,
)

if TYPE_CHECKING:
    from fcil.plan import Plan
    from fcil.results.runs import Run

app = typer.Typer(
    name="fcil", help="Federated class-incremental learning: ever more classes, without sharing images.",
    cls=Commands, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change a knob of the method, protocol or benchmark; repeat it."),
]
HOW = ("resume", "device", "workers", "eager", "tensorboard")  # how a run is done, not what it is
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Workers = Annotated[
    int, typer.Option(help="Clients that compute at a time: processes on a CPU, streams on a GPU; 0 chooses.", min=0)
]
Runs = Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.", metavar="RUNS...")]
Folder = Annotated[Path, typer.Argument(help="The folder of a finished run.", metavar="RUN")]


@app.command(cls=RunCommand)
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

    typed = _typed(ctx)
    if resume is not None:
        if others := [_option(name) for name in typed if name not in HOW]:
            raise UserError(f"--resume reads all else from {resume}; leave out {', '.join(others)}")
        wanted, folder = Plan.read(resume), resume
        if (resume / "deploy.json").exists():
            nodes, capacity = cli_deploy.simulated(resume)
    elif nodes:
        if others := [_option(name) for name in typed if name in ("benchmark", "data", "clients", "workers", "eager")]:
            raise UserError(f"--nodes are whose images count; leave out {', '.join(others)}")
        from fcil.deploy.plans import deployed

        given = {key: n for key, n in (("tasks", tasks), ("active", active)) if n is not None}
        wanted = deployed(method, protocol or None, seed, {**given, **settings_of(set_)}, capacity, _command())
        folder = out or wanted.folder()
    else:
        if "capacity" in typed:
            raise UserError("--capacity belongs to --nodes; a benchmark knows its classes")
        if data and "benchmark" in typed:
            raise UserError("--data and --benchmark exclude each other; give one of them")
        given = {key: n for key, n in (("tasks", tasks), ("clients", clients), ("active", active)) if n is not None}
        chosen = own_data(data, **given) if data else known.benchmark(benchmark)
        wanted = plan(method, chosen, protocol or None, seed, {**given, **settings_of(set_)}, _command())
        folder = out or wanted.folder()
    if nodes:
        cli_deploy.simulate(wanted, folder, nodes, capacity, device)
    else:
        _execute(wanted, folder, device, workers, eager, tensorboard)
    show_result(folder)


for command in (cli_deploy.serve, cli_deploy.join, cli_deploy.certs, cli_deploy.status):
    app.command()(command)


@app.command()
def methods(name: Annotated[str, typer.Argument(help="Show every knob of this method.")] = "") -> None:
    """List the methods, or the knobs of one."""
    if not name:
        table = plain_table("method", "family", "what it does; whose it is, what a client keeps and sends, on a GPU")
        for key, entry in METHODS.items():
            facts = f"{entry.paper or 'no paper'}; keeps {entry.keeps}; sends {entry.sends}; {entry.on_a_gpu}"
            table.add_row(key, entry.family, entry.sentence + (f"\n{facts}" if not entry.preset else ""))
        return console.print(table)
    from fcil.methods import method

    made = method(name)
    module = sys.modules[made.server.__module__]
    console.print((module.__doc__ or "").strip(), soft_wrap=True)
    config = made.config()
    print_knobs(f"\nKnobs of {name}, changed by --set knob=value", knobs(type(config)), config)
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
    if not name and show:
        raise UserError("say which benchmark: fcil benchmarks NAME --show, such as fcil benchmarks digits --show")
    if not name:
        table = plain_table("benchmark", "T/K/C/A", "what it is")
        for b in known.BENCHMARKS.values():
            table.add_row(b.name, f"{b.tasks}/{b.classes_per_task}/{b.clients}/{b.active}", known.ABOUT[b.name])
        console.print(table)
        return console.print("T tasks of K classes, C clients of which A train in a round; more: fcil benchmarks NAME")
    chosen = known.benchmark(name)
    timing = known.protocol(chosen.protocol)
    if set_:
        from fcil.plan import plan

        wanted = plan(DEFAULT, chosen, settings=settings_of(set_))
        chosen, timing = wanted.benchmark, wanted.protocol
    if not show:
        fixed = ("name", "protocol")
        settable = {key: knob for key, knob in knobs(type(chosen)).items() if key not in fixed}
        print_knobs(f"Benchmark {chosen.name}, changed by --set knob=value", settable, chosen)
        settable = {key: knob for key, knob in knobs(type(timing)).items() if key not in fixed}
        return print_knobs(f"\nProtocol {timing.name} (--protocol), changed by --set knob=value", settable, timing)
    from fcil.report.shares import draw_shares, shares_table
    from fcil.scenario.scenario import Scenario

    scenario = Scenario(chosen, seed)
    console.print(shares_table(scenario))
    picture = out or Path(f"{chosen.name}-shares.png")
    draw_shares(scenario, picture)
    console.print(f"drawn in {picture}", soft_wrap=True)


@app.command()
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
    from fcil.experiment import finished
    from fcil.plan import plan
    from fcil.results.runs import find

    typed = _typed(ctx)
    axes = [
        [(k, v) for v in (text.split(",") if k != "class_order" else [text])] for k, text in settings_of(set_).items()
    ]
    asked = [b.strip() for b in benchmarks.split(",")]
    if paper:
        from fcil.report.paper_runs import runs_of

        if "methods" in typed:
            raise UserError("--paper names the methods itself; leave out --methods")
        wanted = runs_of(paper, asked if "benchmarks" in typed else (), protocol)
        chosen_runs = [(run.benchmark, run.method, run.settings) for run in wanted]
    else:
        chosen_runs = [(b, m.strip(), {}) for b, m in product(asked, methods.split(","))]
    plans = [
        plan(m, b, protocol or None, seed, {**own, **dict(chosen)}, _command())
        for (b, m, own), chosen, seed in product(chosen_runs, product(*axes), seeds_of(seeds))
    ]
    missing = [p for p in plans if not finished(p.folder(out), p)]
    console.print(f"{count(len(plans), 'run')}, {len(plans) - len(missing)} of them finished before")
    ready = _with_data(missing)
    failed = 0 if paper else len(missing) - len(ready)
    for number, one in enumerate(ready, 1):
        console.print(f"run {number} of {len(ready)}: {one.folder(out)}", soft_wrap=True)
        try:
            _execute(one, one.folder(out), device, workers)
            show_notes(one.folder(out))
        except UserError as error:
            failed += 1
            complain(str(error))
    done = [p.folder(out) for p in plans if finished(p.folder(out), p)]
    if done:
        _print_comparison(find(done), "" if axes else paper)  # with settings of one's own it is no table of the paper
    if failed or not done:
        raise UserError(
            f"{failed or len(plans)} of {len(plans)} runs did not finish; the same command tries them again"
        )


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


@app.command()
def table(
    runs: Runs = [],  # noqa: B006 - typer copies it
    hybrids: Annotated[
        bool, typer.Option("--hybrids", help="The paper's Table 1 instead: how the hybrid methods differ.")
    ] = False,
    paper: Annotated[
        str, typer.Option(help="As the paper has it, its values below ours: table2, table3 or memory.")
    ] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    latex: Annotated[bool, typer.Option("--latex", help="Print LaTeX with booktabs.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute every result from its ledger, and say what differs.")
    ] = False,
) -> None:
    """Compare finished runs: mean and standard error over seeds, the paper's claims beside ours."""
    from fcil.results.ledger import verify as differences
    from fcil.results.runs import find, unfinished

    if markdown + latex + csv > 1:
        raise UserError("--markdown, --latex and --csv exclude each other; give one of them")
    if hybrids:
        if runs or verify or paper:
            raise UserError("--hybrids compares methods, not runs; leave out RUNS..., --verify and --paper")
        return _print_hybrids(markdown, latex, csv)
    if not runs:
        raise UserError("say which RUNS... to compare, or --hybrids; see: fcil table --help")
    left_out: list[str] = []
    found = find(runs, None if verify else left_out)
    for sentence in left_out:
        complain(f"left out: {sentence}")
    if waiting := unfinished([path for path in runs if path.exists()]):
        how = "go on with" if (waiting[0] / "checkpoint").exists() else "begin again, for want of a checkpoint, with"
        complain(f"{count(len(waiting), 'unfinished run')} left out; {how}: fcil run --resume {waiting[0]}")
    if verify:
        wrong = [sentence for run in found for sentence in differences(run.folder)]
        for sentence in wrong:
            console.print(sentence, soft_wrap=True)
        if wrong:
            raise UserError(
                f"{count(len(wrong), 'difference')} between result and ledger in {count(len(found), 'run')}"
            )
        return console.print(f"{count(len(found), 'run')} verified: every result follows from its ledger")
    _print_comparison(found, paper, markdown, latex, csv)


def _print_comparison(
    found: "list[Run]", paper: str = "", markdown: bool = False, latex: bool = False, csv: bool = False
) -> None:
    """Print runs side by side, or as one of the paper's tables."""
    from fcil.report import paper_tables, tables
    from fcil.report.comparison import compare

    compared = compare(found)
    if paper:
        made = paper_tables.paper_tables(compared, paper)
        forms = ((markdown, paper_tables.as_markdown), (latex, paper_tables.as_latex), (csv, paper_tables.as_csv))
        for asked, render in forms:
            if asked:
                return print(render(made), end="")
        return console.print(paper_tables.as_rich(made))
    for asked, write in ((markdown, tables.as_markdown), (latex, tables.as_latex), (csv, tables.as_csv)):
        if asked:
            return print(write(compared), end="")
    console.print(tables.as_rich(compared, console.width))


def _print_hybrids(markdown: bool, latex: bool, csv: bool) -> None:
    from fcil.report import hybrids

    rows = hybrids.hybrids()
    forms = (
        (markdown, hybrids.hybrids_as_markdown), (latex, hybrids.hybrids_as_latex), (csv, hybrids.hybrids_as_csv),
    )  # fmt: skip
    for asked, render in forms:
        if asked:
            return print(render(rows), end="")
    console.print(hybrids.hybrids_as_rich(rows))


@app.command()
def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("page.html"),
) -> None:
    """Write one page about finished runs: charts with their data, pictures, all in one file that needs no network."""
    from fcil.report.page import write_page

    for sentence in write_page(runs, out):
        complain(f"left out: {sentence}")
    console.print(f"written: {out}", soft_wrap=True)


@app.command()
def figures(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="Folder to write them to, one below it for each benchmark.")] = Path(
        "figures"
    ),
) -> None:
    """Draw the charts of the page, and the paper's figures beside its values, as PNG and PDF."""
    from fcil.report.figures import write_figures

    files, left_out, missing = write_figures(runs, out)
    for sentence in [*(f"left out: {run}" for run in left_out), *missing]:
        complain(sentence)
    console.print(f"written: {count(len(files), 'file')} in {out}", soft_wrap=True)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or not.", metavar="RUN")],
    port: Annotated[int, typer.Option(help="Port on this machine; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """Show the page of a run while it goes on, at an address that only this machine can open."""
    from fcil.report.watch import HERE, served

    with served(run, port) as server:
        console.print(f"watching {run} at http://{HERE}:{server.server_port} (Ctrl-C ends it)", soft_wrap=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("stopped watching; the run is not touched")


@app.command()
def predict(
    run: Folder,
    images: Annotated[list[Path], typer.Argument(help="Image files.", metavar="IMAGE...")],
    top: Annotated[int, typer.Option(help="How many classes to name per image.", min=1)] = 3,
) -> None:
    """Classify images with a finished run."""
    from fcil.model import predict as classify

    for path, named in zip(images, classify(run, images, top), strict=True):
        console.print(f"{path}: " + ", ".join(f"{name} ({share:.0%})" for name, share in named), soft_wrap=True)


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


@app.command()
def audit(
    run: Folder,
    most: Annotated[int, typer.Option(help="Exemplars, and made-up images, to look at.", min=1)] = 500,
    device: Device = "auto",
) -> None:
    """Measure what a finished run tells of its training images, by its model, its memories and its messages."""
    from fcil.analysis.audit import audit as measured
    from fcil.analysis.audit import save
    from fcil.report.audit import draw, tables

    found, pictures = measured(run, device, most)
    for shown in tables(found):
        console.print(shown, soft_wrap=isinstance(shown, str))
    written = save(found, run)
    draw(found, pictures, run / "audit.png")
    console.print(f"written: {written}; drawn: {run / 'audit.png'}", soft_wrap=True)


@app.command()
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
    from fcil.experiment import the_device
    from fcil.files import write_text
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


def main() -> None:
    """Run the command line; what a user can mend is said in one sentence, without a traceback."""
    with plain_errors():
        code = app(prog_name="fcil", standalone_mode=False)
    sys.exit(code)


def _execute(
    wanted: "Plan", folder: Path, device: str, workers: int, eager: bool = False, tensorboard: Path | None = None
) -> None:
    from fcil.experiment import execute, finished, the_device
    from fcil.report.progress import follow
    from fcil.report.tensorboard import mirrored

    the_device(device)
    if finished(folder, wanted):
        return console.print(f"{folder} is finished; this is what came out", soft_wrap=True)
    show_plan(wanted)
    lines = execute(wanted, folder, device, workers=workers, eager=eager)
    try:
        follow(mirrored(lines, tensorboard) if tensorboard else lines, wanted, console)
    except KeyboardInterrupt:
        complain(f"stopped; the same command goes on, and so does: fcil run --resume {shlex.quote(str(folder))}")
        sys.exit(130)
    finally:
        lines.close()  # type: ignore[attr-defined]


def _typed(ctx: typer.Context) -> list[str]:
    """Return the names of the options that were given."""
    return [name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"]


def _command() -> str:
    return shlex.join(["fcil", *sys.argv[1:]])


def _option(name: str) -> str:
    return {"method": "METHOD", "set_": "--set"}.get(name, f"--{name}")


if __name__ == "__main__":
    main()
