"""A correction of a head's outputs, alpha o + beta: each class has a pair, and those of a task the same one."""

import torch
from torch import Tensor

from fcil.blocks.losses import masked
from fcil.records import record


@record
class Slope:
    """How the loss of a client's held-out images changes with (alpha, beta), summed over them."""

    gradient: Tensor
    curvature: Tensor
    weight: Tensor  # of all these images, and of those of new classes
    count: int


def corrected(logits: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    """Return corrected outputs."""
    return alpha * logits + beta


def slopes(
    logits: Tensor, labels: Tensor, weight: Tensor, new: Tensor, old: Tensor, alpha: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how the cross-entropy, summed with `weight`, changes with the pair of `new`: gradient and curvature."""
    chances = masked(corrected(logits, alpha, beta), new | old).softmax(1)
    gained = torch.stack([logits, torch.ones_like(logits)], 2) * new[:, None]  # by an output, of either number
    usual = (chances[:, :, None] * gained).sum(1)
    own = gained[torch.arange(len(labels), device=labels.device), labels]
    curvature = torch.einsum("n,nk,nki,nkj->ij", weight, chances, gained, gained) - usual.T @ (weight[:, None] * usual)
    return weight @ (usual - own), curvature


def newton_step(pair: Tensor, gradient: Tensor, curvature: Tensor, hold: Tensor) -> Tensor:
    """Return (alpha, beta) one step on, of length 1 at most, to where the loss is least by its slope and curvature.

    The loss has `hold`, two weights, times half the squared distance from (1, 0) beside it: it is convex, and held-out
    images that are few and easy cannot drive the pair to infinity.
    """
    slope = gradient + hold * (pair - pair.new_tensor([1.0, 0.0]))
    step = torch.linalg.solve(curvature + hold.diag(), slope)
    moved: Tensor = pair - step / torch.linalg.vector_norm(step).clamp_min(1.0)
    return moved


def descended(
    alpha: Tensor, beta: Tensor, new: Tensor, gradient: Tensor, curvature: Tensor, hold: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return the pairs of all classes after such a step with the one that the classes `new` have in common."""
    pair = torch.stack([alpha[new][0], beta[new][0]]).to(gradient)
    of_new = newton_step(pair, gradient, curvature, gradient.new_tensor(hold))
    return torch.where(new, of_new[0].to(alpha), alpha), torch.where(new, of_new[1].to(beta), beta)
