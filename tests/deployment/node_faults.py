"""Faults of nodes: nonsense, a full disk, strangers, kills, a torn memory; most when there is a memory to lose."""

import json
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import torch

from fcil.federation.versions import Versions
from fcil.results.ledger import read, verify
from tests.deployment.federation import LONG, NODES, Federation, rogue, strangers, text_of, until
from tests.deployment.sitting import PLAN, Sitting

NONSENSE = {
    "nan": "not finite", "shapes": "of shape (7, 7)", "counts": "less than nothing", "replay": "answers question",
}  # fmt: skip


def hurt_the_nodes(soak: Sitting) -> None:
    """Send nonsense, fill a disk, knock without a key, kill nodes, tear a memory."""
    made = soak.served("nodes", f"{PLAN}rounds = 4\ntasks = 3\n", 2)
    run, told = made.place / "run", {name: made.place / f"{name}.told" for name in NODES}
    disk = made.place / "state" / "berta"
    disk.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]).returncode == 0
    try:
        made.join("carla", called="anna", **rogue(told["carla"]))
        soak.fault("node carla says that she is anna")
        made.join("berta")
        made.join("anna", **rogue(told["anna"]))
        _heard(soak, run, 0, "the node with the key of 'carla' calls itself 'anna'")
        for how, why in NONSENSE.items():
            heard = len(text_of(run / "server.log"))
            told["anna"].write_text(how)
            soak.fault(f"node anna sends {how}")
            _heard(soak, run, heard, "refused a reply of node anna", why)
            told["anna"].unlink()
        if mounted:
            heard = len(text_of(run / "server.log"))
            _fill(disk / "filler")
            soak.fault("the disk of node berta is full")
            _heard(soak, run, heard, "refused a reply of node berta", "No space left")
            (disk / "filler").unlink()
        else:
            soak.say("no disk is filled: that takes the right to mount one")
        _kill_in_a_round(soak, made, told["carla"])
        _tear_a_memory(soak, made, told["anna"])
        for name in ("carla", "berta"):
            made.processes[name].terminate()
            assert made.processes[name].wait(LONG) == 130
            soak.fault(f"SIGTERM of node {name}")
            made.rejoin(name)
            soak.say(f"node {name} is back")
        until((run / "result.json").exists, LONG, "the run is finished")
        _check(soak, run, made.place / "state")
    finally:
        made.close()
        if mounted:
            subprocess.run(["umount", "-l", str(disk)])


def _kill_in_a_round(soak: Sitting, made: Federation, told: Path) -> None:
    """Kill a node while it trains, with a memory to lose; let strangers knock until it is missed."""
    run = made.place / "run"
    told.write_text("hold train 1")
    until(Path(f"{told}.held").exists, LONG, "carla trains after the first task")
    made.kill("carla")
    told.unlink()
    soak.fault("SIGKILL of node carla, which trained and remembers a task")
    heard = len(text_of(run / "server.log"))
    _strangers(soak, made)
    _heard(soak, run, heard, "no answer of node carla to train")
    made.rejoin("carla")
    soak.say("node carla is back")


def _tear_a_memory(soak: Sitting, made: Federation, told: Path) -> None:
    """Kill two nodes that have just written their memories, and cut the newest of one short."""
    run = made.place / "run"
    told.write_text("hold remember 1")
    until(Path(f"{told}.held").exists, LONG, "anna is asked to remember a later task")
    memory = made.place / "state" / "berta" / _experiment(run) / "memory"
    until(lambda: len(list(memory.glob("memory-*"))) >= 2, LONG, "berta remembers it")
    time.sleep(5)  # the reply is on its way
    for name in ("carla", "berta"):
        made.kill(name)
        soak.fault(f"SIGKILL of node {name}")
    *_, good, newest = sorted(memory.glob("memory-*"), key=lambda path: int(path.stem.partition("-")[2]))
    before = Versions(memory).before(10**9)
    newest.write_bytes(newest.read_bytes()[:-20])
    soak.fault(f"the newest memory of node berta is torn: {newest.name}")
    after = Versions(memory).before(10**9)
    assert before is not None and after is not None and not _equal(before, after), "the torn one is recognised"
    assert _equal(after, Versions(memory).before(int(good.stem.partition("-")[2]) + 1)), "the last good one is used"
    soak.say(f"  berta goes on from {good.name}")
    for name in ("carla", "berta"):
        made.rejoin(name)
        soak.say(f"node {name} is back")
    told.unlink()


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor] | None) -> bool:
    return other is not None and one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def _strangers(soak: Sitting, made: Federation) -> None:
    refused, unheard = strangers(made), "neither key nor TLS"
    openly = ["join", "--server", str(made.listen), "--data", str(made.data / "dora"), "--insecure"]
    for what, (words, _) in {**refused, unheard: ([*openly, "--state", str(made.place / unheard)], "")}.items():
        made.start(what, *words)
        soak.fault(f"a stranger with {what}")
    for what, (_, told) in refused.items():
        assert made.processes[what].wait(LONG) == 2 and told in made.said(what), made.said(what)
        soak.say(f"  refused: ... {made.said(what)[made.said(what).index(told) :]}")
    assert "is admitted" not in made.said(unheard) and made.processes[unheard].poll() is None, "it knocks in vain"
    made.kill(unheard)
    soak.say(f"  with {unheard}: not admitted")


def _heard(soak: Sitting, run: Path, since: int, *words: str) -> None:
    """Wait until a line of the server's log says all of this."""

    def found() -> list[str]:
        return [line for line in text_of(run / "server.log")[since:].splitlines() if all(w in line for w in words)]

    until(found, LONG, words[0])
    soak.say(f"  the server: {found()[0][20:170]}")


def _experiment(run: Path) -> str:
    return str(json.loads((run / "experiment.json").read_text())["experiment"])


def _check(soak: Sitting, run: Path, state: Path) -> None:
    lines = read(run / "ledger.jsonl")
    tasks = [line for line in lines if line["kind"] == "task"]
    assert len(tasks) == 3 and verify(run) == []
    for name in NODES:
        memory = Versions(state / name / _experiment(run) / "memory").before(10**9)
        assert memory, f"{name} has lost its memory"
    lost = sum(line["lost"] for line in lines if line["kind"] in ("round", "task"))
    refused = sum(len(line.get("refused", [])) for line in lines)
    soak.say(
        f"finished: three tasks learned, {100 * sum(tasks[-1]['correct']) / sum(tasks[-1]['total']):.1f} % right; "
        f"{lost} answers did not come, {refused} replies refused, every memory whole, the ledger verifies"
    )


def _fill(path: Path) -> None:
    """Write until there is no room for another byte."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (4096, 1):
            with suppress(OSError):
                while True:
                    os.write(handle, bytes(size))
    finally:
        os.close(handle)
