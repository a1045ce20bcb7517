"""Coding rates against methods.md 11 and against determinants, class by class."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.rates import class_gaps, class_rates, coding_rate, rate_reduction
from fcil.federation.purity import Watch

Z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
LABELS = torch.tensor([0, 0, 1])


def naive(z: Tensor, eps: float) -> Tensor:
    """The printed formula."""
    n, d = z.shape
    return torch.logdet(torch.eye(d, dtype=z.dtype) + d / (n * eps) * z.T @ z) / 2


def naive_reduction(z: Tensor, labels: Tensor, eps: float) -> Tensor:
    parts = [z[labels == j] for j in labels.unique()]
    return naive(z, eps) - torch.stack([len(part) / len(z) * naive(part, eps) for part in parts]).sum()


def naive_gap(z: Tensor, other: Tensor, eps: float) -> Tensor:
    return naive(torch.cat([z, other]), eps) - (naive(z, eps) + naive(other, eps)) / 2


def drawn(rows: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, width, generator=generator, dtype=torch.float64))


def test_known_answers() -> None:
    assert coding_rate(Z, 1.0).item() == pytest.approx(0.6790617, abs=1e-7)
    assert rate_reduction(Z, LABELS, 1.0).item() == pytest.approx(0.0338615, abs=1e-7)
    share = torch.tensor([2 / 3, 2 / 3, 1 / 3])
    assert (share * class_rates(Z, LABELS, 1.0)).sum().item() == pytest.approx(0.6452002, abs=1e-7)


@pytest.mark.parametrize(("rows", "width"), [(5, 12), (12, 5), (1, 7), (8, 8)])
@pytest.mark.parametrize("eps", [1.0, 0.5])
def test_the_rate_is_the_printed_one_whether_rows_or_columns_are_more(rows: int, width: int, eps: float) -> None:
    z = drawn(rows, width)
    assert coding_rate(z, eps).item() == pytest.approx(naive(z, eps).item(), rel=1e-12)


def test_one_factor_has_the_rates_of_all_classes() -> None:
    z, labels = drawn(17, 6), torch.tensor([3, 0, 9, 3, 3, 0, 9, 9, 9, 0, 3, 0, 5, 3, 9, 0, 3])  # 5 has one row
    each = class_rates(z, labels, 0.7)
    for j in (0, 3, 5, 9):
        assert each[labels == j].sum().item() == pytest.approx(naive(z[labels == j], 0.7).item(), rel=1e-12)
    assert rate_reduction(z, labels, 0.7).item() == pytest.approx(naive_reduction(z, labels, 0.7).item(), rel=1e-12)


def test_a_gap_is_the_two_class_form_of_every_class() -> None:
    z, other, labels = drawn(9, 5), drawn(9, 5, 1), torch.tensor([1, 0, 1, 1, 4, 0, 0, 1, 1])
    each = class_gaps(z, other, labels, 1.0)
    for j in (0, 1, 4):
        own = labels == j
        assert each[own].sum().item() == pytest.approx(naive_gap(z[own], other[own], 1.0).item(), rel=1e-10)
        assert each[own].sum() > 0.01


def test_a_gap_is_0_where_both_sets_have_the_same_products() -> None:
    z, labels = drawn(9, 5), torch.tensor([1, 0, 1, 1, 0, 0, 0, 1, 1])
    turned = z.clone()
    turned[labels == 0] = turned[labels == 0].flip(0)  # in another order
    turned[labels == 1] = -turned[labels == 1]  # on the other side: the same subspace
    assert class_gaps(z, turned, labels, 1.0).sum().abs() < 1e-12
    other_class = z[torch.tensor([1, 0, 4, 5, 2, 3, 7, 6, 8])]
    assert class_gaps(z, other_class, labels, 1.0).sum() > 0.01


@pytest.mark.parametrize(
    ("ours", "printed"),
    [
        (lambda z, y: coding_rate(z, 1.0), lambda z, y: naive(z, 1.0)),
        (lambda z, y: rate_reduction(z, y, 1.0), lambda z, y: naive_reduction(z, y, 1.0)),
        (
            lambda z, y: class_gaps(z[:6], z[6:], y[:6], 1.0).sum(),
            lambda z, y: sum(naive_gap(z[:6][y[:6] == j], z[6:][y[:6] == j], 1.0) for j in (0, 1, 2)),
        ),
    ],
    ids=["rate", "reduction", "gap"],
)
def test_slopes_are_those_of_the_printed_formula(
    ours: Callable[[Tensor, Tensor], Tensor], printed: Callable[[Tensor, Tensor], Tensor]
) -> None:
    z, labels = drawn(12, 8).requires_grad_(), torch.tensor([0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0])
    (one,), (other,) = (torch.autograd.grad(f(z, labels), z) for f in (ours, printed))
    assert torch.allclose(one, other, atol=1e-12) and one.abs().max() > 1e-3


def test_rates_are_pure_and_in_float64_whatever_comes_in() -> None:
    with Watch():  # type: ignore[no-untyped-call]
        found = rate_reduction(Z, LABELS, 1.0) + class_gaps(Z, Z.flip(0), LABELS, 1.0).sum()
    assert found.dtype == torch.float64 and found.isfinite()


def test_repeated_rows_do_no_harm() -> None:
    z = drawn(1, 40).float().repeat(64, 1).requires_grad_()
    labels = torch.arange(64) % 3
    total = rate_reduction(z, labels, 1.0) + class_gaps(z, z.detach(), labels, 1.0).sum()
    total.backward()
    assert total.abs() < 1e-5 and z.grad is not None and z.grad.isfinite().all()
