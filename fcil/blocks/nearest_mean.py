"""Classification by the nearest mean of exemplars, where many clients have exemplars of a class.

Rebuffi et al., "iCaRL", CVPR 2017. Clients send sums of their exemplars' features, and the server divides: the means
are those over the exemplars of all.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.inversion import inverted
from fcil.blocks.losses import masked
from fcil.blocks.training import by_class, features_of
from fcil.records import ByClass, Weights, record


@record
class Model:
    """A server's state and broadcast, where a head serves training only and means classify."""

    weights: Weights
    old_weights: Weights  # the global model after the last task
    new: Tensor  # classes of this task, as a mask
    old: Tensor  # classes of earlier tasks
    means: Tensor  # of the exemplars' features by class, of length 1; 0 where nobody has an exemplar
    codec: Weights  # what was fitted of the exemplars' codec


@record
class FeatureSums:
    """Sums of one client's normalised exemplar features, and of their mirror images where those count, by class."""

    sums: ByClass
    counts: ByClass


def feature_sums(features: Callable[[Tensor], Tensor], exemplars: ByClass, augment: str) -> FeatureSums:
    """Add up the normalised features of each class's exemplars, and of their mirror images in a row of its own."""
    views = [exemplars]
    if augment == "crop-flip":  # where training takes an image and its mirror image for the same
        views.append({j: images.flip(3) for j, images in exemplars.items()})
    found = [by_class(features, view) for view in views]
    sums = {j: torch.stack([F.normalize(own[j]).sum(0) for own in found]) for j in exemplars}
    return FeatureSums(sums, {j: torch.tensor(len(images)) for j, images in exemplars.items()})


def with_mean_features(net: nn.Module, exemplars: ByClass) -> ByClass:
    """Return an image of each class whose feature is the mean that `feature_sums` tells, as nearly as one is found."""
    if not exemplars:
        return {}
    with torch.no_grad():
        found = by_class(partial(features_of, net), exemplars)
    wanted = torch.stack([F.normalize(own).mean(0) for own in found.values()])
    shape, normalise = tuple(next(iter(exemplars.values())).shape[1:]), net.normalise

    def feature(images: Tensor) -> Tensor:
        return F.normalize(net.features(images))  # type: ignore[operator]

    pictures = inverted(feature, wanted, normalise, shape)  # type: ignore[arg-type]
    return dict(zip(exemplars, pictures[:, None], strict=True))


def class_means(sums: ByClass | None, counts: ByClass | None, like: Tensor) -> Tensor:
    """Return each class's mean feature and that of mirror images, both of length 1, as one of length 1.

    A row of `like`, (classes, width), is 0 where nobody has an exemplar.
    """
    means = torch.zeros_like(like)
    for j, total in (sums or {}).items():
        means[j] = F.normalize(F.normalize(total / (counts or {})[j]).mean(0), dim=0).to(means)
    return means


def without_mean(means: Tensor, seen: Tensor) -> dict[str, float | None]:
    """Say how many of the classes `seen` nobody has an exemplar of: they are never predicted."""
    return {"classes_without_exemplars": float((seen & ~means.any(1)).sum())}


def nearness(features: Tensor, means: Tensor) -> Tensor:
    """Score each class by how near its mean is; one without a mean is ruled out."""
    return masked(F.normalize(features) @ means.T, means.any(1))


def nearest_or_head(features: Tensor, head: nn.Module, means: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Score classes by their means, or by the head inside a task, when no new class has a mean yet."""
    there = (means.any(1) & new).any()
    return torch.where(there, nearness(features, means), masked(head(features), new | old))
