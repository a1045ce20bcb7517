"""The metrics of class-incremental learning, as pure functions of counts.

`correct[t][j]` is how many test images of task j were answered rightly after task t (j <= t), `total[j]` how many test
images task j has, or `total[t][j]` how many answered after task t, where nodes that hold them come and go: then a task
that nobody could be asked about stands as last measured. Accuracies are percent, 0 to 100. Papers and codes differ in
what they call forgetting, and some print the average where others print the final accuracy, so each has its own name
here.
"""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import Any

Correct = Sequence[Sequence[int]]  # row t: tasks 0..t
Total = Sequence[int] | Sequence[Sequence[int]]


def matrix(correct: Correct, total: Total) -> list[list[float]]:
    """Return A[t][j], the accuracy on task j after task t."""
    found: list[list[float]] = []
    for row, asked in zip(correct, _rows(correct, total), strict=True):
        before = found[-1] + [0.0] if found else [0.0]
        found.append([100 * c / n if n else before[j] for j, (c, n) in enumerate(zip(row, asked, strict=True))])
    return found


def overall(correct: Correct, total: Total) -> list[float]:
    """Return acc_t for each t, the accuracy after task t on all test images seen so far."""
    rows = _rows(correct, total)
    return [100 * sum(row) / max(1, sum(asked)) for row, asked in zip(correct, rows, strict=True)]


def final(correct: Correct, total: Total) -> float:
    """Return the accuracy on all test images after the last task."""
    return overall(correct, total)[-1]


def average(correct: Correct, total: Total) -> float:
    """Return the average incremental accuracy: the mean of acc_t over all tasks, the first included."""
    return fmean(overall(correct, total))


def forgetting(correct: Correct, total: Total) -> float:
    """Return how far the earlier tasks have fallen from their best, on average; 0 with one task."""
    return _mean(forgotten(matrix(correct, total)))


def forgotten(accuracy: Sequence[Sequence[float]]) -> list[float]:
    """Return for each task of a matrix, but the last, how far it has fallen from its best before the last task."""
    return [max(row[j] for row in accuracy[j:-1]) - accuracy[-1][j] for j in range(len(accuracy) - 1)]


def forgetting_mfcl(correct: Correct, total: Total) -> float:
    """Return forgetting as MFCL defines it: from a task's own end, divided by all tasks with the last one's zero."""
    a = matrix(correct, total)
    return fmean(a[j][j] - a[-1][j] for j in range(len(a)))


def bwt(correct: Correct, total: Total) -> float:
    """Return the backward transfer: what the later tasks gave to the earlier ones; 0 with one task."""
    a = matrix(correct, total)
    return _mean([a[-1][j] - a[j][j] for j in range(len(a) - 1)])


def summary(correct: Correct, total: Total) -> dict[str, Any]:
    """Return all that a result says about accuracy."""
    return {
        "final": final(correct, total),
        "average": average(correct, total),
        "forgetting": forgetting(correct, total),
        "bwt": bwt(correct, total),
        "overall": overall(correct, total),
        "matrix": matrix(correct, total),
    }


def mean_and_sem(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error (n - 1); one value has no standard error."""
    return fmean(values), stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def mean_and_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of two values or more, and the interval that holds it with 95 %, by Student's t."""
    from scipy.stats import t

    mean, error = mean_and_sem(values)
    half = float(t.ppf(0.975, len(values) - 1)) * (error or 0.0)
    return mean, mean - half, mean + half


def per_client(per_class_accuracy: Sequence[float | None], held_counts: Sequence[Sequence[int]]) -> list[float | None]:
    """Return each client's accuracy: that of the classes, weighted by how many images of each it has held so far."""
    return [_weighted(per_class_accuracy, held) for held in held_counts]


def _weighted(accuracies: Sequence[float | None], weights: Sequence[int]) -> float | None:
    pairs = [(a, w) for a, w in zip(accuracies, weights, strict=True) if a is not None and w > 0]
    whole = sum(w for _, w in pairs)
    return sum(a * w for a, w in pairs) / whole if whole else None


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _rows(correct: Correct, total: Total) -> list[list[int]]:
    """Return how many images were asked about after each task, by task; refuse counts that cannot be."""
    if not correct or len(correct) != len(total):
        raise ValueError(f"{len(correct)} rows of answers for {len(total)} tasks")
    fixed = [n for n in total if isinstance(n, int)]
    rows = [fixed[: t + 1] for t in range(len(fixed))] or [list(row) for row in total if not isinstance(row, int)]
    for t, (row, asked) in enumerate(zip(correct, rows, strict=True)):
        if len(row) != t + 1 or len(asked) != t + 1:
            raise ValueError(f"the answers after task {t} are on {len(row)} tasks, not {t + 1}")
        for j, (right, n) in enumerate(zip(row, asked, strict=True)):
            if not 0 <= right <= n or (fixed and n == 0):
                raise ValueError(f"{right} right answers on the {n} images of task {j}")
    return rows
