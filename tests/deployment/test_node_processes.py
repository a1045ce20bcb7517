"""Three nodes as real processes, over TLS with keys: the weights of a simulation, a node that is killed, strangers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from fcil.federation.versions import Versions
from fcil.results.ledger import read, verify
from tests.deployment.conftest import digits_of_three
from tests.deployment.federation import (
    LONG,
    NODES,
    SHORT,
    Link,
    environment,
    rogue,
    same,
    simulated,
    strangers,
    text_of,
    until,
)

pytestmark = pytest.mark.processes
MFCL = "latent = 16\nsynthetic = 16\ngenerator_steps = 5\ngenerator_batch = 16\n"
CONFIGS = {
    "icarl": f'method = "icarl"\n{SHORT}',
    "mfcl": f'method = "mfcl"\n{SHORT}{MFCL}',
    "remind": f'method = "remind"\nexchanges = 1\n{SHORT}',
}


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Link]:
    """A SuperLink and three nodes; they come in another order than that of their names, and one takes another's."""
    place = tmp_path_factory.mktemp("link")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        made = Link(place, digits_of_three(place / "data")[0].parent)
        try:
            made.join("carla", called="anna", **rogue(place / "carla.told"))
            made.join("berta")
            made.join("anna", **rogue(place / "anna.told"))
            yield made
        finally:
            made.close()


def test_three_nodes_over_tls_end_with_the_weights_of_a_simulation(link: Link) -> None:
    runs = {name: link.submit(name, config) for name, config in CONFIGS.items()}
    for name, run in runs.items():
        here = simulated(link.place / "here" / name, link.place / f"{name}.toml", link.folders)
        until((run / "result.json").exists, LONG, f"{name} is finished")
        assert same(run, here), name
        assert verify(run) == []
        there, simulation = (
            [{**line, "seconds": 0} for line in read(folder / "ledger.jsonl")[1:]] for folder in (run, here)
        )
        assert there == simulation, name
        assert "the node with the key of 'carla' calls itself 'anna'" in text_of(run / "server.log")


def test_a_node_killed_in_a_round_is_done_without_and_comes_back_with_its_memory_while_strangers_stay_out(
    link: Link,
) -> None:
    carla, anna = link.place / "carla.told", link.place / "anna.told"
    carla.write_text("hold train 1")
    anna.write_text("hold remember 1")
    run = link.submit("killed", CONFIGS["icarl"], **{"min-nodes": 2})
    until(Path(f"{carla}.held").exists, LONG, "carla trains in task 2")
    link.kill("carla")
    carla.unlink()
    memory = link.place / "state" / "carla" / experiment_of(run) / "memory"
    before = {path.name: path.read_bytes() for path in memory.glob("memory-*")}
    assert before, "carla remembers task 1"
    strangers_are_refused(link)
    until(lambda: "no answer of node carla to train" in text_of(run / "server.log"), LONG, "the round without carla")
    link.rejoin("carla")
    anna.unlink()
    until((run / "result.json").exists, LONG, "icarl is finished")
    lines = read(run / "ledger.jsonl")
    assert [line["lost"] for line in lines if line["kind"] == "round"] == [0, 1]
    assert len([line for line in lines if line["kind"] == "task"]) == 2 and verify(run) == []
    assert all((memory / name).read_bytes() == content for name, content in before.items())
    assert Versions(memory).before(10**9) is not None, "whole, by its digest"
    seen = {node["name"]: node for node in json.loads((run / "nodes.json").read_text())["nodes"]}
    assert set(seen) == set(NODES) and all(node["online"] for node in seen.values()), "carla is back"
    assert seen["anna"]["answers"] > seen["carla"]["answers"] > 0
    shown = subprocess.run(
        [sys.executable, "-m", "fcil", "status", str(run)], env=environment(), capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    assert "carla" in shown and "task 2, learned" in shown


def experiment_of(run: Path) -> str:
    return str(json.loads((run / "experiment.json").read_text())["experiment"])


def strangers_are_refused(link: Link) -> None:
    """A key that is not registered, TLS without a key, and another CA: each is one sentence."""
    refused = strangers(link)
    for what, (words, _) in refused.items():
        link.start(what, *words)
    for what, (_, told) in refused.items():
        assert link.processes[what].wait(LONG) == 2, link.said(what)
        assert told in link.said(what) and "is admitted" not in link.said(what)
