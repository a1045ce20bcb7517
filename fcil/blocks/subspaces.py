"""Subspaces that features span, and the geodesic flow from one to another.

Gong, Shi, Sha and Grauman, "Geodesic Flow Kernel for Unsupervised Domain Adaptation", CVPR 2012. The kernel is the
integral over all subspaces on the shortest way between two, of the projections onto them. It is known in closed form
by the angles between the two, and is never formed: vectors are projected onto what spans it. All of it in float64,
since an angle's cosine says little of it near 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NOISE = 1e-5  # directions along which features vary less than this, relative to the widest one, are none


@dataclass(frozen=True)
class Geodesic:
    """The flow kernel between two subspaces, as what spans both and how much each pair of directions counts."""

    start: Tensor  # (width, n) where the flow begins, turned so that each direction has one partner at the end
    turn: Tensor  # (width, n) orthogonal to those, into which they turn; the end lies on the negative side
    both_start: Tensor  # (n,) the integral of cos^2
    mixed: Tensor  # (n,) of -cos sin
    both_turn: Tensor  # (n,) of sin^2

    def product(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the kernel's product of each row with its counterpart: (N,)."""
        a, b = one @ self.start, one @ self.turn
        c, d = other @ self.start, other @ self.turn
        products: Tensor = self.both_start * a * c + self.mixed * (a * d + b * c) + self.both_turn * b * d
        return products.sum(1)


def principal(features: Tensor, number: int) -> Tensor:
    """Return the directions along which centred features vary most, as orthonormal columns: (width, number).

    Where they vary in fewer directions, as in a batch of few images again and again, the columns left over are 0.
    """
    features = features.double()
    squares, mixtures = _small(torch.linalg.eigh, features @ features.T)  # the shortest first
    real = squares > NOISE**2 * squares[-1:]
    mixtures = mixtures * (real / squares.where(real, 1.0).sqrt())
    return features.T @ mixtures.flip(1)[:, :number]


def geodesic(begin: Tensor, end: Tensor) -> Geodesic:
    """Return the flow kernel from the span of some orthonormal columns to that of as many others.

    A direction without partner, since the other side has zero columns in its place, counts half: it is as if its
    partner were orthogonal to everything.
    """
    left, cosines, right = _small(torch.linalg.svd, begin.T @ end)
    cosines = cosines.clamp(max=1.0)
    sines, angles = (1 - cosines.square()).sqrt(), cosines.acos()
    start = begin @ left
    turn = (start * cosines - end @ right.T) / sines.clamp_min(1e-9)  # 0 where there is no angle
    twice, once = torch.sinc(2 * angles / math.pi), torch.sinc(angles / math.pi)  # sin(x) / x, and 1 at 0
    return Geodesic(start, turn, (1 + twice) / 2, -sines * once / 2, (1 - twice) / 2)


def _small(decomposed: Callable[[Tensor], Sequence[Tensor]], matrix: Tensor) -> Iterator[Tensor]:
    """Yield the parts of a small matrix, taken apart on the CPU: a GPU is slow at many short steps in a row."""
    return (part.to(matrix.device) for part in decomposed(matrix.cpu()))
