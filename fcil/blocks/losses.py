"""Losses as pure tensor functions: no branch on values, nothing read back to Python."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F


def masked(logits: Tensor, classes: Tensor) -> Tensor:
    """Rule out all classes but those where the boolean vector `classes` is true."""
    return logits.masked_fill(~classes, float("-inf"))


def one_hot(labels: Tensor, logits: Tensor) -> Tensor:
    """Return 1 for every image's own output and 0 for the others; PyTorch's own function reads values."""
    return (labels[:, None] == torch.arange(logits.shape[1], device=logits.device)).to(logits)


def cross_entropy(logits: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy of a softmax over `classes` only."""
    return F.cross_entropy(masked(logits, classes), labels)


def binary_cross_entropy(logits: Tensor, target: Tensor, classes: Tensor) -> Tensor:
    """Binary cross-entropy of every output among `classes` with its target, averaged over images and classes."""
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none") * classes
    return each.sum() / (len(logits) * classes.sum())


def binary_cross_entropies(logits: Tensor, target: Tensor, classes: Tensor) -> Tensor:
    """The same for every image by itself, averaged over `classes`: (N,)."""
    each = F.binary_cross_entropy_with_logits(logits, target, reduction="none") * classes
    return each.sum(1) / classes.sum()


def distillation(logits: Tensor, teacher: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """T^2 times the KL divergence from the teacher's to the student's tempered softmax; 0 if `classes` has none."""
    target = F.softmax(_low(teacher, classes) / temperature, 1)
    student = F.log_softmax(_low(logits, classes) / temperature, 1)
    divergence = F.kl_div(student, target, reduction="none").masked_fill(~classes, 0.0).sum(1).mean()
    return temperature**2 * divergence


def squared_distance(parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """Squared Euclidean distance between two sets of parameters."""
    return torch.stack([(value - anchor[name]).square().sum() for name, value in parameters.items()]).sum()


def weighted_distance(
    parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor], weight: Mapping[str, Tensor]
) -> Tensor:
    """The same with a weight for every single parameter."""
    return torch.stack([(weight[n] * (value - anchor[n]).square()).sum() for n, value in parameters.items()]).sum()


def squared_error(one: Tensor, other: Tensor) -> Tensor:
    """Squared Euclidean distance of each row, or image, to its counterpart: (N,)."""
    return (one - other).flatten(1).square().sum(1)


def norm_error(one: Tensor, other: Tensor) -> Tensor:
    """Euclidean distance of each row, or image, to its counterpart: (N,); its gradient at 0 is 0."""
    distance: Tensor = torch.linalg.vector_norm((one - other).flatten(1), dim=1)
    return distance


def divergence_from_normal(mean: Tensor, logvar: Tensor) -> Tensor:
    """KL divergence of each Gaussian with these means and log-variances from the standard one: (N,)."""
    return 0.5 * (mean.square() + logvar.exp() - logvar - 1).sum(1)


def expected_squared_error(mean: Tensor, logvar: Tensor, target: Tensor) -> Tensor:
    """Squared distance to `target` that a draw from each Gaussian has on average: (N,)."""
    return squared_error(mean, target) + logvar.exp().sum(1)


def log_shares(counts: Tensor, new: Tensor, least: float) -> Tensor:
    """Logarithm of each class's share of a client's steps, of which new classes have at least `least`; 0 of none."""
    news = (counts * new).sum()
    olds = counts.sum() - news
    share = torch.where(olds > 0, (news / counts.sum()).clamp_min(least), 1.0)
    share = torch.where(news > 0, share, 0.0)
    often = counts * torch.where(new, share / news.clamp_min(1), (1 - share) / olds.clamp_min(1))
    return torch.where(counts > 0, often, 1.0).log()


def _low(logits: Tensor, classes: Tensor) -> Tensor:
    # finite on purpose: the divergence multiplies these entries by zero, and zero times infinity is not a number
    return logits.masked_fill(~classes, -1e4)
