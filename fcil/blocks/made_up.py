"""Images made up of classes that a client has no exemplar of: of which, how many, and drawn from what.

Lines 8 and 9 of Algorithm 2 of Hybrid Replay. A class is known to everyone by moments of what codes keep of its images.
They come of sums over clients, so they are those of the pooled images, whoever holds them:

- of each number its mean and its deviation;
- of the `leading` numbers, those with most spread, how they vary together: drawn one by one they come to a haze in
  which no shape of the class is left;
- how much images differ in contrast: what is drawn as if all had the same is the texture of none of them.

WebP has no numbers to draw: of its classes nothing is known, and nothing is made up.
"""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from fcil.blocks.codec import LearnedCodec, TransformCodec, WebpCodec
from fcil.blocks.training import by_class, normal
from fcil.blocks.transform_codec import square, triangle
from fcil.records import ByClass, Weights
from fcil.scenario.tasks import LocalData

Kind = TransformCodec | LearnedCodec | WebpCodec
SHRINK = 0.1  # of covariances towards 0: some hundred images do not tell thousands of them from chance
COLOURS = 8  # first numbers, brightness and colour at large, which do not grow with contrast


def absent(data: LocalData, kept: Iterable[int]) -> list[int]:
    """Return the old classes of which a client has neither exemplars nor, having stayed behind, images at hand."""
    there = {*kept, *data.classes()}
    return [j for j in data.task.old if j not in there]


def usual_number(kept: ByClass, data: LocalData) -> int:
    """Say how many images to make up of a class: as many as there are exemplars of one, or images if no exemplar."""
    held = [len(own) for own in kept.values()] or [len(data.of(j)) for j in data.classes()]
    return max(1, round(sum(held) / len(held))) if held else 0


def numbers_of(codec: Kind, fitted: Weights, images: ByClass) -> ByClass:
    """Return what codes keep of images before they are rounded."""
    return {} if isinstance(codec, WebpCodec) else by_class(partial(codec.numbers, fitted), images)


def pictures_of(codec: Kind, fitted: Weights, numbers: ByClass) -> ByClass:
    """Return the images of such numbers."""
    return {} if isinstance(codec, WebpCodec) else by_class(partial(codec.pictures, fitted), numbers)


def leading(codec: Kind, fitted: Weights, most: int) -> Tensor:
    """Return which numbers of a code have most spread in images at large, at most so many; a learned one tells none."""
    if not isinstance(codec, TransformCodec):
        return torch.zeros(0, dtype=torch.int64)
    return fitted["deviation"].argsort(descending=True, stable=True)[:most]


def summed(numbers: ByClass, leading: Tensor) -> tuple[ByClass, ByClass]:
    """Return first and second moments of each class's numbers, as sums.

    Where there are leading ones, the logarithm of contrast counts as one number more, and products of the leading with
    each other stand after the squares.
    """
    rows = {j: torch.cat([own, _contrast(own, leading)], 1) for j, own in numbers.items()} if len(leading) else numbers
    one, other = torch.triu_indices(len(leading), len(leading), offset=1)
    return {j: own.sum(0) for j, own in rows.items()}, {
        j: torch.cat([own.square().sum(0), (own[:, leading].T @ own[:, leading])[one, other]])
        for j, own in rows.items()
    }


def moments(
    firsts: ByClass, seconds: ByClass, counts: ByClass, leading: Tensor, classes: Sequence[int]
) -> tuple[ByClass, ByClass, ByClass]:
    """Return means, deviations, and roots of the covariance of what leads, of those classes that anyone told sums of.

    A root is symmetric: its upper triangle says it all.
    """
    means = {j: firsts[j] / counts[j] for j in classes if j in firsts}
    products = {j: seconds[j] / counts[j] for j in means}
    deviations = {j: (products[j][: len(mean)] - mean**2).clamp_min(0).sqrt() for j, mean in means.items()}
    if not len(leading):
        return means, deviations, {}
    roots = {j: _root(products[j][len(mean) :], mean[leading], deviations[j][leading]) for j, mean in means.items()}
    return means, deviations, roots


def drawn(
    means: ByClass, deviations: ByClass, roots: ByClass, leading: Tensor, classes: Sequence[int], number: int,
    generator: torch.Generator,
) -> ByClass:  # fmt: skip
    """Draw so many rows of numbers for each class."""
    normals = {j: normal((number, len(means[j])), generator).to(means[j]) for j in classes}
    return {
        j: _together(z, means[j], deviations[j], roots[j], leading) if j in roots else means[j] + deviations[j] * z
        for j, z in normals.items()
    }


def made(
    codec: Kind, fitted: Weights, moments: tuple[ByClass, ByClass, ByClass], tied: int, classes: Iterable[int],
    number: int, generator: torch.Generator,
) -> ByClass:  # fmt: skip
    """Make up so many images of each class whose moments are known: means, deviations and roots."""
    known = [j for j in classes if j in moments[0]]
    return pictures_of(codec, fitted, drawn(*moments, leading(codec, fitted, tied), known, number, generator))


def _together(z: Tensor, mean: Tensor, deviation: Tensor, root: Tensor, leading: Tensor) -> Tensor:
    off = deviation * z
    off[:, leading] = z[:, leading] @ square(root, len(leading))
    varied = _varied(len(mean) - 1, leading)
    chance = 2 / (varied.sum() - 1).clamp_min(1)  # variance of that logarithm where all images have the same contrast
    spread = (deviation[-1].square() - chance).clamp_min(0).sqrt() / 2
    gain = torch.exp(spread * z[:, -1:] - spread**2)  # whose square is 1 on average
    numbers: Tensor = mean + off * torch.where(varied, gain, 1.0)
    return numbers[:, :-1]


def _varied(width: int, leading: Tensor) -> Tensor:
    """Return which numbers grow with contrast, and one more for contrast itself."""
    varied = torch.ones(width + 1, dtype=torch.bool, device=leading.device)
    varied[leading[:COLOURS]] = False
    return varied


def _contrast(numbers: Tensor, leading: Tensor) -> Tensor:
    """Return the logarithm of the mean square of each row's numbers that grow with contrast: (N, 1)."""
    varied = _varied(numbers.shape[1], leading)[:-1]
    energy: Tensor = (numbers.square() * varied).sum(1, keepdim=True) / varied.sum().clamp_min(1)
    return energy.clamp_min(1e-4).log()


def _root(products: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """Return the root of a covariance, shrunk; what noise has made negative of it is 0."""
    many = len(mean)
    upper = torch.triu_indices(many, many, offset=1)
    covariance = torch.zeros(many, many, dtype=torch.float64)
    covariance[upper[0], upper[1]] = (1 - SHRINK) * (products - (mean[upper[0]] * mean[upper[1]])).double().cpu()
    covariance = covariance + covariance.T + torch.diag(deviation.square().double().cpu())
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    return triangle(root).to(mean)
