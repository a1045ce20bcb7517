"""The metrics against the facts sheet's numbers, and what must hold for any counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fcil.results.metrics import (
    average,
    bwt,
    final,
    forgetting,
    forgetting_mfcl,
    forgotten,
    matrix,
    mean_and_sem,
    overall,
    per_client,
    summary,
)

KNOWN = [[80], [60, 70], [50, 40, 90]]
EQUAL = [100, 100, 100]

Counts = tuple[list[list[int]], list[int]]


@st.composite
def counts(draw: st.DrawFn, equal: bool = False) -> Counts:
    """Any number of tasks, each with its own number of test images."""
    tasks = draw(st.integers(1, 7))
    sizes = st.integers(1, 500)
    total = [draw(sizes)] * tasks if equal else draw(st.lists(sizes, min_size=tasks, max_size=tasks))
    return [[draw(st.integers(0, total[j])) for j in range(t + 1)] for t in range(tasks)], total


def test_known_answers() -> None:
    assert final(KNOWN, EQUAL) == 60.0
    assert average(KNOWN, EQUAL) == pytest.approx(205 / 3)
    assert forgetting(KNOWN, EQUAL) == 30.0
    assert bwt(KNOWN, EQUAL) == -30.0
    assert forgetting_mfcl(KNOWN, EQUAL) == 20.0
    assert overall(KNOWN, EQUAL) == [80.0, 65.0, 60.0]
    assert matrix(KNOWN, EQUAL) == [[80.0], [60.0, 70.0], [50.0, 40.0, 90.0]]


def test_forgetting_starts_from_the_best_and_bwt_from_the_own_end() -> None:
    correct = [[50], [90, 70], [40, 60, 80]]
    assert forgotten(matrix(correct, EQUAL)) == [50.0, 10.0]
    assert forgetting(correct, EQUAL) == 30.0
    assert bwt(correct, EQUAL) == -10.0


def test_large_tasks_weigh_more_in_the_final_accuracy() -> None:
    assert final([[10], [0, 90]], [10, 90]) == 90.0
    assert matrix([[10], [0, 90]], [10, 90])[-1] == [0.0, 100.0]


def test_one_task_forgets_nothing() -> None:
    assert summary([[3]], [4]) == {
        "final": 75.0, "average": 75.0, "forgetting": 0.0, "bwt": 0.0, "overall": [75.0], "matrix": [[75.0]],
    }  # fmt: skip


@given(counts())
def test_every_accuracy_is_a_percentage(given_counts: Counts) -> None:
    found = summary(*given_counts)
    for value in [found["final"], found["average"], *found["overall"], *sum(found["matrix"], [])]:
        assert 0 <= value <= 100
    for value in [found["forgetting"], found["bwt"]]:
        assert -100 <= value <= 100


@given(counts())
def test_the_metrics_hold_together(given_counts: Counts) -> None:
    a, steps, tasks = matrix(*given_counts), overall(*given_counts), len(given_counts[1])
    assert min(a[-1]) - 1e-9 <= final(*given_counts) <= max(a[-1]) + 1e-9
    assert min(steps) - 1e-9 <= average(*given_counts) <= max(steps) + 1e-9
    assert forgetting(*given_counts) >= -bwt(*given_counts) - 1e-9  # the best is at least the task's own end
    assert forgetting_mfcl(*given_counts) * tasks == pytest.approx(-bwt(*given_counts) * (tasks - 1), abs=1e-9)


@given(counts(equal=True))
def test_with_equal_tasks_the_final_accuracy_is_the_mean_of_the_last_row(given_counts: Counts) -> None:
    last = matrix(*given_counts)[-1]
    assert final(*given_counts) == pytest.approx(sum(last) / len(last))


@given(st.integers(1, 9), st.integers(1, 50), st.data())
def test_an_unchanging_run_has_one_accuracy_and_no_forgetting(tasks: int, size: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, size))
    correct, total = [[right] * (t + 1) for t in range(tasks)], [size] * tasks
    assert final(correct, total) == 100 * right / size
    assert average(correct, total) == pytest.approx(100 * right / size)
    assert forgetting(correct, total) == bwt(correct, total) == forgetting_mfcl(correct, total) == 0


@given(counts(), st.randoms(use_true_random=False))
def test_the_order_of_the_tasks_does_not_move_the_final_accuracy(given_counts: Counts, random: object) -> None:
    correct, total = given_counts
    order = list(range(len(total)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = [[0] * (t + 1) for t in range(len(total) - 1)] + [[correct[-1][j] for j in order]]
    assert final(moved, [total[j] for j in order]) == final(correct, total)


@pytest.mark.parametrize(
    ("correct", "total", "says"),
    [
        ([], [], "0 rows"),
        ([[1]], [1, 1], "1 rows of answers for 2 tasks"),
        ([[1], [1]], [1, 1], "after task 1 are on 1 tasks"),
        ([[2]], [1], "2 right answers on the 1 images of task 0"),
        ([[-1]], [1], "-1 right answers"),
        ([[0]], [0], "the 0 images of task 0"),
    ],
)
def test_counts_that_cannot_be(correct: list[list[int]], total: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        summary(correct, total)


def test_mean_and_standard_error() -> None:
    mean, sem = mean_and_sem([1.0, 2.0, 3.0, 4.0])
    assert (mean, sem) == (2.5, pytest.approx(0.6454972243679028))  # sqrt(5/3) / 2
    assert mean_and_sem([81.25]) == (81.25, None)
    assert mean_and_sem([0.1] * 3)[1] == 0.0


@given(st.lists(st.floats(0, 100), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_seeds_have_no_order(values: list[float], random: object) -> None:
    moved = list(values)
    random.shuffle(moved)  # type: ignore[attr-defined]
    assert mean_and_sem(moved) == pytest.approx(mean_and_sem(values))
    mean, sem = mean_and_sem(values)
    assert min(values) - 1e-9 <= mean <= max(values) + 1e-9
    assert sem is not None and 0 <= sem <= 50 + 1e-9


def test_a_clients_accuracy_is_that_of_its_own_images() -> None:
    classes = [100.0, 50.0, 0.0, None]
    assert per_client(classes, [[1, 1, 0, 0], [0, 1, 3, 0], [0, 0, 0, 0], [0, 0, 0, 9]]) == [75.0, 12.5, None, None]
    with pytest.raises(ValueError):
        per_client(classes, [[1, 1]])


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 1000)), min_size=1, max_size=10),
    st.integers(2, 9),
    st.randoms(use_true_random=False),
)
def test_a_clients_accuracy_is_a_weighted_mean(pairs: list[tuple[float, int]], factor: int, random: object) -> None:
    moved = list(pairs)
    random.shuffle(moved)  # type: ignore[attr-defined]
    [one] = per_client([a for a, _ in pairs], [[w for _, w in pairs]])
    [other] = per_client([a for a, _ in moved], [[w * factor for _, w in moved]])
    held = [a for a, w in pairs if w]
    assert (one is None) == (not held)
    if one is not None:
        assert other == pytest.approx(one)
        assert min(held) - 1e-9 <= one <= max(held) + 1e-9
