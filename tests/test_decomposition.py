"""Forgetting taken apart: the identities of the paper's equations, and what the split can see."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fcil.analysis import decomposition as apart
from fcil.federation.loop import learn
from fcil.parts import assemble
from tests.conftest import TINY, tiny_plan


def generated(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_scores(seed: int, classes: int, each: int = 7) -> tuple[Tensor, Tensor]:
    """Return scores of images that are right more often than not."""
    labels = torch.arange(classes).repeat_interleave(each)
    scores = torch.randn(len(labels), classes, generator=generated(seed), dtype=torch.float64)
    return scores + 1.5 * F.one_hot(labels, classes), labels


# -- the printed equations --------------------------------------------------------------------------------------------

sizes = st.tuples(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))


@given(sizes)
@settings(max_examples=50, deadline=None)
def test_equation_2_equals_equation_1(drawn: tuple[int, int, int]) -> None:
    seed, number, tasks = drawn
    classes = max(2, number * tasks)
    single, prior = torch.rand(2, classes, generator=generated(seed), dtype=torch.float64)
    prior = prior / prior.sum()
    u = apart.printed(single, prior)
    assert torch.allclose(apart.risk_by_pairs(u), apart.risk(single, prior), rtol=1e-12)


@given(sizes)
@settings(max_examples=50, deadline=None)
def test_equation_4_goes_on_from_equation_3(drawn: tuple[int, int, int]) -> None:
    seed, number, tasks = drawn
    order = torch.randperm(number * tasks, generator=generated(seed)).tolist()
    groups = [order[t * number : (t + 1) * number] for t in range(tasks)]
    u = apart.printed(*torch.rand(2, number * tasks, generator=generated(seed), dtype=torch.float64))
    for t in range(1, tasks):
        before, after = (apart.cumulative(u, groups[:end]) for end in (t, t + 1))
        assert torch.allclose(before + apart.added(u, groups[: t + 1]), after, rtol=1e-12)


@given(sizes)
@settings(max_examples=20, deadline=None)
def test_equation_3_is_not_equation_1_but_a_multiple_of_it(drawn: tuple[int, int, int]) -> None:
    """It counts each pair twice and a class with itself once: (2KN - 1) / N^2 times, which PAPER.md says."""
    seed, n, k = drawn
    single = torch.rand(n * k, generator=generated(seed), dtype=torch.float64)
    prior = torch.full_like(single, 1 / (n * k))
    groups = [range(t * n, (t + 1) * n) for t in range(k)]
    times = (2 * k * n - 1) / n**2
    assert torch.allclose(
        apart.cumulative(apart.printed(single, prior), groups), times * apart.risk(single, prior), rtol=1e-12
    )


def test_the_printed_loss_of_a_pair_cannot_see_what_is_taken_for_what() -> None:
    """Classes 0 and 1 are taken for each other, or each for a class of its own: every class loses the same."""
    labels = torch.arange(4)
    swapped, apiece = (torch.eye(4) + 2 * torch.eye(4)[order] for order in ([1, 0, 3, 2], [2, 3, 0, 1]))
    found = [apart.losses(s, labels, range(4)) for s in (swapped, apiece)]
    u = [apart.printed(one.single, torch.full((4,), 0.25)) for one in found]
    assert torch.allclose(u[0], u[1]) and not torch.allclose(found[0].pair, found[1].pair)


# -- losses -----------------------------------------------------------------------------------------------------------


def naive(scores: Tensor, labels: Tensor, i: int, j: int) -> float:
    """Half the cross-entropy on either class, the other alone in question, at the best of many units of scores."""
    values = [math.log(2)]
    for power in range(-400, 401):
        at = scores * 10 ** (power / 100)
        halves = [F.cross_entropy(at[labels == a][:, [a, b]], torch.zeros(7).long()) for a, b in ((i, j), (j, i))]
        values.append((sum(halves) / 2).item())  # type: ignore[attr-defined]
    return min(values)


def test_the_loss_of_a_pair_is_cross_entropy_over_the_two_in_its_best_unit() -> None:
    scores, labels = some_scores(0, 4)
    found = apart.losses(scores, labels, range(4))
    for i in range(4):
        for j in range(4):
            expected = naive(scores, labels, i, j) if i != j else 0.0
            assert found.pair[i, j].item() == pytest.approx(expected, rel=0.01, abs=1e-9)


def test_the_loss_of_a_class_is_cross_entropy_over_all_in_the_best_unit() -> None:
    scores, labels = some_scores(2, 6)
    found = apart.losses(scores, labels, range(6)).single
    at = [F.cross_entropy(scores * 10 ** (power / 100), labels).item() for power in range(-400, 401)]
    assert found.mean().item() == pytest.approx(min(at), rel=0.01)


@pytest.mark.parametrize("factor", [1e-3, 0.2, 30.0, 1e4])
def test_the_unit_of_scores_does_not_matter(factor: float) -> None:
    scores, labels = some_scores(1, 4)
    one, other = (apart.losses(s, labels, range(4)) for s in (scores, factor * scores + 3))
    assert torch.allclose(one.pair, other.pair, rtol=1e-6) and torch.allclose(one.single, other.single, rtol=1e-6)


@pytest.mark.parametrize("bias", [0.0, 9.0])
def test_what_cannot_be_told_apart_loses_log_2(bias: float) -> None:
    """Nor can it where every image is taken for the same class, however surely."""
    labels = torch.arange(3).repeat_interleave(4)
    scores = torch.zeros(12, 3)
    scores[:, 0] = bias
    pair = apart.losses(scores, labels, range(3)).pair
    off = ~torch.eye(3, dtype=torch.bool)
    assert torch.allclose(pair[off], torch.full((6,), math.log(2), dtype=torch.float64), rtol=1e-4)


def test_classes_that_are_ruled_out_or_not_yet_seen_break_nothing() -> None:
    scores, labels = some_scores(3, 5)
    scores[:, 4] = -torch.inf  # not seen, and no image is of it
    scores[:, 1] = -torch.inf  # seen, but the method has ruled it out
    rest, keep = torch.tensor([0, 2, 3]), labels != 4
    found = apart.losses(scores[keep], labels[keep], (0, 1, 2, 3)).pair
    assert found[4].isnan().all() and found[:, 4].isnan().all()
    assert torch.allclose(found[1, rest], torch.tensor(math.log(2), dtype=torch.float64), rtol=1e-3)
    among = torch.isin(labels, rest)
    without = apart.losses(scores[among], labels[among], rest.tolist()).pair
    assert torch.allclose(found[rest[:, None], rest], without[rest[:, None], rest], rtol=0.01)


def test_a_perfect_answer_loses_nothing() -> None:
    found = apart.losses(torch.eye(4), torch.arange(4), range(4))
    assert found.pair.max() < 1e-6 and found.single.max() < 1e-6


# -- the split --------------------------------------------------------------------------------------------------------


def test_two_images_are_in_one_client_by_the_shares_of_both_classes() -> None:
    same = apart.together(torch.tensor([[3, 0, 1], [1, 4, 0], [0, 0, 0]]))
    expected = [[(9 + 1) / 16, 1 / 4, 3 / 4], [1 / 4, 1, 0], [3 / 4, 0, 1]]
    assert torch.allclose(same, torch.tensor(expected, dtype=torch.float64))


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_the_terms_are_those_of_equations_5_and_6_and_add_up(seed: int) -> None:
    """Summed client by client, in plain loops."""
    u = torch.rand(6, 6, generator=generated(seed), dtype=torch.float64)
    u = (u + u.T).fill_diagonal_(0)
    holdings = torch.randint(0, 5, (3, 6), generator=generated(seed)) + torch.eye(3, 6, dtype=torch.int64).roll(
        seed % 6
    )
    holdings[0] += holdings.sum(0) == 0
    shares = holdings.double() / holdings.sum(0)
    tasks = [[0, 3], [5, 1], [2, 4]]
    old, new = [0, 3, 5, 1], [2, 4]
    value = dict.fromkeys(("prior", "new", "intra", "inter"), 0.0)
    for m in range(3):
        for n in range(3):
            weighted = u * shares[m][:, None] * shares[n]
            value["prior" if m == n else "inter"] += sum(weighted[i, j].item() for i in old for j in old if i != j)
            value["new"] += sum(weighted[i, j].item() for i in new for j in new if i != j)
            value["intra" if m == n else "inter"] += 2 * sum(weighted[i, j].item() for i in old for j in new)
    found = apart.split(u, tasks, apart.together(holdings))
    for name, total in value.items():
        assert found["parts"][name] == pytest.approx(total / 30, abs=1e-5)
    parts = {name: part or 0.0 for name, part in found["parts"].items()}
    assert parts["total"] == pytest.approx(u.sum().item() / 30, abs=1e-5)
    assert parts["local"] == pytest.approx(parts["prior"] + parts["intra"], abs=2e-5)
    assert parts["global"] == parts["inter"]
    assert parts["local"] + parts["new"] + parts["global"] == pytest.approx(parts["total"], abs=4e-5)


@pytest.mark.parametrize(
    ("confused", "term"),
    [((0, 2), "prior"), ((4, 5), "new"), ((0, 4), "intra"), ((1, 2), "inter"), ((1, 4), "inter"), ((2, 5), "inter")],
)
def test_a_confusion_moves_the_term_that_it_belongs_to(confused: tuple[int, int], term: str) -> None:
    """One client has held 0, 2 and 4, the other 1, 3 and 5; 4 and 5 are new."""
    same = apart.together(torch.tensor([[5, 0, 5, 0, 5, 0], [0, 5, 0, 5, 0, 5]]))
    labels = torch.arange(6).repeat_interleave(20)
    scores = 9 * F.one_hot(labels, 6).double() + torch.randn(120, 6, generator=generated(0), dtype=torch.float64)
    blurred = scores.clone()
    i, j = confused
    blurred[:, [i, j]] = scores[:, [i, j]].mean(1, keepdim=True)
    was, now = (
        apart.split(apart.losses(s, labels, range(6)).pair, [[0, 1], [2, 3], [4, 5]], same)["means"]
        for s in (scores, blurred)
    )
    rise = {name: (now[name] or 0) - (was[name] or 0) for name in was}
    assert max(rise, key=lambda name: rise[name]) == term and rise[term] > 0.05
    assert all(other < 0.01 for name, other in rise.items() if name != term)


def test_the_means_of_pairs_by_tasks_stand_in_a_triangle() -> None:
    u = torch.tensor([[0.0, 1, 2, 3], [1, 0, 4, 5], [2, 4, 0, 6], [3, 5, 6, 0]], dtype=torch.float64)
    assert apart.between(u, [[0, 1], [2], [3]]) == [[1.0], [3.0, None], [4.0, 6.0, None]]


# -- in a run ---------------------------------------------------------------------------------------------------------


def task_lines(method: str, **changes: Any) -> list[dict[str, Any]]:
    parts = assemble(tiny_plan(method, replace(TINY, **changes), rounds=6, steps=8, lr=0.1), "cpu", workers=1)
    lines = learn(parts.scenario, parts.server, parts.door, parts.engine)
    return [line["decomposition"] for line in lines if line["kind"] == "task"]


def test_a_ledger_has_it_after_every_task() -> None:
    first, second, third = task_lines("finetune")
    assert first["means"]["new"] is not None and {first["means"][n] for n in ("prior", "intra", "inter")} == {None}
    assert set(second["means"].values()).isdisjoint({None}) and second["across_before"] is None
    assert second["across"] > 0 and third["across"] != third["across_before"] > 0 and len(third["between"]) == 3
    assert all(isinstance(value, float) for value in third["parts"].values())


def test_with_one_client_all_confusion_is_within_it() -> None:
    """Only local forgetting can happen."""
    forgets, keeps = (task_lines(method, clients=1, active=1)[-1] for method in ("finetune", "joint"))
    assert forgets["means"]["inter"] is None and forgets["parts"]["global"] == 0
    assert forgets["means"]["intra"] > keeps["means"]["intra"] + 0.2 and forgets["means"]["new"] < 0.4


def test_where_clients_share_no_class_and_forget_nothing_confusion_is_between_them() -> None:
    """Only global forgetting can happen: each client keeps all its images, and has one class of every task's two."""
    last = task_lines("joint", partition="class_subset", class_share=0.5, clients=2, active=2)[-1]
    assert last["means"]["inter"] > 0.3 > 0.1 > last["means"]["intra"]
    assert last["parts"]["global"] > 10 * last["parts"]["local"]
