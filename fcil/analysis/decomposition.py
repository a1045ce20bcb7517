"""Forgetting taken apart: the paper's pairwise losses (its Eqs. 1 to 6), estimated from scores of test images.

Two estimators of u_ij, the loss on a pair of classes:

- `printed`: cross-entropy over all classes seen, on images of i and of j, as the paper writes it. Then u_ij is the sum
  of two losses of single classes, and says nothing of whether i is taken for j.
- `Losses.pair`: cross-entropy of a softmax over i and j alone. It sees confusion: log 2 where they cannot be told
  apart.

Only the second can be split as the paper wants. Of a pair of an old and a new class, a share lies within one client and
the rest between two: the chance that an image of each, drawn at random, are held by the same client or not. All is in
nats. docs/forgetting.md explains it with an example.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

SCALES = torch.logspace(-3, 3, 49, dtype=torch.float64)  # units of scores that are tried, relative to their mean gap


@dataclass(frozen=True)
class Losses:
    """What test images lose, by their class; not a number where a class has none."""

    single: Tensor  # (classes,) cross-entropy over all classes seen
    pair: Tensor  # (classes, classes) cross-entropy over row and column alone, both equally frequent; 0 where equal


def losses(scores: Tensor, labels: Tensor, seen: Sequence[int]) -> Losses:
    """Return the losses of images among the classes seen, in the unit of scores where cross-entropy is least.

    Methods score classes in units of their own: logits, cosines, squared distances. To be compared, each pair is
    measured in the unit that suits it best. So a pair loses at most log 2, and that where its images cannot be told
    apart by these scores: also where all of them are taken for one of the two.
    """
    classes = torch.tensor(sorted(seen), device=scores.device)
    own = torch.searchsorted(classes, labels.to(scores.device))
    gaps = gaps_to(scores[:, classes], own)
    kind = F.one_hot(own, len(classes)).double()
    kind = kind / kind.sum(0)
    pair = torch.full((len(classes), len(classes)), math.log(2), dtype=torch.float64, device=scores.device)
    singles = []
    for scale in SCALES.tolist():
        one_way = kind.T @ F.softplus(gaps * scale)
        pair = torch.minimum(pair, (one_way + one_way.T) / 2)
        singles.append(kind.T @ (gaps * scale).logsumexp(1))
    single = min(singles, key=lambda by_class: float(by_class.mean()))
    return Losses(*_spread(single, pair.fill_diagonal_(0), classes, scores.shape[1]))


def gaps_to(scores: Tensor, own: Tensor) -> Tensor:
    """Return by how much each class scores above an image's own, in mean gaps: no more than 1,000 either way."""
    gaps = scores.double() - scores.double().gather(1, own[:, None])
    gaps = gaps.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    finite = torch.where(gaps.isfinite(), gaps, 0.0)
    unit = finite.abs().sum() / finite.count_nonzero().clamp_min(1)
    return (gaps / unit.clamp_min(1e-300)).clamp(-1e3, 1e3)  # also to whatever a method has ruled out


