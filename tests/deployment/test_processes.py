"""Real processes over TLS on this machine: the same weights as a simulation, whatever is killed on the way."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from fcil.deploy.asking import Rules
from fcil.deploy.certificates import make
from fcil.deploy.local import LocalWire, nodes_of
from fcil.deploy.plans import read_config
from fcil.deploy.server import serve
from fcil.results.ledger import read, verify
from tests.deployment.federation import HR, NODES, SHORT, Federation, Link, environment, same, until

pytestmark = pytest.mark.soak
LONG = 900.0  # seconds: a busy machine is no failure
ONE = f"rounds = 1\n{SHORT}"
MFCL = "latent = 16\nsynthetic = 16\ngenerator_steps = 5\ngenerator_batch = 16\n"
CONFIGS = {
    "icarl": f'method = "icarl"\n{ONE}',
    "mfcl": f'method = "mfcl"\n{ONE}{MFCL}',
    "remind": f'method = "remind"\nexchanges = 1\n{ONE}',
}


@pytest.fixture(autouse=True)
def _this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


@pytest.fixture
def federation(tmp_path: Path, three: list[Path]) -> Iterator[Federation]:
    made = Federation(tmp_path, three[0].parent)
    yield made
    made.close()


@pytest.fixture
def link(tmp_path: Path, three: list[Path]) -> Iterator[Link]:
    made = Link(tmp_path, three[0].parent)
    yield made
    made.close()


def simulated(place: Path, config: Path, folders: list[Path]) -> Path:
    """Run the same folders in this process."""
    wire = LocalWire(nodes_of(folders, place / "nodes", "cpu"))
    for _ in serve(read_config(config, 8), place, wire, Rules(3, ends=True), lambda _: None, 8):
        pass
    return place


def test_three_nodes_over_tls_end_with_the_weights_of_a_simulation(
    link: Link, tmp_path: Path, three: list[Path]
) -> None:
    for name in NODES:
        link.join(name)
    runs = {name: link.submit(name, config) for name, config in CONFIGS.items()}
    for name, run in runs.items():
        until(lambda run=run: (run / "result.json").exists(), LONG, f"{name} is finished")
        here = simulated(tmp_path / "here" / name, tmp_path / f"{name}.toml", three)
        assert same(run, here), name
        assert verify(run) == []
        there, simulation = (
            [{**line, "seconds": 0} for line in read(folder / "ledger.jsonl")[1:]] for folder in (run, here)
        )
        assert there == simulation, name


def test_a_server_that_is_killed_resumes_to_the_weights_of_an_uninterrupted_run(
    federation: Federation, tmp_path: Path, three: list[Path]
) -> None:
    (tmp_path / "hr.toml").write_text(HR)
    words = ["--listen", str(federation.listen), "--tls", "tls", "--min-nodes", "3", "--capacity", "8", "--out", "run"]
    federation.start("server", "serve", "hr.toml", *words)
    for name in NODES:
        federation.join(name)
    log = tmp_path / "run" / "server.log"
    until(lambda: log.exists() and "train round 1 of 2" in log.read_text(), LONG, "the first round")
    federation.kill("server")
    federation.start("server again", "serve", "--resume", "run")
    until(lambda: (tmp_path / "run" / "result.json").exists(), LONG, "hr is finished")
    assert "going on in task 1" in log.read_text()
    assert same(tmp_path / "run", simulated(tmp_path / "here", tmp_path / "hr.toml", three))
    assert federation.processes["server again"].wait(60) == 0
    assert "final" in federation.said("server again")


def test_a_node_killed_in_a_round_is_done_without_and_strangers_are_refused(link: Link, tmp_path: Path) -> None:
    for name in NODES:
        link.join(name)
    run = link.submit("finetune", f'method = "finetune"\nrounds = 3\n{SHORT}', **{"min-nodes": 2})
    log = run / "server.log"
    until(lambda: log.exists() and "train round 1 of 3" in log.read_text(), LONG, "the first round")
    link.kill("carla")
    strangers(link, tmp_path)
    until(lambda: "no answer of node carla" in log.read_text(), LONG, "the round without carla")
    link.rejoin("carla")
    until(lambda: (run / "result.json").exists(), LONG, "finetune is finished")
    lines = read(run / "ledger.jsonl")
    assert sum(line["lost"] for line in lines if line["kind"] == "round") >= 1
    assert len([line for line in lines if line["kind"] == "task"]) == 2 and verify(run) == []
    seen = {node["name"]: node for node in json.loads((run / "nodes.json").read_text())["nodes"]}
    assert set(seen) == set(NODES) and seen["anna"]["answers"] > seen["carla"]["answers"]
    shown = subprocess.run(
        [sys.executable, "-m", "fcil", "status", str(run)],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "carla" in shown and "task 2, learned" in shown


def strangers(link: Link, tmp_path: Path) -> None:
    """An unregistered key, no key and a wrong CA are refused, each in a sentence."""
    make(tmp_path / "other", ["127.0.0.1"], ["dora"], 30)
    theirs = tmp_path / "other" / "nodes" / "dora"
    (link.data / "dora").mkdir()
    unregistered = link.join("dora", theirs / "dora.key", tmp_path / "tls" / "ca.crt", 0)
    assert unregistered.wait(90) == 2
    assert "did not admit node dora: its key is not registered there" in link.said("dora")
    wrong = link.join("dora", theirs / "dora.key", theirs / "ca.crt", 0)
    assert wrong.wait(90) == 2
    assert "vouches for" in link.said("dora")
    words = ["join", "--server", str(link.listen), "--data", str(link.data / "dora"), "--state", str(tmp_path / "d")]
    without = link.start("keyless", *words, "--insecure")
    time.sleep(10)
    admitted = "is admitted" in link.said("keyless")
    link.kill("keyless")
    assert not admitted and without.returncode
