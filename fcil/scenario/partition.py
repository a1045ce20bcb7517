"""Partitions: how a task's images are dealt to its clients.

Each takes the images' labels, the number of clients and a numpy Generator, and returns one sorted index array per
client. All but `class_subset` give every image to exactly one client.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fcil.errors import unknown
from fcil.scenario.benchmarks import PARTITIONS

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]

REDRAWS = 50  # dirichlet_class gives up after so many draws


def partition(
    kind: str,
    labels: Indices,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 1.0,
    class_share: float = 0.6,
    exponent: float = 3.0,
) -> list[Indices]:
    """Deal images to clients by the partition called `kind`."""
    if clients == 0:
        return []
    if kind == "lda_equal":
        return lda_equal(labels, clients, rng, alpha)
    if kind == "dirichlet_class":
        return dirichlet_class(labels, clients, rng, alpha)
    if kind == "class_subset":
        return class_subset(labels, clients, rng, class_share)
    if kind == "powerlaw_dirichlet":
        return powerlaw_dirichlet(labels, clients, rng, alpha, class_share, exponent)
    if kind == "dirichlet_balanced":
        return dirichlet_balanced(labels, clients, rng, alpha)
    raise unknown("partition", kind, PARTITIONS)


def evenly(labels: Indices, clients: int, rng: np.random.Generator) -> list[Indices]:
    """Deal every class round the clients: sizes, and counts of each class, differ by at most one."""
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    seats = rng.permutation(clients)
    owner = seats[np.arange(len(labels)) % clients]
    return _gather(by_class, owner, clients)


def lda_equal(labels: Indices, clients: int, rng: np.random.Generator, alpha: float) -> list[Indices]:
    """Give all clients equally many images, drawn from each one's own class mix ~ Dir(alpha), as MFCL and Flower do.

    Clients draw one after the other without replacement; a class that is used up leaves the mix. Their order is random,
    so that not the same clients get the leftovers of every task. Where the images cannot be divided equally, sizes
    differ by at most one, so there is no need to fall back to another partition.
    """
    if alpha == 0:
        return evenly(labels, clients, rng)
    piles = _Piles.of(labels, rng)
    mixes = _dirichlet(alpha, len(piles.left), clients, rng)
    sizes = _equal_sizes(len(labels), clients, rng)
    shares = [_none()] * clients
    for client in rng.permutation(clients):
        shares[client] = np.sort(piles.take(_draw(int(sizes[client]), mixes[client], piles.left, rng)))
    return shares


def dirichlet_class(labels: Indices, clients: int, rng: np.random.Generator, alpha: float) -> list[Indices]:
    """Cut each class by proportions over the clients ~ Dir(alpha), passing over clients that are full, as TARGET does.

    The draw is repeated until every client has an image, at most 50 times; then the one with the fewest empty clients
    counts.
    """
    if alpha == 0:
        return evenly(labels, clients, rng)
    best: tuple[int, list[Indices]] | None = None
    for _ in range(REDRAWS):
        shares = _cut_classes(labels, clients, rng, alpha)
        empty = sum(len(share) == 0 for share in shares)
        if best is None or empty < best[0]:
            best = empty, shares
        if empty <= max(0, clients - len(labels)):
            break
    assert best is not None
    return best[1]


def class_subset(labels: Indices, clients: int, rng: np.random.Generator, class_share: float) -> list[Indices]:
    """Give each client all images of its own random classes, as GLFC does.

    Clients share images, and a class that no client drew is left out.
    """
    classes = np.unique(labels)
    owned = _owned(len(classes), class_share)
    return [
        np.flatnonzero(np.isin(labels, rng.choice(classes, owned, replace=False))) if owned else _none()
        for _ in range(clients)
    ]


def powerlaw_dirichlet(
    labels: Indices, clients: int, rng: np.random.Generator, alpha: float, class_share: float, exponent: float
) -> list[Indices]:
    """Give clients sizes from a power law, own classes, and a mix of these ~ Dir(alpha), as FedSpace does.

    A class that nobody drew goes to one client beyond its share. What is left when the owners are full is dealt to
    owners in proportion to their size. An `alpha` of 0 mixes a client's own classes evenly.
    """
    piles = _Piles.of(labels, rng)
    classes = len(piles.left)
    weight = 1.0 + rng.pareto(exponent - 1.0, clients)
    weight = weight / weight.sum()
    sizes = np.diff(np.round(np.concatenate([[0.0], np.cumsum(weight)]) * len(labels))).astype(np.int64)
    owns = rng.random((clients, classes)).argsort(axis=1) < _owned(classes, class_share)
    for orphan in np.flatnonzero(~owns.any(axis=0)):
        owns[rng.integers(clients), orphan] = True
    mixes = (_dirichlet(alpha, classes, clients, rng) if alpha else np.ones((clients, classes))) * owns
    counts = np.zeros((clients, classes), dtype=np.int64)
    left = piles.left.copy()
    for client in rng.permutation(clients):
        counts[client] = _draw(int(sizes[client]), mixes[client], np.where(owns[client], left, 0), rng)
        left -= counts[client]
    for j in range(classes):
        owners = weight * owns[:, j]
        counts[:, j] += rng.multinomial(left[j], owners / owners.sum())
    return [np.sort(piles.take(count)) for count in counts]


def dirichlet_balanced(labels: Indices, clients: int, rng: np.random.Generator, alpha: float) -> list[Indices]:
    """Give all clients equally many images by own class priors ~ Dir(alpha), one at a time in turn, as FedFTG does.

    Unlike in `lda_equal`, a class runs out for all clients at once, so no client is left with what the others did not
    want. Sizes differ by at most one.
    """
    if alpha == 0:
        return evenly(labels, clients, rng)
    piles = _Piles.of(labels, rng)
    mixes = _dirichlet(alpha, len(piles.left), clients, rng)
    sizes = _equal_sizes(len(labels), clients, rng)
    counts = np.zeros(mixes.shape, dtype=np.int64)
    left = piles.left.copy()
    for turn in range(sizes.max(initial=0)):
        waiting = rng.permutation(np.flatnonzero(sizes > turn))
        while len(waiting):
            wanted = mixes[waiting] * (left > 0)
            wanted = np.where(wanted.sum(axis=1, keepdims=True) > 0, wanted, left)
            bounds = wanted.cumsum(axis=1)
            picks = (rng.random((len(waiting), 1)) * bounds[:, -1:] >= bounds).sum(axis=1)
            # of those who want the same class the first in line are served, the others draw again
            line = np.argsort(picks, kind="stable")
            first = np.searchsorted(picks[line], np.arange(len(left)))
            served = line[np.arange(len(line)) - first[picks[line]] < left[picks[line]]]
            counts[waiting[served], picks[served]] += 1
            left -= np.bincount(picks[served], minlength=len(left))
            waiting = np.delete(waiting, served)
    return [np.sort(piles.take(count)) for count in counts]


@dataclass
class _Piles:
    """The images of each class in random order, taken from the top."""

    images: list[Indices]
    left: Indices

    @classmethod
    def of(cls, labels: Indices, rng: np.random.Generator) -> "_Piles":
        images = [rng.permutation(np.flatnonzero(labels == j)) for j in np.unique(labels)]
        return cls(images, np.array([len(pile) for pile in images], dtype=np.int64))

    def take(self, counts: Indices) -> Indices:
        ends = self.left.copy()
        self.left = ends - counts
        taken = [self.images[j][self.left[j] : ends[j]] for j in np.flatnonzero(counts)]
        return np.concatenate(taken) if taken else _none()


def _draw(size: int, mix: Floats, left: Indices, rng: np.random.Generator) -> Indices:
    # Counts of `size` single draws without replacement, where a class that is used up leaves the mix: draws beyond what
    # is left are drawn again, which is the same in distribution and needs a few multinomials in place of `size` steps.
    counts = np.zeros_like(left)
    size = min(size, int(left.sum()))
    while missing := size - int(counts.sum()):
        room = left - counts
        wanted = np.where(room > 0, mix, 0.0)
        total = wanted.sum()
        wanted = wanted / total if total > 0 else room / room.sum()
        counts += np.minimum(rng.multinomial(missing, wanted), room)
    return counts


def _cut_classes(labels: Indices, clients: int, rng: np.random.Generator, alpha: float) -> list[Indices]:
    held = np.zeros(clients, dtype=np.int64)
    images, owners = [_none()], [_none()]
    for j in np.unique(labels):
        pile = rng.permutation(np.flatnonzero(labels == j))
        open_to = held < len(labels) / clients
        share = _dirichlet(alpha, clients, 1, rng)[0] * open_to
        share = share / share.sum() if share.sum() > 0 else open_to / open_to.sum()
        ends = np.floor(np.cumsum(share) * len(pile) + 1e-9).astype(np.int64)
        ends[-1] = len(pile)
        counts = np.diff(ends, prepend=0)
        if not open_to[-1]:  # what rounding left over belongs to the last client that has room
            counts[np.flatnonzero(open_to)[-1]] += counts[-1]
            counts[-1] = 0
        images.append(pile)
        owners.append(np.repeat(np.arange(clients), counts))
        held += counts
    return _gather(np.concatenate(images), np.concatenate(owners), clients)


def _gather(images: Indices, owner: Indices, clients: int) -> list[Indices]:
    order = np.lexsort((images, owner))
    return np.split(images[order], np.searchsorted(owner[order], np.arange(1, clients)))


def _dirichlet(alpha: float, classes: int, rows: int, rng: np.random.Generator) -> Floats:
    # a very small alpha underflows to rows without any weight; the callers read these as "no preference"
    return np.nan_to_num(rng.dirichlet(np.full(classes, alpha), rows)) if classes else np.zeros((rows, 0))


def _equal_sizes(images: int, clients: int, rng: np.random.Generator) -> Indices:
    sizes = np.full(clients, images // clients, dtype=np.int64)
    sizes[rng.permutation(clients)[: images % clients]] += 1
    return sizes


def _owned(classes: int, class_share: float) -> int:
    return min(classes, max(1, round(class_share * classes)))


def _none() -> Indices:
    return np.zeros(0, dtype=np.int64)
