"""Proxies that stand for classes: where to put them, and the loss that moves features towards them.

They come from k-means with weights, so that centres of centres can be taken, too. The loss is an NCA with proxies
(Movshovitz-Attias et al., ICCV 2017) as PODNet has it (Douillard et al., ECCV 2020).
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.records import ByClass, record, varying
from fcil.scenario.tasks import Task
from fcil.seeds import seed_of


@record
class Proposal:
    """Centres of a client's features of each new class, and how many images each stands for."""

    centres: ByClass = varying("rows")
    counts: ByClass = varying("rows")


def clustered(rows: Tensor, weights: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return at most `count` centres of weighted rows, and the weight that each gathers; none is without any.

    Where there are no more rows than that, each is its own centre. It computes with one thread, so that the same seed
    gives the same bits. Of several first centres to try, two near each other are equally good, and rounding would
    decide: there is one try.
    """
    if len(rows) <= count:
        return rows, weights
    from sklearn.cluster import KMeans, kmeans_plusplus
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    points, masses, draws = rows.cpu().numpy(), weights.cpu().numpy(), seed % 2**32
    with threadpool_limits(1), warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # of equal rows
        start, _ = kmeans_plusplus(points, count, sample_weight=masses, random_state=draws, n_local_trials=1)
        means = KMeans(count, init=start, n_init=1, random_state=draws).fit(points, sample_weight=masses)
    gathered = torch.zeros(count, dtype=weights.dtype).index_add_(
        0, torch.from_numpy(means.labels_).long(), weights.cpu()
    )
    centres = torch.from_numpy(means.cluster_centers_)
    return centres[gathered > 0].to(rows), gathered[gathered > 0].to(weights.device)


def proposed(features: ByClass, count: int, generator: torch.Generator) -> Proposal:
    """Return at most `count` centres of each class's features, which are brought to length 1."""
    reply = Proposal({}, {})
    for j, own in features.items():
        seed = torch.randint(2**31, (), generator=generator, device=generator.device).item()
        each = torch.ones(len(own), device=own.device)
        reply.centres[j], reply.counts[j] = clustered(F.normalize(own), each, count, int(seed))
    return reply


def imprinted(proxies: Tensor, task: Task, proposals: Iterable[Proposal], seed: int) -> Tensor:
    """Return proxies of which those of new classes are centres of the clients' centres, as long as old ones.

    Without any centre a class keeps those it has.
    """
    proxies, proposals = proxies.clone(), list(proposals)
    length = proxies[list(task.old)].norm(dim=2).mean()
    for j in task.new:
        own = [(reply.centres[j], reply.counts[j]) for reply in proposals if j in reply.centres]
        if own:
            centres, counts = (torch.cat(parts) for parts in zip(*own, strict=True))
            found, _ = clustered(centres, counts, len(proxies[j]), seed_of(seed, "imprint", task.index, j))
            rows = torch.arange(len(proxies[j])) % len(found)  # where there are too few, some stand twice
            proxies[j] = length * F.normalize(found[rows]).to(proxies)
    return proxies


def frozen(trained: Tensor, before: Tensor, old: Tensor) -> Tensor:
    """Return trained proxies, but those of `old` classes as before: they had no gradient, but weight decay."""
    return torch.where(old[:, None, None].to(trained.device), before.to(trained), trained)


def nca(scores: Tensor, labels: Tensor, classes: Tensor, eta: Tensor, margin: float) -> Tensor:
    """-log(exp(eta (s_y - margin)) / sum over i != y of exp(eta s_i)), where positive, averaged over images.

    The margin teaches eta nothing. It would make it smaller as long as classes are not apart by that much, on images
    that are hard to tell until it is negative, and then features flee from the proxies of their own class.
    """
    return _short_of(scores, labels, classes, eta, eta.detach() * margin)


def nca_as_printed(scores: Tensor, labels: Tensor, classes: Tensor, eta: Tensor, margin: float) -> Tensor:
    """The same value, with the gradient that it has as it stands in the paper: the margin teaches eta, too."""
    return _short_of(scores, labels, classes, eta, eta * margin)


def nca_of_the_code(scores: Tensor, labels: Tensor, classes: Tensor, eta: Tensor, margin: float) -> Tensor:
    """Do as the released code does: the margin is taken off every score, and the label's own counts exp(0) below."""
    right = _own(labels, scores)
    shifted = (eta * (scores - margin)).masked_fill(~classes, -1e4)
    shifted = shifted - shifted.amax(1, keepdim=True)
    return (shifted.masked_fill(right, 0.0).logsumexp(1) - (shifted * right).sum(1)).mean()


def _short_of(scores: Tensor, labels: Tensor, classes: Tensor, eta: Tensor, by: Tensor) -> Tensor:
    right = _own(labels, scores)
    others = (eta * scores).masked_fill(right | ~classes, -1e4).logsumexp(1)
    return F.relu(others - eta * (scores * right).sum(1) + by).mean()


def _own(labels: Tensor, scores: Tensor) -> Tensor:
    # on a CPU, one_hot would read the labels to check them
    return labels[:, None] == torch.arange(scores.shape[1], device=labels.device)
