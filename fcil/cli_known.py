"""Commands that show what there is: methods and benchmarks, and their knobs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fcil.errors import UserError
from fcil.knobs import knobs
from fcil.methods import METHODS
from fcil.scenario import benchmarks as known
from fcil.terminal import console, option, plain_table, print_knobs, settings_of, typed


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


def benchmarks(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Show this benchmark: a name, or your own .toml file.")] = "",
    show: Annotated[
        bool, typer.Option("--show", help="Deal the images: print and draw who holds how much of which class.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    set_: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Change a knob of the benchmark or its protocol; repeat it."),
    ] = [],  # noqa: B006 - typer copies it
    out: Annotated[Path | None, typer.Option(help="With --show: the picture [default: NAME-shares.png]")] = None,
) -> None:
    """List the benchmarks, or show one."""
    if not name and show:
        raise UserError("say which benchmark: fcil benchmarks NAME --show, such as fcil benchmarks digits --show")
    if not show and (idle := [option(idle) for idle in typed(ctx) if idle in ("seed", "out")]):
        raise UserError(f"without --show no images are dealt; leave out {', '.join(idle)}, or add --show")
    if not name and set_:
        raise UserError("say whose knobs: fcil benchmarks NAME --set KEY=VALUE, such as fcil benchmarks digits ...")
    if seed < 0:
        raise UserError(f"seed={seed} is not allowed; seed takes whole numbers at least 0")
    if not name:
        table = plain_table("benchmark", "T/K/C/A", "what it is")
        for b in known.BENCHMARKS.values():
            table.add_row(b.name, f"{b.tasks}/{b.classes_per_task}/{b.clients}/{b.active}", known.ABOUT[b.name])
        console.print(table)
        return console.print("T tasks of K classes, C clients of which A train in a round; more: fcil benchmarks NAME")
    chosen = known.benchmark(name)
    timing = known.protocol(chosen.protocol)
    if set_:
        from fcil.plan import turned

        chosen, timing = turned((chosen, timing), settings_of(set_), "a benchmark has no knobs of methods")
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
