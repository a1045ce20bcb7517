import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil.errors import UserError
from fcil.scenario.schedule import Schedule


def test_a_round_depends_on_seed_task_name_and_number_only():
    one, two = Schedule(3, 50, 5, seed=1), Schedule(3, 50, 5, seed=1)
    rounds = [one.sample(t, "rounds", r) for t in range(3) for r in range(20)]
    backwards = [two.sample(t, "rounds", r) for t in reversed(range(3)) for r in reversed(range(20))]
    assert rounds == backwards[::-1]
    assert len({tuple(chosen) for chosen in rounds}) > 55
    assert one.sample(0, "rounds", 0) != one.sample(0, "generator", 0)
    assert one.sample(0, "rounds", 0) != Schedule(3, 50, 5, seed=2).sample(0, "rounds", 0)


def test_all_clients_get_their_turn():
    schedule = Schedule(1, 20, 5)
    turns = [client for r in range(400) for client in schedule.sample(0, "rounds", r)]
    assert all(60 < turns.count(client) < 140 for client in range(20))


@settings(max_examples=50, deadline=None)
@given(clients=st.integers(1, 40), tasks=st.integers(1, 6), joining=st.integers(0, 5), data=st.data())
def test_clients_come_and_go(clients, tasks, joining, data):
    leaving = data.draw(st.integers(0, min(clients, joining)))
    active = data.draw(st.integers(1, clients))
    schedule = Schedule(tasks, clients, active, joining, leaving, seed=3)
    for t in range(tasks):
        present = schedule.present(t)
        assert present == sorted(set(present))
        assert len(present) == clients + t * (joining - leaving)
        assert max(present, default=-1) < schedule.total
        chosen = schedule.sample(t, "rounds", 0)
        assert chosen == sorted(set(chosen)) and len(chosen) == active and set(chosen) <= set(present)
        if t:
            before = set(schedule.present(t - 1))
            assert len(before - set(present)) == leaving
            assert len(set(present) - before) == joining
            assert all(c not in {x for s in range(t) for x in schedule.present(s)} for c in set(present) - before)


def test_active_clients_must_exist():
    with pytest.raises(UserError, match="active=6 is not allowed with clients=5; active takes 1 to 5"):
        Schedule(2, 5, 6)
    with pytest.raises(
        UserError, match="leaving=2 is too many for task 2: of 5 clients and 0 new ones, active=4 must be there"
    ):
        Schedule(2, 5, 4, leaving=2)
    with pytest.raises(UserError, match="leaving=9 is too many for task 2: of 5 clients and 9 new ones"):
        Schedule(2, 5, 1, joining=9, leaving=9)


def test_sampling_among_many_reaches_them_all():
    schedule = Schedule(2, 5000, 50)
    met = {client for r in range(1500) for client in schedule.sample(1, "rounds", r)}
    assert len(met) == 5000  # each is missed by a round with probability 0.99: by all 1,500, with 3e-7
