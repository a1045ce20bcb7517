"""What images can be told from a run: membership, likeness of pictures, nearest images. Pure functions of tensors.

Membership is asked as an attacker would: a score for each image, higher where it was more likely trained on, and the
area under the ROC curve (AUC), the chance that an image that was trained on scores higher than one that was not. 0.5 is
guessing. docs/audit.md says what the numbers do and do not mean.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F

from fcil.analysis.decomposition import SCALES, gaps_to

DRAWS = 1000  # of the bootstrap
TAIL = 0.025  # of its draws on either side of the interval: 95 % lie inside
PEAK = 255.0  # the largest value of a pixel
WINDOW = 7  # side of the squares over which SSIM compares, as scikit-image has it
STABLE = (0.01, 0.03)  # K1 and K2 of SSIM
CROWD = 50  # nearest images among which the first may stand out
AT_ONCE = 2**24  # distances that are computed at a time


class Auc(NamedTuple):
    """An area under the ROC curve with its 95 % interval, and how many images it was measured on."""

    value: float
    low: float
    high: float
    inside: int
    outside: int


# -- membership -------------------------------------------------------------------------------------------------------


def losses(scores: Tensor, labels: Tensor) -> Tensor:
    """Return each image's cross-entropy over all columns of `scores`, in the unit where the mean is least.

    Methods score classes by logits, cosines or squared distances; an attacker with a few images finds the unit, too.
    """
    gaps = gaps_to(scores, labels)
    tried = [(gaps * scale).logsumexp(1) for scale in SCALES.tolist()]
    best: Tensor = min(tried, key=lambda each: float(each.mean()))
    return best


def margins(scores: Tensor, labels: Tensor) -> Tensor:
    """Return how far each image is from being taken for another class: its own score less the best other."""
    others = gaps_to(scores, labels).scatter(1, labels[:, None], -torch.inf)
    return -others.amax(1)


def auc(inside: Tensor, outside: Tensor, weights: Tensor | None = None, seed: int = 0) -> Auc:
    """Return the chance that a score of `inside` is above one of `outside`, ties half, with a bootstrap interval.

    `weights` of the outside ones make their classes as frequent as those inside, see `matched`.
    """
    weight = torch.ones(len(outside)) if weights is None else weights
    scores = torch.cat([inside, outside]).double().cpu().numpy()
    member = np.repeat([True, False], [len(inside), len(outside)])
    weigh = np.concatenate([np.ones(len(inside)), weight.double().cpu().numpy()])
    value = float(roc_auc_score(member, scores, sample_weight=weigh))
    place = np.unique(scores, return_inverse=True)[1]
    rng, draws = np.random.default_rng(seed), np.empty(DRAWS)
    for i in range(DRAWS):
        # one of each kind may be drawn in place of any other of its kind
        own, other = (rng.integers(n, size=n) for n in (len(inside), len(outside)))
        chosen = weigh[len(inside) + other]
        above = np.bincount(place[own], minlength=place.max() + 1)
        below = np.bincount(place[len(inside) + other], chosen, minlength=place.max() + 1)
        draws[i] = (above * (below.cumsum() - below / 2)).sum() / (len(own) * chosen.sum())
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    return Auc(value, min(float(low), value), max(float(high), value), len(inside), len(outside))


def matched(inside: Tensor, outside: Tensor) -> Tensor:
    """Return weights for labels `outside` with which their classes are as frequent as among `inside`.

    Else a class that is hard, and of which few exemplars are kept, would look like privacy.
    """
    size = int(torch.cat([inside, outside]).max()) + 1
    wanted, there = (torch.bincount(labels, minlength=size).double() for labels in (inside, outside))
    return (wanted / there.clamp_min(1))[outside]


# -- how alike two pictures are ---------------------------------------------------------------------------------------


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each pair of images in 0..255, in dB; infinite where they are equal."""
    error = (images.double() - others.double()).square().flatten(1).mean(1)
    ratio: Tensor = 10 * (PEAK**2 / error).log10()
    return ratio


def ssim(images: Tensor, others: Tensor) -> Tensor:
    """Return the structural similarity of each pair of images in 0..255: 1 where they are equal, 0 where unrelated.

    Wang, Bovik, Sheikh and Simoncelli, IEEE TIP 2004, over squares of 7 by 7 and the mean over channels, as
    scikit-image computes it; over smaller ones where images are.
    """
    x, y = images.double(), others.double()
    side = min(WINDOW, *x.shape[2:])
    side -= 1 - side % 2
    number = side * side
    mean_x, mean_y, xx, yy, xy = (F.avg_pool2d(t, side, 1) for t in (x, y, x * x, y * y, x * y))
    unbiased = number / max(1, number - 1)
    var_x, var_y, both = (
        unbiased * (product - a * b)
        for product, a, b in ((xx, mean_x, mean_x), (yy, mean_y, mean_y), (xy, mean_x, mean_y))
    )
    c1, c2 = ((k * PEAK) ** 2 for k in STABLE)
    alike = (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    means: Tensor = alike.flatten(1).mean(1)
    return means


# -- which images are near --------------------------------------------------------------------------------------------


class Nearest(NamedTuple):
    """Of each picture the image nearest to it in pixels, and how near that is."""

    row: Tensor
    distance: Tensor  # root of the mean squared error
    relative: Tensor  # over the mean distance of the 50 nearest: small where one image stands out
    rank: Tensor  # of the picture's source by distance, 1 is first; an equally near image does not count as nearer


def nearest(pictures: Tensor, images: Tensor, sources: Tensor | None = None) -> Nearest:
    """Find the nearest of `images` to each picture, and where among them its source is; without one the rank is 1.

    A blurred picture is not far from any image, and so is nearer to the nearest than a sharp one is. But then it is as
    near to many others; a copy is near to one alone (Carlini et al., "Extracting Training Data from Diffusion Models",
    2023).
    """
    rows, squares, relative, ranks = [], [], [], []
    for part, own in zip(
        _parts(pictures, images), _parts(pictures if sources is None else sources, images), strict=True
    ):
        every = _squared(part, images)
        first = every.topk(min(CROWD, len(images)), dim=1, largest=False)
        far = (part.double() - own.double()).square().flatten(1).sum(1)
        rows.append(first.indices[:, 0])
        squares.append(first.values[:, 0])
        relative.append(first.values[:, 0].sqrt() / first.values.sqrt().mean(1).clamp_min(1e-12))
        ranks.append(1 + (every < far[:, None]).sum(1))
    distance = (torch.cat(squares) / math.prod(images.shape[1:])).sqrt()
    return Nearest(torch.cat(rows), distance, torch.cat(relative), torch.cat(ranks))


def _parts(rows: Tensor, images: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, max(1, AT_ONCE // max(1, len(images), images[0].numel())))


def _squared(pictures: Tensor, images: Tensor) -> Tensor:
    """Return squared distances of images in whole numbers: exact, as no sum of them comes near 2^53."""
    a, found = pictures.flatten(1).double(), []
    for part in torch.split(images, max(1, 2 * AT_ONCE // images[0].numel())):  # all as doubles would be gigabytes
        b = part.flatten(1).double()
        found.append(b.square().sum(1) - 2 * a @ b.T)
    return torch.cat(found, 1) + a.square().sum(1)[:, None]
