"""Losses against known answers (methods.md 11), hand-computed values, and tracing."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fcil.blocks.losses import (
    cross_entropy,
    distillation,
    divergence_from_normal,
    expected_squared_error,
    log_shares,
    masked,
    norm_error,
    squared_distance,
    squared_error,
    weighted_distance,
)
from fcil.federation.engine import threads
from fcil.method import Batch, Fit
from fcil.methods import METHODS
from fcil.parts import Parts, assemble
from fcil.records import flatten, unflatten
from tests.conftest import tiny_plan

LOGITS = torch.tensor([[1.0, 2.0, 3.0, 0.5], [0.2, -1.0, 0.3, 2.0]])
LABELS = torch.tensor([2, 1])
TEACHER = torch.tensor([[2.0, 1.0, 7.0, 7.0], [-1.0, 0.5, -7.0, 0.0]])  # what it says of the new classes is no matter
ALL, OLD, NEW = torch.ones(4, dtype=torch.bool), torch.tensor([1, 1, 0, 0]).bool(), torch.tensor([0, 0, 1, 1]).bool()
NONE = torch.zeros(4, dtype=torch.bool)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As clients compute; on a busy machine, a second thread only waits for the first."""
    with threads(1):
        yield


def test_masked_rules_classes_out() -> None:
    assert masked(LOGITS, NEW).tolist() == [
        [-math.inf, -math.inf, 3.0, 0.5],
        [-math.inf, -math.inf, *LOGITS[1, 2:].tolist()],
    ]
    assert torch.equal(masked(LOGITS, ALL), LOGITS)


def test_cross_entropy_over_all_classes() -> None:
    assert cross_entropy(LOGITS, LABELS, ALL).item() == pytest.approx(1.897826, abs=1e-6)


def test_cross_entropy_over_the_new_classes_alone() -> None:
    assert cross_entropy(LOGITS[:1], LABELS[:1], NEW).item() == pytest.approx(0.078890, abs=1e-6)  # TARGET's line
    expected = -math.log(math.exp(2) / (math.exp(0.3) + math.exp(2)))
    assert cross_entropy(LOGITS[1:], torch.tensor([3]), NEW).item() == pytest.approx(expected, rel=1e-6)


def test_distillation_is_the_divergence_over_the_old_classes() -> None:
    assert distillation(LOGITS, TEACHER, OLD, 2.0).item() == pytest.approx(0.679935, abs=1e-6)


def test_distillation_by_hand_at_another_temperature() -> None:
    def softmax(a: float, b: float) -> tuple[float, float]:
        return math.exp(a) / (math.exp(a) + math.exp(b)), math.exp(b) / (math.exp(a) + math.exp(b))

    expected = 0.0
    for student, teacher in zip(LOGITS.tolist(), TEACHER.tolist(), strict=True):
        p, q = softmax(teacher[0] / 3, teacher[1] / 3), softmax(student[0] / 3, student[1] / 3)
        expected += 9 / 2 * sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert distillation(LOGITS, TEACHER, OLD, 3.0).item() == pytest.approx(expected, rel=1e-5)


def test_distillation_is_nothing_without_classes_or_difference() -> None:
    assert distillation(LOGITS, TEACHER, NONE, 2.0).item() == 0.0
    assert distillation(LOGITS, LOGITS, OLD, 2.0).item() == pytest.approx(0.0, abs=1e-7)
    assert distillation(LOGITS, LOGITS + 5, OLD, 2.0).item() == pytest.approx(
        0.0, abs=1e-6
    )  # softmax has no zero point
    assert distillation(LOGITS, TEACHER, torch.tensor([1, 0, 0, 0]).bool(), 2.0).item() == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("classes", [OLD, NEW, ALL, NONE])
def test_gradients_are_zero_where_classes_are_masked_and_finite_everywhere(classes: Tensor) -> None:
    logits = (1e3 * LOGITS).requires_grad_()
    total = distillation(logits, 1e3 * TEACHER, classes, 2.0)
    if classes.any():
        labels = classes.nonzero()[:1, 0].expand(2)
        total = total + cross_entropy(logits, labels, classes)
    total.backward()
    assert total.isfinite() and logits.grad.isfinite().all()
    assert (logits.grad[:, ~classes] == 0).all()
    if classes.sum() > 1:
        assert (logits.grad[:, classes] != 0).any()


