"""Coding rates: how many nats it takes to write features down up to an error, and what classes save of them.

Ma, Derksen, Hong and Wright, "Segmentation of Multivariate Mixed Data via Lossy Data Coding and Compression", TPAMI
2007; Yu, Chan, You, Song and Ma, "Learning Diverse and Discriminative Representations via the Principle of Maximal
Coding Rate Reduction", NeurIPS 2020. Features are rows, `eps` the squared error that is allowed.

Each rate is half a log-determinant, read off the diagonal of a Cholesky factor in float64. It is taken of the products
between rows where these are fewer than the columns: both have the same determinant. The rows of all classes need one
factor only. Products between classes are set to 0; then the factor of all is that of each class by itself.
"""

import torch
from torch import Tensor


def coding_rate(z: Tensor, eps: float) -> Tensor:
    """R(Z) = 1/2 logdet(I + d / (n eps) Z^T Z) of n rows of d numbers."""
    n, d = z.shape
    scaled = z.double() * (d / (n * eps)) ** 0.5
    return _half_logdet(scaled @ scaled.T if n <= d else scaled.T @ scaled).sum()


def class_rates(z: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Return what each row has in R(Z_c) of its class c: those of a class add up to it, (n,)."""
    same = labels[:, None] == labels
    scaled = z.double() * (z.shape[1] / (same.sum(1).double() * eps)).sqrt()[:, None]
    return _half_logdet(scaled @ scaled.T * same)


def rate_reduction(z: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Delta R(Z): the rate of all rows less the mean rate of their classes, each weighed by its rows."""
    share = (labels[:, None] == labels).double().mean(1)
    return coding_rate(z, eps) - (share * class_rates(z, labels, eps)).sum()


def class_gaps(z: Tensor, other: Tensor, labels: Tensor, eps: float) -> Tensor:
    """Return what each row has in Delta R(Z_c, Z'_c) of its class c: 0 where both sets of rows span the same, (n,).

    This is the rate of both sets together less the mean of their own.
    """
    both = class_rates(torch.cat([z, other]), torch.cat([labels, labels]), eps).view(2, -1).sum(0)
    return both - (class_rates(z, labels, eps) + class_rates(other, labels, eps)) / 2


def _half_logdet(products: Tensor) -> Tensor:
    """Return the terms of 1/2 logdet(I + products)."""
    eye = torch.eye(len(products), dtype=products.dtype, device=products.device)
    factor, _ = torch.linalg.cholesky_ex(eye + products)  # never fails: I + products is positive definite
    terms: Tensor = factor.diagonal().log()
    return terms
