"""Losses against known answers (methods.md 11), hand-computed values, and tracing."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fcil.blocks.losses import cross_entropy, distillation, masked, squared_distance, weighted_distance
from fcil.experiment import Parts, assemble
from fcil.method import Batch, Fit
from fcil.methods import METHODS
from fcil.records import flatten, unflatten
from tests.conftest import tiny_plan

LOGITS = torch.tensor([[1.0, 2.0, 3.0, 0.5], [0.2, -1.0, 0.3, 2.0]])
LABELS = torch.tensor([2, 1])
TEACHER = torch.tensor([[2.0, 1.0, 7.0, 7.0], [-1.0, 0.5, -7.0, 0.0]])  # what it says of the new classes is no matter
ALL, OLD, NEW = torch.ones(4, dtype=torch.bool), torch.tensor([1, 1, 0, 0]).bool(), torch.tensor([0, 0, 1, 1]).bool()
NONE = torch.zeros(4, dtype=torch.bool)


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


# -- a loss is a pure tensor function: it can be traced without values -------------------------------------------------


def last_fits(method: str) -> list[tuple[Parts, Fit]]:
    """Every kind of Fit that a method yields in its second task, with the networks it is for."""
    parts = assemble(tiny_plan(method, tasks=2, rounds=1, steps=1), "cpu")
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


def a_batch(parts: Parts, fit: Fit, images: Tensor, labels: Tensor) -> Batch:
    parts.engine._thaw(fit.trains)
    beside = {
        name: Batch(pool.images[:4].float(), pool.labels[:4], torch.Generator())
        for name, pool in fit.beside.items()
        if len(pool)
    }
    return Batch(images, labels, torch.Generator(), beside)


def loss_of(parts: Parts, fit: Fit) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda images, labels: fit.loss(parts.engine.nets, a_batch(parts, fit, images, labels), fit.given)


def faked(mode: FakeTensorMode, given: Any) -> Any:
    if given is None or isinstance(given, Tensor):
        return given if given is None else mode.from_tensor(given)
    return unflatten(type(given), {n: mode.from_tensor(t) if t.ndim else t for n, t in flatten(given).items()})


@pytest.mark.parametrize("method", METHODS)
def test_every_loss_runs_without_values(method: str) -> None:
    for parts, fit in last_fits(method):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # knows shapes only: reading a value raises
            given = faked(mode, fit.given)
            images = mode.from_tensor(torch.rand(4, *parts.setting.shape))
            labels = mode.from_tensor(torch.zeros(4, dtype=torch.int64))
            loss = fit.loss(parts.engine.nets, a_batch(parts, fit, images, labels), given)
            assert loss.shape == () and loss.requires_grad
            loss.backward()


@pytest.mark.parametrize("method", METHODS)
def test_every_loss_is_the_same_graph_for_other_values(method: str) -> None:
    for parts, fit in last_fits(method):
        generator = torch.Generator().manual_seed(0)
        one, other = (torch.rand(4, *parts.setting.shape, generator=generator) for _ in range(2))
        labels, others = fit.pool.labels[:4], fit.pool.labels[-4:]
        loss = loss_of(parts, fit)
        graph = make_fx(loss)(one, labels)
        expected = loss(other, others)
        assert torch.allclose(graph(other, others), expected) and not torch.allclose(expected, loss(one, labels))


def test_a_loss_that_reads_a_value_would_be_caught() -> None:
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        fake = mode.from_tensor(LOGITS)
        if fake.max() > 2:
            raise AssertionError("a value was read")
