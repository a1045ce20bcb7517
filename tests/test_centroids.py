"""Placing centroids: known answers (methods.md 3.3 and 11), symmetries, descent, simplices, and what the print does."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fcil.blocks.centroids import (
    LONGEST_STEP,
    REST,
    energy,
    gradient,
    jittered,
    lennard_jones,
    nearest,
    printed_alignment,
    printed_step,
    repulsion,
    within_reach,
)
from fcil.federation.engine import threads

TRIANGLE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.2]], dtype=torch.float64)
NONE = torch.zeros(0, 2, dtype=torch.float64)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Thousands of steps on a handful of points: a second thread only waits for the first."""
    with threads(1):
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_points(moving: int, fixed: int, dim: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points about 1 apart: neither so close that rounding rules, nor so far that nothing acts."""
    points = 0.7 * normal(moving + fixed, dim, seed=seed) + torch.arange(moving + fixed).view(-1, 1)
    return points[:moving], points[moving:]


def distances(moving: Tensor, fixed: Tensor) -> Tensor:
    """Every distance of a moving point, from another or from a fixed one."""
    return torch.cat([torch.pdist(moving), torch.cdist(moving, fixed).flatten()])


def pair_energy(r: float, depth: float = 1.0) -> float:
    """Energy of two points r sigma apart."""
    return 4 * depth * (r**-12 - r**-6)


def in_tasks(place: Callable[..., Tensor], classes: int, size: int, dim: int, sigma: float, **rest: int) -> Tensor:
    """Place the centroids of `classes`, `size` at a time: all means nearly coincide, and the old ones stay."""
    generator, placed = torch.Generator().manual_seed(1), normal(0, dim)
    for task in range(classes // size):
        start = jittered(0.01 * sigma * normal(size, dim, seed=task), sigma, generator)
        placed = torch.cat([placed, place(start, placed, sigma, **rest)])
    return placed


# -- energy and gradient -----------------------------------------------------------------------------------------------


def test_the_energy_of_three_points_is_known() -> None:
    assert energy(TRIANGLE, NONE, 1.0).item() == pytest.approx(-1.1473639, abs=1e-6)


def test_the_gradient_of_three_points_is_known_and_sums_to_zero() -> None:
    known = torch.tensor([[24.0, -2.2116933], [-23.4161221, -0.7006535], [-0.5838779, 2.9123468]]).double()
    slope = gradient(TRIANGLE, NONE, 1.0)
    assert torch.allclose(slope, known, rtol=0, atol=1e-6)
    assert slope.sum(0).abs().max() < 1e-12


def test_a_pair_with_a_fixed_point_counts_once_and_one_of_fixed_points_never() -> None:
    assert energy(TRIANGLE[:1], TRIANGLE[1:], 1.0) == pytest.approx(sum(pair_energy(r) for r in (1.0, 1.2)))
    assert energy(TRIANGLE[:2], TRIANGLE[2:], 1.0) == pytest.approx(energy(TRIANGLE, NONE, 1.0).item())


@pytest.mark.parametrize(("sigma", "depth"), [(1.0, 1.0), (5.0, 1.0), (0.3, 2.5)])
@pytest.mark.parametrize("r", [0.8, 1.0, 1.3, 4.0])
def test_the_energy_of_a_pair_by_hand(r: float, sigma: float, depth: float) -> None:
    pair = torch.tensor([[0.0, 0.0], [0.0, r * sigma]], dtype=torch.float64)
    assert energy(pair, NONE, sigma, depth).item() == pytest.approx(pair_energy(r, depth), rel=1e-9, abs=1e-9)


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 8), st.sampled_from([0.5, 1.0, 5.0]), st.integers(0, 99))
def test_the_gradient_is_that_of_the_energy(moving: int, fixed: int, dim: int, sigma: float, seed: int) -> None:
    p, still = (sigma * points for points in some_points(moving, fixed, dim, seed))
    p.requires_grad_()
    if moving + fixed > 1:  # one point alone has no pair to differentiate
        (expected,) = torch.autograd.grad(energy(p, still, sigma, 1.7), p)
        slope = gradient(p.detach(), still, sigma, 1.7)
        assert torch.allclose(slope, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))
    assert gradient(p.detach()[:1], still[:0], sigma).tolist() == [[0.0] * dim]


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(2, 8), st.integers(0, 99))
def test_moving_or_turning_everything_changes_no_energy_and_turns_the_gradient(
    moving: int, fixed: int, dim: int, seed: int
) -> None:
    p, still = some_points(moving, fixed, dim, seed)
    turn, _ = torch.linalg.qr(normal(dim, dim, seed=seed + 1))
    shift = normal(dim, seed=seed + 2)
    there, still_there = p @ turn + shift, still @ turn + shift
    assert energy(there, still_there, 1.0).item() == pytest.approx(energy(p, still, 1.0).item(), rel=1e-7)
    turned = gradient(p, still, 1.0) @ turn
    assert torch.allclose(gradient(there, still_there, 1.0), turned, rtol=1e-7, atol=1e-7 * float(turned.abs().max()))


@pytest.mark.parametrize("place", [lennard_jones, printed_alignment, repulsion])
def test_where_the_origin_is_does_not_matter(place: Callable[..., Tensor]) -> None:
    p, still = (0.3 * points for points in some_points(3, 2, 4, 0))
    shift = normal(4, seed=3)
    moved = place(p, still, 1.0, steps=5)
    assert torch.allclose(place(p + shift, still + shift, 1.0, steps=5), moved + shift, atol=1e-9)
    assert not torch.allclose(moved, p, atol=1e-3)


# -- two bodies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("depth", [1.0, 3.0])
def test_two_points_at_rest_feel_nothing_and_have_the_least_energy(sigma: float, depth: float) -> None:
    pair = torch.tensor([[0.0, 0.0], [2 ** (1 / 6) * sigma, 0.0]], dtype=torch.float64)
    assert gradient(pair, NONE, sigma, depth).abs().max() < 1e-12 * depth / sigma
    assert energy(pair, NONE, sigma, depth).item() == pytest.approx(-depth, rel=1e-12)
    for stretch in (0.99, 1.01):
        assert energy(stretch * pair, NONE, sigma, depth) > -depth


@pytest.mark.parametrize("sigma", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("apart", [1e-6, 1e-3, 0.5, 1.0, 1.5, 3.0])
def test_two_points_descend_to_rest_from_near_and_from_far(sigma: float, apart: float) -> None:
    start = apart * sigma * torch.tensor([[0.6, 0.8], [0.0, 0.0]]).double()
    end = lennard_jones(start, NONE, sigma)
    assert torch.allclose(lennard_jones(start.float(), NONE.float(), sigma), end.float(), atol=1e-5 * sigma)
    assert torch.pdist(end).item() == pytest.approx(2 ** (1 / 6) * sigma, rel=1e-6)
    assert torch.allclose(end.mean(0), start.mean(0), atol=1e-6 * sigma)  # nobody pulls from outside
    beside = lennard_jones(start[:1], start[1:], sigma)
    assert torch.dist(beside, start[1:]).item() == pytest.approx(2 ** (1 / 6) * sigma, rel=1e-6)


# -- descent -----------------------------------------------------------------------------------------------------------

STARTS = {
    "nearly coincident": (1e-3 * normal(6, 5), normal(0, 5)),
    "nearly coincident with old ones": (1e-6 * normal(4, 5), torch.cat([0 * normal(1, 5), normal(4, 5, seed=1)])),
    "spread out": (2 * normal(6, 5), 2 * normal(3, 5, seed=1)),
    "wedged in": (torch.tensor([[0.05]]).double(), torch.tensor([[-0.1], [0.1]]).double()),
    "crowded": (0.5 * normal(8, 2), 0.5 * normal(4, 2, seed=1)),
}


@pytest.mark.parametrize("start", STARTS)
def test_no_step_raises_the_energy_or_is_longer_than_it_may_be(start: str) -> None:
    sigma = 5.0
    p, still = (sigma * points for points in STARTS[start])
    path = [lennard_jones(p, still, sigma, steps=steps) for steps in range(30)]
    path += [lennard_jones(p, still, sigma, steps=steps) for steps in (100, 101, 400, 401)]
    energies = [energy(q, still, sigma).item() for q in path]
    assert torch.equal(path[0], p) and all(math.isfinite(e) for e in energies)
    assert all(after <= before for before, after in zip(energies[:-1], energies[1:], strict=True))
    assert energies[-1] < energies[0] - 0.1
    pairs = [*zip(path[:29], path[1:30], strict=True), (path[30], path[31]), (path[32], path[33])]
    longest = max((after - before).norm(dim=1).max().item() for before, after in pairs)
    assert 0.01 * LONGEST_STEP * sigma < longest <= LONGEST_STEP * sigma * (1 + 1e-9)


@pytest.mark.parametrize("start", STARTS)
def test_single_steps_from_a_rate_far_too_high_do_not_raise_the_energy(start: str) -> None:
    p, still = STARTS[start]
    for _ in range(30):
        then = lennard_jones(p, still, 1.0, rate=1e6, steps=1)
        assert energy(then, still, 1.0) <= energy(p, still, 1.0)
        assert (then - p).norm(dim=1).max() <= 0.05 * (1 + 1e-9)
        p = then


@pytest.mark.parametrize("apart", [1e-2, 1e-4, 1e-6])
def test_points_too_near_for_the_longest_step_still_part(apart: float) -> None:
    start = apart * normal(4, 1, seed=1)  # on a line the longest step carries one right through another
    end = lennard_jones(start, normal(2, 1, seed=2), 1.0)
    assert energy(end, normal(2, 1, seed=2), 1.0) < 1e-12 * energy(start, normal(2, 1, seed=2), 1.0)
    assert (end - start).norm(dim=1).min() > 0.01


@pytest.mark.parametrize("place", [lennard_jones, printed_alignment, repulsion])
def test_old_points_stay_and_act_on_new_ones(place: Callable[..., Tensor]) -> None:
    p, still = 0.3 * normal(3, 4), 0.3 * normal(2, 4, seed=1)
    before, start = still.clone(), p.clone()
    beside = place(p, still, 1.0, steps=50)
    assert torch.equal(still, before) and torch.equal(p, start)
    assert beside.shape == p.shape
    assert not torch.allclose(beside, place(p, still[:0], 1.0, steps=50), atol=0.05)


def test_points_at_rest_stay_where_they_are() -> None:
    simplex = REST / math.sqrt(2) * torch.eye(4, dtype=torch.float64)
    assert torch.equal(lennard_jones(simplex, simplex[:0], 1.0), simplex)
    assert torch.equal(repulsion(1.01 * simplex, simplex[:0], 1.0), 1.01 * simplex)


@pytest.mark.parametrize("place", [lennard_jones, printed_alignment, repulsion])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_place_is_of_the_type_it_was_asked_in_and_finite_even_without_jitter(
    place: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    same = torch.ones(3, 4, dtype=dtype)
    end = place(same, same[:1], 5.0, steps=20)
    assert end.dtype == dtype and end.isfinite().all()
    alone = place(same[:1], same[:0], 5.0, steps=20)
    assert torch.equal(alone, same[:1])  # nothing acts on a point that is alone


# -- the regular simplex -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "size", "dim", "sigma"), [(10, 2, 9, 1.0), (10, 2, 9, 0.2), (10, 2, 12, 5.0), (20, 5, 19, 5.0)]
)
def test_with_dimensions_enough_all_classes_are_equally_far_apart(
    classes: int, size: int, dim: int, sigma: float
) -> None:
    apart = torch.pdist(in_tasks(lennard_jones, classes, size, dim, sigma)) / (2 ** (1 / 6) * sigma)
    assert len(apart) == classes * (classes - 1) // 2
    assert (apart - 1).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("classes", "size", "dim", "sigma"), [(10, 2, 6, 1.0), (10, 2, 8, 0.2), (10, 2, 8, 5.0), (20, 5, 8, 5.0)]
)
def test_below_that_they_cannot_be_but_none_comes_too_close(classes: int, size: int, dim: int, sigma: float) -> None:
    placed = in_tasks(lennard_jones, classes, size, dim, sigma)
    apart = torch.cdist(placed, placed).fill_diagonal_(math.inf) / (2 ** (1 / 6) * sigma)
    closest = apart.amin(1)
    assert torch.pdist(placed).max() / torch.pdist(placed).min() > 1.3
    assert closest.min() > 0.9 and closest.max() < 1.01


def test_norms_stay_bounded_over_ten_tasks() -> None:
    placed = in_tasks(lennard_jones, 20, 2, 40, 5.0)
    assert placed.norm(dim=1).max() < 5.61  # no further from the origin than two classes from each other


# -- Eq. 9 as printed --------------------------------------------------------------------------------------------------


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


@settings(max_examples=40)
@given(st.integers(2, 8), st.integers(0, 4), st.integers(2, 8), st.integers(0, 99))
def test_the_printed_step_points_uphill(moving: int, fixed: int, dim: int, seed: int) -> None:
    p, still = some_points(moving, fixed, dim, seed)
    step = printed_step(p, still, 1.0)
    assert cosine(step, -gradient(p, still, 1.0)) < -0.9
    small = 1e-6 / step.norm() * step
    assert energy(p + small, still, 1.0) > energy(p, still, 1.0)
    assert energy(p - small, still, 1.0) < energy(p, still, 1.0)


def test_the_printed_step_is_almost_the_opposite_of_descent_on_random_points() -> None:
    cosines = [cosine(printed_step(p, p[:0], 1.0), -gradient(p, p[:0], 1.0)) for p in (normal(10, 5), normal(20, 8))]
    assert max(cosines) < -0.95  # -0.995 in methods.md


def test_the_printed_step_by_hand() -> None:
    pair = torch.tensor([[0.0, 0.0], [0.0, 2.0]]).double()
    bracket = 24 * 3.0 * (2 / 2**13 - 1 / 2**7)  # negative: too far apart
    assert torch.allclose(printed_step(pair, NONE, 1.0, 3.0), bracket * torch.tensor([[0, 2.0], [0, -2.0]]).double())
    rest = REST * pair / 2
    assert printed_step(rest, NONE, 1.0).abs().max() < 1e-12


def test_the_printed_alignment_pulls_close_pairs_together_and_pushes_far_ones_apart() -> None:
    for apart, further in [(0.9, False), (1.5, True)]:
        start = torch.tensor([[0.0, 0.0], [apart, 0.0]]).double()
        end = printed_alignment(start, NONE, 1.0, steps=3)
        assert (torch.pdist(end) > apart).item() is further


@pytest.mark.parametrize("sigma", [1.0, 5.0])
def test_the_printed_alignment_ends_finite_far_above_descent(sigma: float) -> None:
    descended = in_tasks(lennard_jones, 10, 2, 9, sigma)
    printed = in_tasks(printed_alignment, 10, 2, 9, sigma, steps=200)
    assert printed.isfinite().all()
    assert energy(descended, descended[:0], sigma).item() == pytest.approx(
        -45, abs=1e-3
    )  # each of 45 pairs at its least
    assert energy(printed, printed[:0], sigma) > 1e6
    assert torch.pdist(printed).min() < 0.1 * sigma  # it lets classes collapse


def test_no_printed_step_is_longer_than_it_may_be() -> None:
    p, still = STARTS["nearly coincident with old ones"]
    for _ in range(20):
        then = printed_alignment(p, still, 1.0, steps=1)
        assert (then - p).norm(dim=1).max() <= LONGEST_STEP * (1 + 1e-9)
        p = then


# -- repulsion ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [1.0, 5.0])
@pytest.mark.parametrize(("moving", "fixed", "dim"), [(2, 0, 3), (5, 0, 4), (3, 6, 2), (4, 8, 9)])
def test_repulsion_stops_as_soon_as_all_are_far_enough(moving: int, fixed: int, dim: int, sigma: float) -> None:
    still = REST * sigma * normal(fixed, dim)
    p = jittered(torch.zeros(moving, dim, dtype=torch.float64), sigma, torch.Generator().manual_seed(0))
    end = repulsion(p, still, sigma)
    assert end.isfinite().all() and distances(end, still).min() >= 2 ** (1 / 6) * sigma
    enough = next(k for k in range(3000) if torch.equal(repulsion(p, still, sigma, steps=k), end))
    assert enough > 1
    path = [repulsion(p, still, sigma, steps=k) for k in (enough - 1, enough, enough + 1)]
    assert distances(path[0], still).min() < 2 ** (1 / 6) * sigma
    assert torch.equal(path[1], path[2])


def test_repulsion_is_newtons_law_from_rest() -> None:
    pair = torch.tensor([[0.0, 0.0], [0.5, 0.0]]).double()
    velocity, gap = 0.0, 0.5
    for steps in (1, 2, 3):
        velocity += 0.01 * 2.0 / gap**2  # of each, the other way
        gap += 2 * 0.01 * velocity
        assert torch.pdist(repulsion(pair, NONE, 1.0, charge=2.0, dt=0.01, steps=steps)).item() == pytest.approx(gap)


def test_repulsion_takes_no_step_longer_than_it_may_be() -> None:
    p, still = STARTS["nearly coincident with old ones"]
    path = [repulsion(p, still, 1.0, steps=steps) for steps in range(20)]
    lengths = [(after - before).norm(dim=1).max().item() for before, after in zip(path[:-1], path[1:], strict=True)]
    assert max(lengths) <= LONGEST_STEP * (1 + 1e-9) and lengths[0] == pytest.approx(LONGEST_STEP)


def test_repulsion_places_classes_elsewhere_than_lennard_jones() -> None:
    repelled, descended = (in_tasks(place, 10, 2, 9, 5.0) for place in (repulsion, lennard_jones))
    assert torch.pdist(repelled).min() >= 2 ** (1 / 6) * 5.0
    assert torch.pdist(repelled).max() > 1.3 * torch.pdist(descended).max()  # nothing holds it together
    assert not torch.allclose(repelled, descended, atol=0.5)


def test_the_stopping_rule_keeps_norms_bounded_over_ten_tasks() -> None:
    for sigma in (1.0, 5.0):
        placed = in_tasks(repulsion, 30, 3, 40, sigma)
        norms = placed.norm(dim=1).view(10, 3).amax(1)
        assert torch.pdist(placed).min() >= 2 ** (1 / 6) * sigma
        assert norms.max() < 1.5 * sigma  # without the rule, 3000 steps lead to more than 60 sigma


# -- jitter and the nearest centroid -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jitter_moves_a_little_in_every_dimension_and_parts_what_coincides(dtype: torch.dtype) -> None:
    same = torch.ones(4, 50, dtype=dtype)
    moved = jittered(same, 5.0, torch.Generator().manual_seed(0))
    by = (moved - same) / 5.0
    assert moved.dtype == dtype and (by != 0).all()
    assert 0.8e-3 < by.std().item() < 1.2e-3 and by.abs().max() < 5e-3
    assert torch.pdist(moved).min() > 0
    assert torch.linalg.matrix_rank(by.double()) == 4  # not along one line: motion would stay in it


def test_equal_generators_jitter_equally() -> None:
    one, again, other = (jittered(TRIANGLE, 1.0, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_scores_are_negative_distances_and_unseen_classes_have_none() -> None:
    codes, centroids = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    seen = torch.tensor([True, True, False])
    scores = nearest(codes, centroids, seen)
    assert scores[0].tolist() == [-5.0, -1.0, -math.inf]
    assert scores[1].tolist() == pytest.approx([0.0, -math.sqrt(18), -math.inf])
    assert scores.argmax(1).tolist() == [1, 0]
    assert nearest(codes, centroids, torch.ones(3, dtype=torch.bool)).argmax(1).tolist() == [2, 0]


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 8), st.integers(0, 99))
def test_the_best_score_is_the_nearest_seen_centroid(count: int, classes: int, dim: int, seed: int) -> None:
    codes, centroids = normal(count, dim, seed=seed), normal(classes, dim, seed=seed + 1)
    seen = normal(classes, seed=seed + 2) > 0
    seen[seed % classes] = True
    best = nearest(codes, centroids, seen).argmax(1).tolist()
    own = [min((j for j in range(classes) if seen[j]), key=lambda j, z=z: torch.dist(z, centroids[j])) for z in codes]
    assert best == own


def test_far_points_are_brought_within_reach_and_join_the_simplex() -> None:
    draws = torch.Generator().manual_seed(0)
    fixed = lennard_jones(jittered(torch.zeros(5, 20), 2.0, draws), torch.zeros(0, 20), 2.0)
    far = torch.zeros(5, 20)
    far[:, 0] = 100.0
    near = within_reach(far, fixed, 2.0)
    assert torch.allclose((near - fixed.mean(0)).norm(dim=1), torch.tensor(4.0))
    joined = torch.cat([fixed, lennard_jones(jittered(near, 2.0, draws), fixed, 2.0)])
    assert torch.allclose(torch.pdist(joined), torch.tensor(2 ** (1 / 6) * 2.0), rtol=1e-3)


def test_points_within_reach_stay_where_they_are() -> None:
    points = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(within_reach(points, torch.zeros(0, 6), 100.0), points)
    same = torch.ones(3, 6)
    assert torch.equal(within_reach(same, torch.zeros(0, 6), 1.0), same), "coincident points have no direction"
