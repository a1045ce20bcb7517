"""What keeps a loss from being captured is found without a GPU, too."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.federation.capture import Impure, Watch, identity
from fcil.methods import METHODS
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
        lambda: torch.randn(3, generator=GENERATOR) + torch.randint(0, 3, (3,), generator=GENERATOR),
        lambda: torch.empty(3).normal_(generator=GENERATOR),
        lambda: F.interpolate(X.view(1, 1, 2, 3), scale_factor=2.0).mean(),
    ],
)
def test_pure_tensor_code_passes(loss: Any) -> None:
    with Watch():
        watched = loss()
    assert isinstance(watched, Tensor)


@pytest.mark.parametrize(("method", "settings"), CASES)
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
