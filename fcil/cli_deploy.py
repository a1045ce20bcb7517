"""The commands of a deployment: arguments and printing, nothing else."""

import math
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcil.errors import UserError, quoted
from fcil.terminal import complain, console, count, plain_table

if TYPE_CHECKING:
    from fcil.plan import Plan

RECENT = 120.0  # seconds after which nobody knows who is online
Capacity = Annotated[int, typer.Option(help="Classes that tables have room for at first; they double.", min=2)]


def _finite(param: typer.CallbackParam, value: float) -> float:
    """Refuse what is no time at all: nan and inf pass for numbers."""
    if not math.isfinite(value):
        raise UserError(f"{param.opts[0]} {value} is not allowed; it takes a number of seconds")
    return value


def serve(
    config: Annotated[Path | None, typer.Argument(help="TOML file: method, seed, protocol, and any knob.")] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where nodes reach this server.")] = "0.0.0.0:9092",
    tls: Annotated[Path | None, typer.Option(help="Folder of `fcil certs`; nodes in it are admitted.")] = None,
    min_nodes: Annotated[int, typer.Option(help="Nodes that must be there and answer; else it waits.", min=1)] = 2,
    task_when: Annotated[int, typer.Option(help="A task begins when so many nodes report new classes.", min=1)] = 1,
    task_every: Annotated[
        float,
        typer.Option(
            help="A task begins every so many seconds, if anything is new; 0 is never.", min=0, callback=_finite
        ),
    ] = 0.0,
    look_every: Annotated[
        float, typer.Option(help="Seconds between two looks for new classes.", min=1, callback=_finite)
    ] = 60.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a node may take for an answer.", min=1, callback=_finite)
    ] = 1800.0,
    capacity: Capacity = 128,
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/nodes/METHOD/SEED]")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder; all else is there.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and keys: on one machine, to try it.")
    ] = False,
) -> None:
    """Serve a federation of nodes; the same command again, or --resume, goes on where it stopped."""
    from fcil.deploy.plans import read_config
    from fcil.deploy.processes import Address
    from fcil.deploy.script import Terms
    from fcil.deploy.serving import check_server
    from fcil.deploy.serving import serve as served
    from fcil.files import write_text
    from fcil.plan import Plan
    from fcil.run_folder import finished
    from fcil.terminal import show_result

    if resume is not None:
        if config is not None:
            raise UserError(f"--resume reads all else from {resume}; leave out {config}")
        wanted, terms, folder = Plan.read(resume), Terms.read(resume), resume
        if terms.nodes:
            raise UserError(f"{resume} is a simulation; go on with: fcil run --resume {quoted(resume)}")
    else:
        if config is None:
            raise UserError("say what to serve: fcil serve CONFIG.toml, or --resume RUN")
        if tls is None and not insecure:
            raise UserError("give the certificates with --tls DIR (fcil certs DIR makes them), or say --insecure")
        if tls is not None and insecure:
            raise UserError("--tls and --insecure exclude each other; give one of them")
        wanted = read_config(config, capacity, shlex.join(["fcil", *sys.argv[1:]]))
        folder = out or wanted.folder()
        where = str(tls.resolve()) if tls else ""
        terms = Terms(min_nodes, task_when, task_every, capacity, timeout, look_every, listen, where)
    if finished(folder, wanted):
        console.print(f"{folder} is finished; this is what came out", soft_wrap=True)
        return show_result(folder)
    check_server(Address.read(terms.listen, "--listen"), Path(terms.tls) if terms.tls else None)
    if not (folder / "config.toml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.toml", wanted.to_toml())
    terms.write(folder)
    console.print(f"{wanted.name} for at least {count(terms.min_nodes, 'node')}, in {folder}", soft_wrap=True)
    _until_stopped(lambda: served(folder, terms, _say), f"stopped; go on with: fcil serve --resume {quoted(folder)}")
    show_result(folder)


def join(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server listens.")],
    data: Annotated[Path, typer.Option(help="Folder of class folders: this node's images, which stay here.")],
    state: Annotated[Path, typer.Option(help="Folder for what this node remembers.")],
    key: Annotated[Path | None, typer.Option(help="This node's key, of `fcil certs`.")] = None,
    ca: Annotated[Path | None, typer.Option(help="The CA's certificate [default: ca.crt beside the key]")] = None,
    name: Annotated[str, typer.Option(help="What this node is called; the key's name, if it has a key.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "cpu",
    patience: Annotated[
        float, typer.Option(help="Seconds in which it tries again where no server admits it.", min=0, callback=_finite)
    ] = 120.0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and a key: on one machine, to try it.")
    ] = False,
) -> None:
    """Be a node of a federation, until stopped."""
    from fcil.deploy.processes import Address
    from fcil.deploy.serving import Seat
    from fcil.deploy.serving import join as joined
    from fcil.machine import the_device

    address = Address.read(server, "--server")
    if key is None and not insecure:
        raise UserError("give this node's key with --key FILE (fcil certs makes it), or say --insecure")
    if key is not None and insecure:
        raise UserError("--key and --insecure exclude each other; give one of them")
    if not name:
        name = key.stem if key is not None else data.resolve().name
    if key is not None and ca is None:
        ca = key.parent / "ca.crt"
    seat = Seat(address, name, data, state, key, ca, the_device(device))
    _until_stopped(lambda: joined(seat, patience, _say), f"node {name} stopped")


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for keys and certificates.", metavar="DIR")],
    host: Annotated[
        list[str], typer.Option(help="A name or address of the server, as nodes write it; repeat it.")
    ] = [],  # noqa: B006 - typer copies it
    node: Annotated[list[str], typer.Option(help="A node's name; repeat it.")] = [],  # noqa: B006 - typer copies it
    days: Annotated[int, typer.Option(help="How long the server's is valid; the CA's is ten years.", min=1)] = 365,
) -> None:
    """Make a CA, a server certificate and node keys; `fcil serve --tls DIR` admits these nodes, also while it runs."""
    from fcil.deploy.certificates import CA_DAYS, make

    if days > CA_DAYS:
        raise UserError(f"--days {days} is not allowed; it takes 1 to {CA_DAYS}, as long as the CA lives")
    written = make(folder, host, node, days, _say)
    for path in written:
        console.print(f"written: {path}", soft_wrap=True)
    if not written:
        console.print(f"nothing to do: all of it is in {folder}", soft_wrap=True)