def test_no_gradient_flows_where_there_is_nothing_to_distil() -> None:
    logits = LOGITS.clone().requires_grad_()
    distillation(logits, TEACHER, NONE, 2.0).backward()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize(
    ("counts", "least", "shares"),
    [
        ([4.0, 2.0, 2.0, 0.0], 0.2, [0.5, 0.25, 0.25, 1.0]),  # as they come, for a quarter is new
        ([4.0, 2.0, 2.0, 0.0], 0.4, [0.4, 0.2, 0.4, 1.0]),  # old ones keep their proportions
        ([0.0, 0.0, 3.0, 1.0], 0.2, [1.0, 1.0, 0.75, 0.25]),  # nothing is old
        ([3.0, 1.0, 0.0, 0.0], 0.2, [0.75, 0.25, 1.0, 1.0]),  # nothing is new
        ([0.0, 0.0, 0.0, 0.0], 0.2, [1.0, 1.0, 1.0, 1.0]),  # nothing at all
    ],
)
def test_shares_of_classes_by_hand(counts: list[float], least: float, shares: list[float]) -> None:
    assert log_shares(torch.tensor(counts), NEW, least).exp().tolist() == pytest.approx(shares)


def test_distances_by_hand() -> None:
    here = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])}
    there = {"w": torch.tensor([[0.0, 4.0]]), "b": torch.tensor([0.0]), "buffer": torch.tensor(7)}
    assert squared_distance(here, there).item() == 1 + 4 + 9
    weight = {"w": torch.tensor([[10.0, 0.5]]), "b": torch.tensor([0.0])}
    assert weighted_distance(here, there, weight).item() == 10 + 2 + 0
    assert squared_distance(here, here).item() == weighted_distance(here, here, weight).item() == 0


def test_the_gradient_of_a_distance_pulls_back() -> None:
    here = {"w": torch.tensor([1.0, 2.0], requires_grad=True)}
    (0.5 * weighted_distance(here, {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 1.0])})).backward()
    assert here["w"].grad.tolist() == [3.0, 2.0]


# -- the terms of an autoencoder's loss --------------------------------------------------------------------------------


def doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(2, 4), (2, 1, 2, 2), (2, 4, 1, 1)])
def test_errors_of_rows_and_of_images_by_hand(shape: tuple[int, ...]) -> None:
    one, other = doubles([[1, 2, 3, 4], [0, 0, 0, 0]]).view(shape), doubles([[1, 0, 0, 4], [3, 0, 4, 0]]).view(shape)
    assert squared_error(one, other).tolist() == squared_error(other, one).tolist() == [4 + 9, 9 + 16]
    assert norm_error(one, other).tolist() == norm_error(other, one).tolist() == pytest.approx([math.sqrt(13), 5])
    assert squared_error(one, one).tolist() == norm_error(one, one).tolist() == [0, 0]


def test_a_norm_pulls_with_the_same_force_from_everywhere_and_with_none_at_zero() -> None:
    here = doubles([[3, 4], [0, 0], [3e-9, 4e-9]]).requires_grad_()
    norm_error(here, torch.zeros_like(here)).sum().backward()
    assert here.grad[1].tolist() == [0, 0]
    assert torch.allclose(here.grad[[0, 2]], doubles([[0.6, 0.8], [0.6, 0.8]]))


def test_the_divergence_from_the_standard_normal_by_hand() -> None:
    mean, logvar = doubles([[0, 0], [3, 4], [0, 0], [1, 0]]), doubles([[0, 0], [0, 0], [math.log(4), 0], [0, -1]])
    expected = [0, 25 / 2, (3 - math.log(4)) / 2, (1 + math.exp(-1)) / 2]
    assert divergence_from_normal(mean, logvar).tolist() == pytest.approx(expected)


def test_the_divergence_is_that_of_the_distributions() -> None:
    mean, logvar = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ours = torch.distributions.Normal(mean, (logvar / 2).exp())
    standard = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
    expected = torch.distributions.kl_divergence(ours, standard).sum(1)
    assert torch.allclose(divergence_from_normal(mean, logvar), expected)


