"""An even pace of old and new classes: how images are weighed, and what an old model holds in place.

Dong et al., "Federated Class-Incremental Learning", CVPR 2022: class-aware gradient compensation, and class-semantic
relation distillation. Every output is a sigmoid.
"""

import torch
from torch import Tensor

from fcil.blocks.losses import binary_cross_entropies, masked, one_hot


def compensated(logits: Tensor, labels: Tensor, seen: Tensor, learned: Tensor) -> Tensor:
    """Cross-entropy of each output among `seen` with the label, averaged over images as they are weighed."""
    weight = compensation(logits, labels, learned)
    return (weight * binary_cross_entropies(logits, one_hot(labels, logits), seen)).mean()


def compensation(logits: Tensor, labels: Tensor, learned: Tensor) -> Tensor:
    """Weigh images by how far their own output is from 1, over the mean of old or of new ones; if none is old, 1."""
    off = (logits.detach().gather(1, labels[:, None])[:, 0].sigmoid() - 1).abs()
    old = learned[labels].to(off)
    means = [(off * kind).sum() / kind.sum().clamp_min(1) for kind in (old, 1 - old)]
    mean = (old * means[0] + (1 - old) * means[1]).clamp_min(1e-12)
    return torch.where(learned.any(), off / mean, 1.0)


def related(logits: Tensor, labels: Tensor, seen: Tensor, teacher: Tensor, knows: Tensor) -> Tensor:
    """Cross-entropy of each output among `seen` with the teacher's, where it knows the class, else with the label."""
    target = torch.where(knows, teacher.sigmoid(), one_hot(labels, logits))
    return binary_cross_entropies(logits, target, seen).mean()


def unsureness(logits: Tensor, seen: Tensor) -> Tensor:
    """Mean entropy of a softmax over the classes `seen`, in nats: it rises when images of a new task come."""
    p = masked(logits, seen).softmax(1)
    return -(p * (p + 1e-5).log()).sum(1).mean().float()