def status(run: Annotated[Path, typer.Argument(help="Run folder of a server, or of `fcil run --nodes`.")]) -> None:
    """Show the nodes of a deployment: last seen, bytes, refused replies; and its tasks."""
    import json
    import time

    from fcil.deploy.script import Terms, said
    from fcil.report.progress import duration
    from fcil.results.ledger import read

    terms = Terms.read(run)
    table = plain_table("node", "now", "last seen", "answers", "refused", "KB down", "KB up", "classes")
    why = []
    try:
        found: dict[str, Any] = json.loads((run / "nodes.json").read_text())
        age = max(0.0, time.time() - found["written"])
        for node in found["nodes"]:
            now = "unknown" if age > RECENT else "online" if node["online"] else "away"
            ago = f"{duration(max(0.0, time.time() - node['last']))} ago" if node["last"] else "never"
            numbers = [f"{node[key]:,}" for key in ("answers", "refused")]
            numbers += [f"{node[key] / 1000:,.0f}" for key in ("down", "up")]
            table.add_row(node["name"], now, ago, *numbers, str(len(node["classes"])))
            why += [f"last refused of {node['name']}: {node['why']}"] if node["why"] else []
    except FileNotFoundError:
        return console.print(f"no node has been seen yet; at least {terms.min_nodes} must come", soft_wrap=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{run / 'nodes.json'} cannot be read ({type(error).__name__}: {error}); a server that runs writes it anew"
        ) from None
    console.print(f"as the server saw it {duration(age)} ago:", soft_wrap=True)
    console.print(table)
    for sentence in [*why, *([found["waiting"]] if found.get("waiting") else [])]:
        console.print(sentence, soft_wrap=True)
    lines = read(run / "ledger.jsonl") if (run / "ledger.jsonl").exists() else []
    for line in [line for line in lines if line["kind"] == "task"]:
        console.print(said(line), soft_wrap=True)
    if last := [line for line in lines if line["kind"] == "round"][-1:]:
        console.print(f"last: {said(last[0])}", soft_wrap=True)


def simulated(folder: Path) -> tuple[list[Path], int]:
    """Return the nodes' folders and the capacity of a simulation that is to go on."""
    from fcil.deploy.script import Terms

    terms = Terms.read(folder)
    if not terms.nodes:
        raise UserError(f"{folder} is a deployment; go on with: fcil serve --resume {quoted(folder)}")
    return [Path(node) for node in terms.nodes], terms.capacity


def simulate(wanted: "Plan", folder: Path, folders: list[Path], capacity: int, device: str) -> None:
    """Run a deployment's plan on nodes' folders in this process."""
    from fcil.deploy.local import LocalWire, nodes_of
    from fcil.deploy.script import Terms, log_to, said
    from fcil.deploy.server import serve as lines_of
    from fcil.machine import the_device
    from fcil.run_folder import finished

    nodes = nodes_of(folders, folder / "nodes", the_device(device))
    if finished(folder, wanted):
        return console.print(f"{folder} is finished; this is what came out", soft_wrap=True)
    terms = Terms(min_nodes=len(nodes), capacity=capacity, nodes=tuple(str(f.resolve()) for f in folders))
    terms.write(folder)
    console.print(f"{wanted.name} on {count(len(nodes), 'node')}, simulated here; seed {wanted.seed}", soft_wrap=True)

    written, going_on = log_to(folder / "server.log"), (folder / "ledger.jsonl").exists()

    def log(sentence: str) -> None:
        written(sentence)
        if going_on:  # until it does, what is logged is where
            console.print(sentence, soft_wrap=True)

    def all_of_it() -> None:
        nonlocal going_on
        for line in lines_of(wanted, folder, LocalWire(nodes), terms.rules, log, capacity):
            going_on = False
            if line["kind"] == "task":
                console.print(said(line), soft_wrap=True)

    _until_stopped(all_of_it, f"stopped; go on with: fcil run --resume {quoted(folder)}")


def _say(sentence: str) -> None:
    console.print(sentence, soft_wrap=True)


def _until_stopped(work: Any, goodbye: str) -> None:
    """Work until it is done; a signal to stop ends it in order, with a sentence."""

    def stopped(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stopped)
    try:
        work()
    except KeyboardInterrupt:
        complain(goodbye)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)
