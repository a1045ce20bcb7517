"""Nodes that come and go: whose a name is, in which order the first are numbered, and whom a server waits for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fcil.cli_deploy import status
from fcil.deploy.asking import Rules
from fcil.deploy.local import LocalWire, nodes_of
from fcil.deploy.messages import ASK, EVALUATE, LOOK, Reply, Request
from fcil.deploy.script import Terms
from fcil.deploy.server import Federation
from fcil.results.runs import read_result
from tests.deployment.test_server import LOGS, RULES, plan_of, run, same


class Keyed(LocalWire):
    """A wire to nodes whose keys are registered under names."""

    def __init__(self, nodes: Any, names: Mapping[int, str]):
        super().__init__(nodes)
        self.names = names

    def online(self) -> dict[int, str]:
        return {address: self.names[address] for address in super().online() if address in self.names}


def federation(place: Path, wire: LocalWire, rules: Rules = RULES) -> Federation:
    place.mkdir(exist_ok=True)
    return Federation(plan_of(), place, wire, rules, LOGS.setdefault(str(place), []).append, 8)


def test_a_node_is_who_its_key_says_whatever_it_calls_itself(tmp_path: Path, three: list[Path]) -> None:
    nodes = nodes_of(three, tmp_path / "state", "cpu")
    nodes[2].name = "anna"  # carla takes the name of another
    made = federation(tmp_path / "run", Keyed(nodes, {0: "anna", 1: "berta", 2: "carla"}))
    for _ in range(2):
        made.asking.gather(3)
        made.asking.look(made.roster.addresses.values())
    assert [node.name for node in made.roster.nodes] == ["anna", "berta", "carla"]
    assert made.roster.addresses == {0: 0, 1: 1, 2: 2}
    written = json.loads((tmp_path / "run" / "nodes.json").read_text())["nodes"]
    assert [(node["name"], node["address"]) for node in written] == [("anna", 0), ("berta", 1), ("carla", 2)]
    assert LOGS[str(tmp_path / "run")] == [
        "the node with the key of 'carla' calls itself 'anna'; it takes part as 'carla'"
    ]


def test_a_name_cannot_be_taken_while_its_owner_is_away(tmp_path: Path, three: list[Path]) -> None:
    nodes = nodes_of(three, tmp_path / "state", "cpu")
    nodes[2].name = "anna"
    wire = Keyed(nodes, {1: "berta", 2: "carla"})
    made = federation(tmp_path / "run", wire)
    made.asking.gather(2)  # anna has not come yet
    assert [node.name for node in made.roster.nodes] == ["berta", "carla"]
    wire.names = {0: "anna", 1: "berta", 2: "carla"}
    made.asking.gather(3)
    assert [node.name for node in made.roster.nodes] == ["berta", "carla", "anna"] and made.roster.addresses[2] == 0


def test_the_first_nodes_have_the_same_numbers_whichever_answers_first(tmp_path: Path, three: list[Path]) -> None:
    class Slow(LocalWire):
        """A wire over which anna is too slow to say who she is, the first time."""

        looks = 0

        def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
            if any(request.kind == LOOK for request in mail.values()):
                self.looks += 1
                if self.looks == 1:
                    mail = {address: request for address, request in mail.items() if address != 0}
            return super().exchange(mail)

    wire = Slow(nodes_of(three, tmp_path / "state", "cpu"))
    made = federation(tmp_path / "run", wire)
    made.asking.look(wire.online(), 3)
    assert made.roster.nodes == [], "two of three have no numbers yet"
    made.asking.look([0], 3)
    assert [node.name for node in made.roster.nodes] == ["anna", "berta", "carla"]


class Leaving(LocalWire):
    """A wire to nodes of which the last is away from one question on, until the server has waited some time."""

    def __init__(self, nodes: Any, kind: str, after: int, waits: int, says: bool):
        super().__init__(nodes)
        self.kind, self.after, self.waits, self.says = kind, after, waits, says
        self.asked, self.looked = 0, 0

    @property
    def away(self) -> bool:
        return self.asked >= self.after and self.looked < self.waits

    def online(self) -> dict[int, str]:
        self.looked += self.asked >= self.after
        there = super().online()
        return {a: key for a, key in there.items() if a < 2} if self.away and self.says else there

    def exchange(self, mail: Mapping[int, Request]) -> dict[int, Reply]:
        self.asked += any(request.kind == self.kind for request in mail.values())
        return super().exchange({a: request for a, request in mail.items() if a < 2 or not self.away})


WAITS = Rules(min_nodes=3, ends=True, pause=0.001, look_every=0.001)


@pytest.mark.parametrize("kind", [ASK, EVALUATE])
@pytest.mark.parametrize("says", [True, False], ids=["offline", "silent"])
def test_a_server_says_once_whom_it_waits_for_and_goes_on_when_they_are_back(
    tmp_path: Path, three: list[Path], kind: str, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, place = plan_of("finetune"), tmp_path / "run"
    list(run(wanted, tmp_path / "whole", three))
    shown: list[str] = []

    class Watched(Leaving):
        def online(self) -> dict[int, str]:
            if self.looked == self.waits - 1:
                Terms(3).write(place)
                status(place)
                shown.append(" ".join(capsys.readouterr().out.split()))
            return super().online()

    list(run(wanted, place, three, wire=Watched, rules=WAITS, kind=kind, after=2, waits=12, says=says))
    assert same(tmp_path / "whole", place) and read_result(place)["final"] >= 0
    waiting = [sentence for sentence in LOGS[str(place)] if "waiting for" in sentence or "asking again" in sentence]
    assert 1 <= len(waiting) <= 2 and all("carla" in sentence for sentence in waiting)
    assert "anna" not in " ".join(waiting) and shown and waiting[-1] in shown[0]
    assert json.loads((place / "nodes.json").read_text())["waiting"] == "", "it is over"


def test_what_a_server_waited_for_is_over_when_it_asks_the_next_question(
    tmp_path: Path, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = LocalWire(nodes_of(three, tmp_path / "state", "cpu"))
    asking = federation(tmp_path / "run", wire).asking
    asking.gather(3)
    asking.missing = [2]
    asking.wait(0, "2 of 3 have answered")
    shown: list[str] = []

    def exchange(mail: Mapping[int, Request]) -> dict[int, Reply]:
        shown.append(json.loads(asking.status.read_text())["waiting"])
        return {}

    monkeypatch.setattr(wire, "exchange", exchange)
    asking._asked([0, 1, 2], ASK, {"call": "the next"}, {})
    assert shown == [""], "while the nodes train, nobody is waited for"
