"""A round touches the clients it asks, and no others."""

from dataclasses import replace

import pytest

from fcil.experiment import assemble
from fcil.federation.loop import learn
from fcil.scenario.scenario import Scenario
from tests.conftest import TINY, tiny_plan


@pytest.mark.parametrize("clients", [50, 5000])
def test_a_round_touches_only_the_clients_it_asks(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = replace(TINY, tasks=1, clients=clients, active=5)
    parts = assemble(tiny_plan("joint", benchmark, rounds=4), "cpu")
    touched: list[int] = []
    local = Scenario.local
    monkeypatch.setattr(
        Scenario, "local", lambda self, client, task: touched.append(client) or local(self, client, task)
    )
    lines = learn(parts.scenario, parts.server, parts.door, parts.engine)
    for _ in range(4):
        next(lines)
    assert len(touched) == 4 * 5
    assert parts.door.cursor.kept.keys() == set(touched) and parts.transport.caches.keys() == set(touched)
    assert parts.transport.memories == {}