def test_the_expected_error_by_hand() -> None:
    mean, target = doubles([[1, 2], [1, 2]]), doubles([[0, 4], [1, 2]])
    logvar = doubles([[0, math.log(9)], [-800, -800]])
    assert expected_squared_error(mean, logvar, target).tolist() == pytest.approx([1 + 4 + 1 + 9, 0])


def test_the_expected_error_is_what_draws_have_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, logvar, target = torch.randn(3, 1, 6, generator=generator, dtype=torch.float64)
    draws = mean + (logvar / 2).exp() * torch.randn(100_000, 6, generator=generator, dtype=torch.float64)
    errors = squared_error(draws, target.expand_as(draws))
    off = (errors.mean() - expected_squared_error(mean, logvar, target)).abs()
    assert off < 4 * errors.std() / math.sqrt(len(errors)) < 0.1


def minimiser(loss: Callable[..., Tensor], *start: Tensor) -> list[Tensor]:
    """Where the loss is least, found by descent."""
    found = [value.clone().requires_grad_() for value in start]
    descent = torch.optim.LBFGS(
        found, max_iter=500, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def slope() -> Tensor:
        descent.zero_grad()
        total = loss(*found).sum()
        total.backward()
        return total

    descent.step(slope)
    return [value.detach() for value in found]


P, OLD_CODE = doubles([[3.0, -2.0, 0.5]]), doubles([[-1.0, 1.0, 4.0]])  # a centroid, and what the old encoder says


@pytest.mark.parametrize("pull", [1.0, 10.0, 100.0])
def test_the_divergence_draws_a_code_from_its_centroid_and_leaves_it_a_spread(pull: float) -> None:
    def loss(mean: Tensor, logvar: Tensor) -> Tensor:
        return divergence_from_normal(mean, logvar) + pull * expected_squared_error(mean, logvar, P)

    mean, logvar = minimiser(loss, torch.zeros_like(P), torch.zeros_like(P))
    assert torch.allclose(mean, P * 2 * pull / (1 + 2 * pull), atol=1e-6)
    assert torch.allclose(logvar.exp(), torch.full_like(P, 1 / (1 + 2 * pull)), rtol=1e-6)
    if pull == 100.0:
        assert (mean / P).tolist()[0] == pytest.approx([0.995] * 3, abs=1e-4)
        assert (logvar / 2).exp().tolist()[0] == pytest.approx([0.0705] * 3, abs=1e-4)


@pytest.mark.parametrize(("pull", "weight"), [(1.0, 1.0), (100.0, 1.0), (10.0, 30.0)])
def test_squared_distillation_makes_a_code_lag_by_a_share_of_its_way(pull: float, weight: float) -> None:
    (code,) = minimiser(lambda z: pull * squared_error(z, P) + weight * squared_error(z, OLD_CODE), OLD_CODE)
    assert torch.allclose(code, (pull * P + weight * OLD_CODE) / (pull + weight), atol=1e-6)
    assert torch.allclose(code - P, weight / (pull + weight) * (OLD_CODE - P), atol=1e-6)


@pytest.mark.parametrize(("pull", "weight"), [(1.0, 1.0), (100.0, 1.0), (10.0, 30.0)])
def test_distillation_of_a_norm_makes_a_code_lag_by_a_distance(pull: float, weight: float) -> None:
    (code,) = minimiser(lambda z: pull * squared_error(z, P) + weight * norm_error(z, OLD_CODE), P + 0.1)
    assert norm_error(code, P).item() == pytest.approx(weight / (2 * pull), rel=1e-6)
    towards = (OLD_CODE - P) / norm_error(OLD_CODE, P)
    assert torch.allclose(code, P + weight / (2 * pull) * towards, atol=1e-6)


# -- a loss is a pure tensor function: it can be traced without values -------------------------------------------------

Inputs = tuple[Tensor, Tensor, dict[str, Tensor]]  # images, labels, extra
CASES = [pytest.param(method, {}, id=method) for method in METHODS] + [
    pytest.param("hr-literal", {"fresh_noise": True, "distill_on": "replay", "distill_form": "norm"}, id="hr-fresh"),
    pytest.param("hr-literal", {"variational": False, "scale": "printed"}, id="hr-deterministic"),
]


def last_fits(method: str, settings: dict[str, Any]) -> list[tuple[Parts, Fit]]:
    """Every kind of Fit that a method yields in its second task, with the networks it is for."""
    parts = assemble(tiny_plan(method, tasks=2, rounds=1, steps=1, **settings), "cpu")
    caught: dict[object, Fit] = {}
    do = parts.engine.fit

    def fit(wanted: Fit, *rest: object) -> object:
        caught[getattr(wanted.loss, "__qualname__", wanted.loss)] = wanted
        return do(wanted, *rest)  # type: ignore[arg-type]

    parts.engine.fit = fit  # type: ignore[method-assign, assignment]
    for task in parts.scenario.tasks:
        caught.clear()
        parts.door.begin(task)
        for _ in parts.server.learn_task(task, parts.door):
            parts.door.finish()
        parts.door.finish()
    assert caught
    return [(parts, wanted) for wanted in caught.values()]


def some_inputs(parts: Parts, fit: Fit, rows: slice, seed: int) -> Inputs:
    """Images that are noise, with the labels and the extra of these rows of the pool."""
    labels = fit.pool.labels[rows]
    images = torch.rand(len(labels), *parts.setting.shape, generator=torch.Generator().manual_seed(seed))
    return images, labels, {name: values[rows] for name, values in fit.pool.extra.items()}


def loss_of(parts: Parts, fit: Fit, given: Any, generator: torch.Generator) -> Callable[..., Tensor]:
    """The loss as the engine calls it: with the networks that are loaded, of which some train."""
    parts.engine.slots[0].networks.thaw(fit)
    nets = {name: parts.engine.nets[name] for name in fit.load}
    beside = {
        name: Batch(pool.images[:4].float(), pool.labels[:4], generator, {n: t[:4] for n, t in pool.extra.items()})
        for name, pool in fit.beside.items()
        if len(pool)
    }

    def loss(images: Tensor, labels: Tensor, extra: dict[str, Tensor]) -> Tensor:
        return fit.loss(nets, Batch(images, labels, generator, extra, beside), given)

    return loss


def evaluated(function: Callable[..., Tensor], inputs: Inputs, generator: torch.Generator, seed: int) -> Tensor:
    """Evaluate a loss, or its graph, which draws from the generator it was traced with, on the same random stream."""
    generator.manual_seed(seed)
    return function(*inputs)


def faked(mode: FakeTensorMode, given: Any) -> Any:
    if given is None or isinstance(given, Tensor):
        return given if given is None else mode.from_tensor(given)
    return unflatten(type(given), {n: mode.from_tensor(t) if t.ndim else t for n, t in flatten(given).items()})


@pytest.mark.parametrize(("method", "settings"), CASES)
def test_every_loss_runs_without_values(method: str, settings: dict[str, Any]) -> None:
    for parts, fit in last_fits(method, settings):
        images, labels, extra = some_inputs(parts, fit, slice(4), 0)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # knows shapes only: reading a value raises
            loss = loss_of(parts, fit, faked(mode, fit.given), torch.Generator())
            known = {name: mode.from_tensor(values) for name, values in extra.items()}
            total = loss(mode.from_tensor(images), mode.from_tensor(labels), known)
            assert total.shape == () and total.requires_grad
            total.backward()


@pytest.mark.parametrize(("method", "settings"), CASES)
def test_every_loss_is_the_same_graph_for_other_values(method: str, settings: dict[str, Any]) -> None:
    for parts, fit in last_fits(method, settings):
        generator = torch.Generator()
        loss = loss_of(parts, fit, fit.given, generator)
        one, other = some_inputs(parts, fit, slice(4), 0), some_inputs(parts, fit, slice(-4, None), 1)
        graph = make_fx(loss)(*one)
        for seed in (0, 1):
            expected = evaluated(loss, other, generator, seed)
            assert torch.allclose(evaluated(graph, other, generator, seed), expected)
            assert not torch.allclose(evaluated(loss, one, generator, seed), expected)


def test_a_loss_that_reads_a_value_would_be_caught() -> None:
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        fake = mode.from_tensor(LOGITS)
        if fake.max() > 2:
            raise AssertionError("a value was read")
