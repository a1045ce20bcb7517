"""Averages that a few wrong replies cannot move far: median, trimmed mean, and clipped updates.

Flower has the first two for its own messages (`FedMedian`, `FedTrimmedAvg`), which no simulation has; a test compares.
"""

import math
from collections.abc import Iterator

import torch

from fcil.records import Weights
from fcil.scenario.benchmarks import Protocol


def ordered(replies: list[Weights], protocol: Protocol) -> Weights:
    """Median or trimmed mean of every single entry; integers are the first reply's."""
    result = {}
    for name in dict.fromkeys(name for reply in replies for name in reply):
        stacked = torch.stack([r[name] for r in replies if name in r])
        if not stacked.is_floating_point():
            result[name] = stacked[0]
            continue
        in_order, n = stacked.sort(0).values, len(stacked)
        cut = (n - 1) // 2 if protocol.aggregate == "median" else _trimmed(protocol.trim, n)
        result[name] = in_order[cut : n - cut].mean(0)
    return result


def _trimmed(share: float, n: int) -> int:
    """Return how many replies to cut off at each end: at least one where any are to go and enough remain."""
    return min(max(1, math.ceil(share * n)), (n - 1) // 2) if share else 0


def clipped(replies: list[Weights], sent: Weights, most: float) -> Iterator[Weights]:
    """Yield replies that differ from what was sent by a norm of at most `most`; by the median of theirs if it is 0."""
    norms = torch.stack([_distance(reply, sent) for reply in replies])
    limit = torch.tensor(most).to(norms) if most else norms.quantile(0.5)
    for reply, norm in zip(replies, norms, strict=True):
        factor = (limit / norm.clamp_min(1e-30)).clamp_max(1.0)
        yield {
            name: torch.lerp(sent[name].to(tensor), tensor, factor.to(tensor)) if _moves(name, tensor, sent) else tensor
            for name, tensor in reply.items()
        }


def _distance(reply: Weights, sent: Weights) -> torch.Tensor:
    """Return the norm of what a client changed, over all its tensors."""
    moved = [tensor - sent[name].to(tensor) for name, tensor in reply.items() if _moves(name, tensor, sent)]
    norms = [torch.linalg.vector_norm(own.double()) for own in moved]
    return torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)


def _moves(name: str, tensor: torch.Tensor, sent: Weights) -> bool:
    return tensor.is_floating_point() and name in sent
