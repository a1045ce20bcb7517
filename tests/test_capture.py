"""What keeps a loss from being captured, and what stands around a captured step: both without a GPU."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fcil.federation.capture import Counters, Halves
from fcil.federation.purity import Impure, Watch, identity
from fcil.methods import METHODS
from fcil.networks import build
from fcil.records import Weights
from tests.conftest import GROUPED
from tests.test_losses import CASES, last_fits, loss_of, some_inputs

X = torch.arange(6.0).view(2, 3)
GENERATOR = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda: X * X.sum().item(), "reads a value"),
        (lambda: X if X.sum() > 3 else -X, "reads a value"),
        (lambda: X * float(X.max()), "reads a value"),
        (lambda: X[X > 2].sum(), "shape of a result depends on values"),
        (lambda: X.nonzero().sum(), r"depends on values \(nonzero\)"),
        (lambda: torch.masked_select(X, X > 2), "depends on values"),
        (lambda: X.unique(), "depends on values"),
        (lambda: X.clone().index_put_((X > 2,), torch.zeros(())), "depends on values"),
        (lambda: X[0].repeat_interleave(torch.tensor([1, 2, 3])), "depends on values"),
        (lambda: torch.bincount(torch.tensor([1, 2])), "depends on values"),
        (lambda: torch.linalg.svd(X)[0], r"whether a decomposition succeeded \(_linalg_svd\)"),
        (lambda: torch.linalg.eigh(X.T @ X)[0], "whether a decomposition succeeded"),
        (lambda: torch.linalg.cholesky(torch.eye(3)), "whether a decomposition succeeded"),
        (lambda: torch.linalg.solve(torch.eye(2), X), "whether a decomposition succeeded"),
        (lambda: torch.randn(3) * X, r"draws \(randn\) without the batch's generator"),
        (lambda: F.dropout(X, 0.5), "without the batch's generator"),
        (lambda: torch.bernoulli(X / 9), "without the batch's generator"),
        (lambda: torch.empty(3).normal_(), "without the batch's generator"),
    ],
)
def test_what_cannot_be_captured_is_named(loss: Any, why: str) -> None:
    with Watch(), pytest.raises(Impure, match=why):
        loss()


@pytest.mark.parametrize(
    "loss",
    [
        lambda: F.cross_entropy(X.masked_fill(X > 4, -1e4), torch.tensor([0, 1])),
        lambda: X[torch.tensor([1, 0])],
        lambda: torch.where(X > 2, X, -X).sum(),
        lambda: torch.linalg.qr(X)[1] + torch.linalg.cholesky_ex(torch.eye(3))[0][:2],
        lambda: torch.randn(3, generator=GENERATOR) + torch.randint(0, 3, (3,), generator=GENERATOR),
        lambda: torch.empty(3).normal_(generator=GENERATOR),
        lambda: F.interpolate(X.view(1, 1, 2, 3), scale_factor=2.0).mean(),
    ],
)
def test_pure_tensor_code_passes(loss: Any) -> None:
    with Watch():
        watched = loss()
    assert isinstance(watched, Tensor)


@pytest.mark.parametrize(
    ("method", "settings"), CASES + [pytest.param(name, {"norm": "group"}, id=f"{name}-group") for name in GROUPED]
)
def test_every_method_that_says_so_can_be_captured(method: str, settings: dict[str, Any]) -> None:
    found = []
    for parts, fit in last_fits(method, settings):
        loss = loss_of(parts, fit, fit.given, torch.Generator())
        try:
            identity(fit.loss, parts.engine.client)
            with Watch():
                loss(*some_inputs(parts, fit, slice(4), 0))
        except Impure as why:
            found.append(str(why))
    assert METHODS[method].captured == (not found), found


class Client:
    def loss(self, *_: Any) -> Tensor:
        return X.sum()


def module_loss(*_: Any) -> Tensor:
    return X.sum()


def test_a_loss_is_known_again_unless_it_may_be_another() -> None:
    one, other = Client(), Client()
    assert identity(one.loss, one) == identity(one.loss, one) != identity(module_loss, one)
    assert identity(module_loss, one) == identity(module_loss, other)

    def made_anew(scale: float) -> Any:
        return lambda *_: X * scale

    def with_default(nets: Any, batch: Any, given: Any, scale: float = 2.0) -> Tensor:
        return X * scale

    for loss in (made_anew(2.0), with_default, partial(module_loss, 1), one, other.loss):
        with pytest.raises(Impure, match="may be another one for every Fit"):
            identity(loss, one)


# -- what stands around a captured step, which needs no GPU either -----------------------------------------------------


def a_net() -> nn.Module:
    torch.manual_seed(0)
    return build("small", (1, 8, 8), 6).train()


def stepped(net: nn.Module, halves: Halves | None) -> tuple[Tensor, Weights]:
    """Take gradients in half precision, with or without the copies; the loss also looks at the weights themselves."""
    images = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with halves or nullcontext(), torch.autocast("cpu", torch.bfloat16):
        scores = net(images) + net(images.flip(3))
        value = scores.square().mean() + 1e-3 * torch.stack([p.square().sum() for p in net.parameters()]).sum()
    value.backward()
    if halves:
        halves.gather()
    return value.detach(), {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def test_half_weights_copied_at_once_are_what_autocasting_makes_of_them() -> None:
    plain, copied = a_net(), a_net()
    value, gradients = stepped(plain, None)
    halves = Halves({"net": copied, "again": copied})  # a network under two names is one
    for _ in range(2):  # gradients do not pile up in the copies
        copied.zero_grad()
        found, others = stepped(copied, halves)
        assert torch.allclose(found, value) and others.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert others[name].dtype == torch.float32
            assert torch.allclose(others[name], gradient, rtol=2e-2, atol=2e-3 * float(gradient.abs().max())), name
    assert not any("forward" in vars(module) for module in copied.modules())


def test_half_weights_follow_theirs_and_stand_back_for_others() -> None:
    layer = nn.Linear(3, 2)
    halves = Halves({"net": layer})
    with torch.no_grad():
        layer.weight.fill_(2.0)
    zeros = {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}
    with halves, torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(layer(torch.ones(1, 3)).float(), 6.0 + layer.bias, rtol=2e-2, atol=2e-2)
        assert functional_call(layer, zeros, torch.ones(1, 3)).abs().max() == 0
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    once = Halves({"net": tied})
    assert len(once.learning) == 1
    for weight in tied.parameters():
        weight.requires_grad_(False)
    frozen = Halves({"net": tied})
    with torch.no_grad():
        tied[0].weight.fill_(3.0)
    assert frozen.learning == [] and not torch.equal(frozen.frozen[0][1].float(), tied[0].weight)
    frozen.refresh_frozen()
    assert torch.equal(frozen.frozen[0][1].float(), tied[0].weight)


def test_batches_are_counted_once_a_training() -> None:
    net = a_net()
    counters, images = Counters({"net": net}), torch.rand(4, 1, 8, 8)
    with counters.counting():
        net(images)
        net(images)
    before = [int(t) for t in counters.tensors]
    with counters.stopped():
        net(images)
    assert [int(t) for t in counters.tensors] == before == [2, 2, 2] and counters.each == before
    counters.add(5)
    assert [int(layer.num_batches_tracked) for layer in counters.layers] == [12, 12, 12]
    with pytest.raises(ZeroDivisionError), counters.stopped():
        raise ZeroDivisionError
    assert all(layer.num_batches_tracked is not None for layer in counters.layers)


def test_where_nothing_counts_batches_there_is_nothing_to_add_up() -> None:
    net = build("small", (1, 8, 8), 6, "group").train()
    counters = Counters({"net": net})
    with counters.counting():
        net(torch.rand(4, 1, 8, 8))
    with counters.stopped():
        net(torch.rand(4, 1, 8, 8))
    counters.add(5)
    assert counters.layers == [] and counters.each == []
