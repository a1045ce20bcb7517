"""Placing class centroids in a latent space: the Lennard-Jones potential, and plain repulsion.

Energies count each pair once: those among the points that move, and those of a moving with a fixed one. The paper's
Eq. 8 counts each pair twice, which changes no direction.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fcil.records import ByClass
from fcil.scenario.tasks import Task
from fcil.seeds import seed_of

REST = 2 ** (1 / 6)  # the distance, in sigma, at which two points neither attract nor repel each other
LONGEST_STEP = 0.05  # in sigma: at small distances gradients have no bound
JITTER = 1e-3  # in sigma


def nearest(codes: Tensor, centroids: Tensor, seen: Tensor) -> Tensor:
    """Score each class by the negative distance of its centroid; classes not seen are ruled out."""
    distances: Tensor = torch.linalg.vector_norm(codes[:, None] - centroids, dim=2)
    return -distances.masked_fill(~seen, math.inf)


def scores(codes: Tensor, centroids: Tensor, temperature: float) -> Tensor:
    """Return -|z - p|^2 / temperature of each code and centroid but for what all classes share: logits of a softmax."""
    with torch.autocast(codes.device.type, enabled=False):
        return (2 * codes @ centroids.T - centroids.square().sum(1)) / temperature


def proposed(codes: ByClass) -> tuple[ByClass, ByClass]:
    """Return unaligned centroids of each class as sum and count: both add up over clients."""
    return {j: z.sum(0) for j, z in codes.items()}, {j: torch.tensor(len(z)) for j, z in codes.items()}


def placed(
    centroids: Tensor, task: Task, sums: ByClass, counts: ByClass, alignment: str, sigma: float, steps: int
) -> Tensor:
    """Place the centroids of a task's new classes beside the old ones, which stay; Eq. 9, mended.

    They start from the means that clients proposed, as sums and counts; a class that nobody has from the others' mean.
    So few numbers, and a look at them in every step, are a CPU's work wherever they come from.
    """
    p = centroids.cpu().clone()
    means = {j: (sums[j] / counts[j]).to(p) for j in task.new if j in sums}
    nobody_has_it = torch.stack(list(means.values())).mean(0) if means else torch.zeros_like(p[0])
    start = torch.stack([means.get(j, nobody_has_it) for j in task.new])
    still, draws = p[list(task.old)], torch.Generator().manual_seed(seed_of("jitter", task.index))
    start = jittered(within_reach(start, still, sigma), sigma, draws)
    p[list(task.new)] = ALIGNMENTS[alignment](start, still, sigma, steps=steps)
    return p.to(centroids)


def counted(codes: ByClass, centroids: Tensor, seen: Tensor) -> Tensor:
    """Count for each class how many codes there are, and how many are nearest to their own centroid: (2, classes)."""
    counts = torch.zeros(2, len(centroids), dtype=torch.int64, device=centroids.device)
    for j, z in codes.items():
        counts[0, j], counts[1, j] = len(z), (nearest(z, centroids, seen).argmax(1) == j).sum()
    return counts


def side_by_side(means: Sequence[ByClass], centroids: Tensor) -> Tensor:
    """Lay clients' class means side by side, infinite where a client has none: (clients, classes, latent).

    A class that no client has keeps its shared centroid.
    """
    rows = torch.full((len(means), *centroids.shape), math.inf, dtype=centroids.dtype)
    for row, own in zip(rows, means, strict=True):
        for j, mean in own.items():
            row[j] = mean
    nobody = rows.isinf().all(2).all(0)
    return torch.where(nobody[:, None], centroids, rows)


def jittered(points: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    """Move each point a little in every dimension: coincident points have no direction to part in."""
    return points + JITTER * sigma * torch.randn(points.shape, generator=generator).to(points)


def within_reach(points: Tensor, fixed: Tensor, sigma: float) -> Tensor:
    """Bring points to within 2 sigma of the centre of the fixed ones, or of their own: the pull fades as r^-7."""
    centre = (fixed if len(fixed) else points).mean(0)
    offsets: Tensor = points - centre
    shrink = 2 * sigma / torch.linalg.vector_norm(offsets, dim=1, keepdim=True)
    return torch.where(shrink < 1, centre + offsets * shrink, points)


def energy(moving: Tensor, fixed: Tensor, sigma: float, depth: float = 1.0) -> Tensor:
    """Lennard-Jones energy, Eq. 8: sum over pairs of 4 eps ((s/r)^12 - (s/r)^6)."""
    return energy_and_gradient(moving, fixed, sigma, depth)[0]


def gradient(moving: Tensor, fixed: Tensor, sigma: float, depth: float = 1.0) -> Tensor:
    """Gradient of `energy`: sum over pairs of 24 eps (s^6/r^8 - 2 s^12/r^14) (p - p')."""
    return energy_and_gradient(moving, fixed, sigma, depth)[1]


def energy_and_gradient(moving: Tensor, fixed: Tensor, sigma: float, depth: float) -> tuple[Tensor, Tensor]:
    """Return both from the same distances."""
    r = _distances(moving, fixed)
    sixth = (sigma / r) ** 6
    pairs = 4 * depth * (sixth**2 - sixth)
    slope = _towards(moving, fixed, 24 * depth * (sixth - 2 * sixth**2) / r**2)
    return pairs[:, : len(moving)].sum() / 2 + pairs[:, len(moving) :].sum(), slope


def printed_step(moving: Tensor, fixed: Tensor, sigma: float, depth: float = 1.0) -> Tensor:
    """Return what Eq. 9 adds for eta = 1, as it is printed: it climbs the energy it is meant to lower."""
    r = _distances(moving, fixed)
    return -_towards(moving, fixed, 24 * depth * (2 * sigma**12 / r**13 - sigma**6 / r**7))


def lennard_jones(
    moving: Tensor, fixed: Tensor, sigma: float, depth: float = 1.0, rate: float = 1.0, steps: int = 3000
) -> Tensor:
    """Let `moving` descend the Lennard-Jones energy; no step raises it, none is longer than 0.05 sigma."""
    p, still = moving.double(), fixed.double()
    now, slope = energy_and_gradient(p, still, sigma, depth)
    for _ in range(steps):
        if slope.norm(dim=1).max() * sigma < 1e-6 * depth:
            break
        there = p - _capped(rate * slope, sigma)
        then, its_slope = energy_and_gradient(there, still, sigma, depth)
        before, longest = rate, LONGEST_STEP
        while not then <= now and rate > 1e-12:
            rate /= 2
            there = p - _capped(rate * slope, sigma)
            then, its_slope = energy_and_gradient(there, still, sigma, depth)
        while not then <= now and longest > 1e-12:  # points so near that at any rate the longest step is too long
            rate, longest = before, longest / 2
            there = p - _capped(rate * slope, sigma, longest)
            then, its_slope = energy_and_gradient(there, still, sigma, depth)
        if not then <= now:
            break
        p, now, slope, rate = there, then, its_slope, 1.1 * rate
    return p.to(moving)


def printed_alignment(
    moving: Tensor, fixed: Tensor, sigma: float, depth: float = 1.0, rate: float = 1.0, steps: int = 3000
) -> Tensor:
    """Follow Eq. 9 as printed; only the length of a step is bounded, or the first ones would leave all numbers."""
    p, still = moving.double(), fixed.double()
    for _ in range(steps):
        p = p + _capped(rate * printed_step(p, still, sigma, depth), sigma)
    return p.to(moving)


def repulsion(
    moving: Tensor, fixed: Tensor, sigma: float, charge: float = 1.0, dt: float = 0.05, steps: int = 3000
) -> Tensor:
    """Repulsive force algorithm: unit masses under forces charge/r^2, by Newton's law, from rest.

    Repulsion has no equilibrium, so a point rests as soon as it is as far from all others as Lennard-Jones would rest
    it, and moves again if another comes near.
    """
    p, still = moving.double(), fixed.double()
    velocity = torch.zeros_like(p)
    for _ in range(steps):
        r = _distances(p, still)
        crowded = r.amin(1, keepdim=True) < REST * sigma
        if not crowded.any():
            break
        velocity = crowded * _capped(velocity + dt * _towards(p, still, charge / r**3), sigma / dt)
        p = p + dt * velocity
    return p.to(moving)


def _distances(moving: Tensor, fixed: Tensor) -> Tensor:
    """Return distances, (moving, moving + fixed); a point is infinitely far from itself, and none is quite zero."""
    r = torch.cdist(moving, torch.cat([moving, fixed]), compute_mode="donot_use_mm_for_euclid_dist")
    own = torch.eye(len(moving), len(r[0]), dtype=torch.bool, device=r.device)
    return r.clamp_min(1e-12).masked_fill(own, math.inf)


def _towards(moving: Tensor, fixed: Tensor, weight: Tensor) -> Tensor:
    """Return for each moving p the sum of weight (p - p') over all others."""
    return weight.sum(1, keepdim=True) * moving - weight @ torch.cat([moving, fixed])


def _capped(step: Tensor, sigma: float, longest: float = LONGEST_STEP) -> Tensor:
    """Shorten each point's step to at most so many sigma; scaled first, so that no square leaves all numbers."""
    scale = step.abs().amax(1, keepdim=True).clamp_min(1e-300)
    length = (step / scale).norm(dim=1, keepdim=True)
    return step / scale * torch.minimum(scale, longest * sigma / length.clamp_min(1.0))


ALIGNMENTS = {"lennard-jones": lennard_jones, "printed": printed_alignment, "rfa": repulsion}
