"""The commands about finished runs: `fcil table`, `report`, `figures`, `watch`, `predict`, `export` and `audit`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcil.errors import UserError, quoted
from fcil.terminal import complain, console, count, not_cut

if TYPE_CHECKING:
    from fcil.results.runs import Run

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
MOST_NAMED = 10  # unfinished runs
Runs = Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.", metavar="RUNS...")]
Folder = Annotated[Path, typer.Argument(help="The folder of a finished run.", metavar="RUN")]


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
    found = find(runs, left_out)
    if not verify:
        for sentence in left_out:
            complain(f"left out: {sentence}")
    if waiting := unfinished([path for path in runs if path.exists()]):
        how = "go on with" if (waiting[0] / "checkpoint").exists() else "begin again, for want of a checkpoint, with"
        which = f"{how}: fcil run --resume {quoted(waiting[0])}"
        others = [*map(quoted, waiting[1:MOST_NAMED]), *(["..."] if waiting[MOST_NAMED:] else [])]
        rest = f" ({count(len(waiting) - 1, 'other')}: {', '.join(others)})" if others else ""
        complain(f"{count(len(waiting), 'unfinished run')} left out; {which}{rest}")
    if verify:
        wrong = [*left_out, *(sentence for run in found for sentence in differences(run.folder))]
        for sentence in wrong:
            console.print(sentence, soft_wrap=True)
        if wrong:
            raise UserError(
                f"{count(len(wrong), 'difference')} between result and ledger "
                f"in {count(len(found) + len(left_out), 'run')}"
            )
        return console.print(f"{count(len(found), 'run')} verified: every result follows from its ledger")
    print_comparison(found, paper, markdown, latex, csv)


def print_comparison(
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
    drawn_on = console if console.is_terminal or "COLUMNS" in os.environ else not_cut
    drawn_on.print(tables.as_rich(compared, drawn_on.width))


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


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("page.html"),
) -> None:
    """Write one page about finished runs: charts with their data, pictures, all in one file that needs no network."""
    from fcil.report.page import write_page

    for sentence in write_page(runs, out):
        complain(f"left out: {sentence}")
    console.print(f"written: {out}", soft_wrap=True)


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


def predict(
    run: Folder,
    images: Annotated[list[Path], typer.Argument(help="Image files.", metavar="IMAGE...")],
    top: Annotated[int, typer.Option(help="How many classes to name per image.", min=1)] = 3,
) -> None:
    """Classify images with a finished run."""
    from fcil.model import predict as classify

    for path, named in zip(images, classify(run, images, top), strict=True):
        console.print(f"{path}: " + ", ".join(f"{name} ({share:.0%})" for name, share in named), soft_wrap=True)


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