def _spread(single: Tensor, pair: Tensor, classes: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Put what is known of some classes into tables of all, on the CPU."""
    rows, wide = classes.cpu(), torch.full((size, size), torch.nan, dtype=torch.float64)
    tall = wide[0].clone()
    tall[rows], wide[rows[:, None], rows] = single.cpu(), pair.cpu()
    return tall, wide


def printed(single: Tensor, prior: Tensor) -> Tensor:
    """Return u_ij as printed: the loss on classes i and j, each as frequent as `prior` says; of i alone where i = j."""
    share = prior * single
    return share[:, None] + share - torch.diag(share)


def risk(single: Tensor, prior: Tensor) -> Tensor:
    """Eq. 1: the loss on everything."""
    return (prior * single).sum()


def risk_by_pairs(u: Tensor) -> Tensor:
    """Eq. 2: the same as a sum over pairs."""
    return u.triu(1).sum() / (len(u) - 1)


def cumulative(u: Tensor, tasks: Sequence[Sequence[int]]) -> Tensor:
    """Eq. 3: the sum over all ordered pairs of the classes of all tasks, divided by N^2, N the classes of a task."""
    every = torch.tensor([j for task in tasks for j in task])
    return u[every[:, None], every].sum() / len(tasks[0]) ** 2


def added(u: Tensor, tasks: Sequence[Sequence[int]]) -> Tensor:
    """Eq. 4: what the last of the tasks adds to Eq. 3, within it and twice between it and all before."""
    new, old = (
        torch.tensor([j for task in some for j in task], dtype=torch.int64) for some in (tasks[-1:], tasks[:-1])
    )
    return (u[new[:, None], new].sum() + 2 * u[old[:, None], new].sum()) / len(tasks[0]) ** 2


def together(holdings: Tensor) -> Tensor:
    """Return the chance that an image of class i and one of class j are held by the same client: (classes, classes).

    `holdings` counts each client's images of each class: (clients, classes). Eqs. 5 and 6 sum over pairs of clients;
    u^{m,n}_ij is u_ij times m's share of class i and n's share of class j, so this is the part with m = n.
    """
    shares = holdings.double() / holdings.double().sum(0).clamp_min(1)
    return shares.T @ shares


def split(u: Tensor, tasks: Sequence[Sequence[int]], same: Tensor) -> dict[str, dict[str, float | None]]:
    """Take the loss on all pairs apart, after the last of `tasks`.

    `prior`: pairs of old classes within a client; `new`: of new ones; `intra`: an old and a new one within a client;
    `inter`: pairs with an old class, between two clients. `parts` add up to the mean over all pairs, `total`; local
    forgetting is `prior` and `intra` together, global forgetting is `inter`. `means` are over the pairs of a term by
    themselves, so that a term of few pairs can be compared with one of many.
    """
    order = [j for task in tasks for j in task]
    u, same = u[order][:, order], same[order][:, order]
    old = torch.arange(len(order)) < len(order) - len(tasks[-1])
    apart, both_old, both_new = 1 - torch.eye(len(order)), old[:, None] & old, ~(old[:, None] | old)
    weights = {
        "prior": both_old * same, "new": both_new * torch.ones_like(same),
        "intra": ~(both_old | both_new) * same, "inter": ~both_new * (1 - same),
    }  # fmt: skip
    sums = {name: (float((u * w * apart).sum()), float((w * apart).sum())) for name, w in weights.items()}
    pairs = sum(weight for _, weight in sums.values())
    parts = {name: value / pairs if pairs else 0.0 for name, (value, _) in sums.items()}
    parts |= {"local": parts["prior"] + parts["intra"], "global": parts["inter"], "total": sum(parts.values())}
    means = {name: value / weight if weight > 1e-9 else None for name, (value, weight) in sums.items()}
    return {"parts": _rounded(parts), "means": _rounded(means)}


def across_clients(u: Tensor, tasks: Sequence[Sequence[int]], same: Tensor) -> float | None:
    """Return the mean loss on pairs of an old class and one of the last task, between two clients.

    With the losses after a later task it says whether that has mended them, as the paper promises.
    """
    old, new = _old_and_new(u, tasks)
    value, weight = (u[old][:, new] * (1 - same[old][:, new])).sum(), (1 - same[old][:, new]).sum()
    return round(float(value / weight), 5) if weight > 1e-9 else None


def between(u: Tensor, tasks: Sequence[Sequence[int]]) -> list[list[float | None]]:
    """Return the mean loss on the pairs of two tasks, or of one with itself; the lower triangle."""
    kinds = [_mask(u, task) for task in tasks]
    apart = ~torch.eye(len(u), dtype=torch.bool)

    def mean(t: int, s: int) -> float | None:
        chosen = kinds[t][:, None] & kinds[s] & apart
        return round(float(u[chosen].mean()), 5) if chosen.any() else None

    return [[mean(t, s) for s in range(t + 1)] for t in range(len(kinds))]


def decomposition(
    scores: Tensor, labels: Tensor, tasks: Sequence[Sequence[int]], holdings: Tensor, before: Tensor
) -> dict[str, Any]:
    """Return what a ledger says of it after the last of `tasks`; `before` are the holdings after the task before."""
    shown = set(labels.tolist())  # a class without test images loses nothing that could be measured
    tasks = [[j for j in task if j in shown] for task in tasks]
    u, same = losses(scores, labels, sorted(shown)).pair, together(holdings)
    return {
        **split(u, tasks, same),
        "across": across_clients(u, tasks, same),
        "across_before": across_clients(u, tasks[:-1], together(before)),
        "between": between(u, tasks),
    }


def _mask(u: Tensor, classes: Sequence[int]) -> Tensor:
    chosen = torch.zeros(len(u), dtype=torch.bool)
    chosen[list(classes)] = True
    return chosen


def _old_and_new(u: Tensor, tasks: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    return _mask(u, [j for task in tasks[:-1] for j in task]), _mask(u, tasks[-1] if tasks else ())


def _rounded(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(value, 5) for name, value in values.items()}
