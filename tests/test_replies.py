"""Replies: averages by hand, one reply in memory at a time."""

import gc
import weakref
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fcil.errors import UserError
from fcil.federation.replies import Replies
from fcil.records import ByClass, Done, Update, Weights, record
from fcil.scenario.benchmarks import Protocol

MEAN, SAMPLES = Protocol(), Protocol(weighting="samples")
MEDIAN, TRIMMED = Protocol(aggregate="median"), Protocol(aggregate="trimmed", trim=0.25)


@record
class Up:
    weights: Weights
    centre: Tensor
    prototypes: ByClass
    score: float
    count: int


@record
class Uncounted:
    score: float
    images: int
    ready: bool


def up(value: float, count: int = 1, classes: Iterable[int] = (0,)) -> Up:
    weights = {"w": torch.tensor([value, -value]), "steps": torch.tensor(int(10 * value))}
    prototypes = {j: torch.tensor([value + j]) for j in classes}
    return Up(weights, torch.full((2, 1), value), prototypes, value, count)


def replies(ups: Iterable[object], protocol: Protocol = MEAN, sent: object = None) -> Replies:
    listed = list(ups)
    kind = type(listed[0]) if listed else Up
    return Replies(kind, iter(listed), sent or Done(), protocol)


def test_means_of_every_kind_of_field() -> None:
    came = replies([up(1.0), up(2.0, classes=(0, 7)), up(6.0, classes=(7,))])
    assert torch.equal(came.mean("weights")["w"], torch.tensor([3.0, -3.0]))
    assert torch.equal(came.mean("centre"), torch.full((2, 1), 3.0))
    assert came.mean("score") == 3.0
    prototypes = came.mean("prototypes")  # of those who have the class
    assert prototypes.keys() == {0, 7} and prototypes[0].item() == 1.5 and prototypes[7].item() == 11.0
    assert len(came) == 3


def test_sums_of_every_kind_of_field() -> None:
    came = replies([up(1.0, 3), up(2.0, 4, classes=(0, 7))])
    assert torch.equal(came.sum("weights")["w"], torch.tensor([3.0, -3.0]))
    assert torch.equal(came.sum("centre"), torch.full((2, 1), 3.0))
    assert came.sum("score") == 3.0 and came.sum("count") == 7
    assert came.sum("prototypes")[0].item() == 3.0 and came.sum("prototypes")[7].item() == 9.0


def test_a_sum_of_small_integers_does_not_wrap_around() -> None:
    ups = [Update({"seen": torch.full((2,), 200, dtype=torch.uint8)}, 1) for _ in range(3)]
    assert replies(ups).sum("weights")["seen"].tolist() == [600, 600]


def test_a_field_whose_name_begins_another_is_not_mixed_up_with_it() -> None:
    @record
    class Pair:
        weight: Tensor
        weights: Weights

    came = replies(
        [Pair(torch.tensor(1.0), {"a": torch.tensor(5.0)}), Pair(torch.tensor(3.0), {"a": torch.tensor(7.0)})]
    )
    assert came.mean("weight").item() == 2.0 and came.mean("weights")["a"].item() == 6.0


def test_integers_are_those_of_the_first_who_counts() -> None:
    came = replies([up(9.0, count=0), up(1.5), up(2.5)])
    assert came.mean("weights")["steps"].item() == 15 and came.mean("weights")["steps"].dtype == torch.int64
    assert came.mean("count") == 1


def test_clients_may_weigh_by_their_images() -> None:
    came = replies([up(1.0, 30), up(5.0, 10)], SAMPLES)
    assert torch.allclose(came.mean("weights")["w"], torch.tensor([2.0, -2.0]))
    assert came.mean("score") == pytest.approx(2.0)
    assert came.sum("score") == 6.0  # sums are plain


def test_plain_weighting_does_not_look_at_the_images() -> None:
    assert replies([up(1.0, 30), up(5.0, 10)]).mean("score") == 3.0


@pytest.mark.parametrize("protocol", [MEAN, SAMPLES, MEDIAN, TRIMMED])
def test_a_client_without_images_counts_for_nothing(protocol: Protocol) -> None:
    came = replies([up(100.0, 0), up(2.0), up(4.0), up(-50.0, 0)], protocol)
    assert came.mean("score") == 3.0 and len(came) == 4
    assert replies([up(100.0, 0), up(2.0)], protocol).sum("score") == 2.0


@pytest.mark.parametrize("protocol", [MEAN, SAMPLES, MEDIAN])
def test_replies_without_a_count_all_count(protocol: Protocol) -> None:
    came = replies([Uncounted(1.0, 0, True), Uncounted(4.0, 0, False)], protocol)
    assert came.mean("score") == 2.5 and came.mean("ready") is True


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 7, 8])
def test_median_and_trimmed_mean_agree_with_numpy(clients: int) -> None:
    rng = np.random.default_rng(clients)
    values = rng.normal(size=(clients, 5))
    ups = [Update({"w": torch.tensor(v)}, 1) for v in values]
    assert np.allclose(replies(ups, MEDIAN).mean("weights")["w"], np.median(values, 0))
    cut = {1: 0, 2: 0, 3: 1, 4: 1, 7: 2, 8: 2}[clients]  # a quarter at each end, at least one, and one stays
    expected = np.sort(values, 0)[cut : clients - cut].mean(0)
    assert np.allclose(replies(ups, TRIMMED).mean("weights")["w"], expected)


@pytest.mark.parametrize("protocol", [MEDIAN, TRIMMED])
def test_robust_averages_withstand_one_liar(protocol: Protocol) -> None:
    honest = [up(1.0), up(1.1), up(0.9)]
    assert replies([*honest, up(1e9)], protocol).mean("score") == pytest.approx(1.0, abs=0.11)


@pytest.mark.parametrize("protocol", [MEAN, MEDIAN])
def test_robust_averages_know_every_class_that_anyone_has(protocol: Protocol) -> None:
    came = replies([up(1.0, classes=(0,)), up(2.0, classes=(0, 7)), up(4.0, classes=(7,))], protocol)
    assert came.mean("prototypes").keys() == {0, 7} and came.mean("prototypes")[7].item() == 10.0


@pytest.mark.parametrize("protocol", [MEAN, SAMPLES, MEDIAN, TRIMMED])
@pytest.mark.parametrize("ups", [[], [up(9.0, 0)]], ids=["nobody", "nobody with images"])
def test_if_nobody_answered_what_was_sent_stands(protocol: Protocol, ups: list[Up]) -> None:
    sent = up(1.0, classes=(3, 4))
    came = replies(ups, protocol, sent)
    assert torch.equal(came.mean("weights")["w"], sent.weights["w"])
    assert torch.equal(came.mean("centre"), sent.centre)
    assert came.mean("prototypes").keys() == {3, 4} and came.mean("score") == 1.0
    assert replies(ups, protocol, sent).sum("score") is None


@pytest.mark.parametrize("protocol", [MEAN, MEDIAN])
def test_if_nobody_answered_and_nothing_was_sent_the_user_is_told(protocol: Protocol) -> None:
    with pytest.raises(UserError, match="no client answered, so there is no mean of 'weights'.*lower `lost`"):
        replies([], protocol).mean("weights")


def test_the_mean_of_nothing_is_nothing_if_somebody_answered() -> None:
    assert replies([up(1.0, classes=()), up(2.0, classes=())]).mean("prototypes") == {}


class Counted:
    """A stream of replies that knows how many of those it gave are still held by anyone."""

    def __init__(self, length: int):
        self.length, self.given, self.most = length, [], 0

    def __iter__(self) -> Iterator[Up]:
        for k in range(self.length):
            self.most = max(self.most, self.alive())
            reply = up(float(k))
            self.given.append(weakref.ref(reply.weights["w"]))
            yield reply
            del reply

    def alive(self) -> int:
        gc.collect()
        return sum(ref() is not None for ref in self.given)


@pytest.mark.parametrize("protocol", [MEAN, SAMPLES])
def test_an_average_holds_one_reply_at_a_time(protocol: Protocol) -> None:
    stream = Counted(6)
    came = Replies(Up, iter(stream), Done(), protocol)
    assert torch.equal(came.mean("weights")["w"], torch.tensor([2.5, -2.5]))
    assert stream.most <= 1, "the last reply may still be there while the next is made, no other"
    assert stream.alive() == 0
    assert came.mean("score") == 2.5 and came.sum("score") == 15.0 and len(came) == 6  # all from the one pass


def test_no_client_answers_before_someone_looks() -> None:
    stream = Counted(3)
    came = Replies(Up, iter(stream), Done(), MEAN)
    assert stream.given == []
    came.finish()
    assert len(stream.given) == 3


def test_single_replies_are_gone_once_averaged() -> None:
    came = replies([up(1.0), up(2.0)])
    came.mean("score")
    with pytest.raises(RuntimeError, match="iterate over them before calling mean or sum"):
        iter(came)


@pytest.mark.parametrize("protocol", [MEAN, SAMPLES, MEDIAN, TRIMMED])
def test_single_replies_can_be_averaged_after_they_were_seen(protocol: Protocol) -> None:
    came = replies([up(1.0), up(3.0)], protocol)
    assert [r.score for r in came] == [1.0, 3.0] == [r.score for r in came]
    assert came.mean("score") == 2.0 and came.sum("score") == 4.0 and len(came) == 2
    assert [r.score for r in came] == [1.0, 3.0]


@pytest.mark.parametrize("protocol", [MEAN, MEDIAN, TRIMMED])
def test_sum_and_mean_come_in_any_order(protocol: Protocol) -> None:
    came = replies([up(1.0), up(3.0)], protocol)
    assert came.sum("score") == 4.0 and came.mean("score") == 2.0 and came.sum("score") == 4.0


@pytest.mark.parametrize("protocol", [MEAN, SAMPLES, MEDIAN])
def test_averaging_changes_no_reply_and_not_what_was_sent(protocol: Protocol) -> None:
    ups, sent = [up(1.0, 2), up(2.0, 2)], up(7.0)
    came = replies(ups, protocol, sent)
    mean = came.mean("weights")
    mean["w"] += 100
    assert [u.weights["w"].tolist() for u in [*ups, sent]] == [[1.0, -1.0], [2.0, -2.0], [7.0, -7.0]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3, width=32), st.integers(1, 50)), min_size=1, max_size=9))
def test_means_agree_with_numpy_and_the_order_is_fixed(pairs: list[tuple[float, int]]) -> None:
    values, counts = np.array([v for v, _ in pairs], np.float32), [n for _, n in pairs]
    ups = [Update({"w": torch.tensor([v])}, n) for v, n in zip(values, counts, strict=True)]
    plain, weighted = replies(ups).mean("weights")["w"], replies(ups, SAMPLES).mean("weights")["w"]
    assert np.isclose(plain.item(), values.astype(float).mean(), rtol=1e-5, atol=1e-3)
    assert np.isclose(weighted.item(), np.average(values.astype(float), weights=counts), rtol=1e-5, atol=1e-3)
    running = np.float32(values[0])
    for v in values[1:]:  # one after the other, as they were asked: the same bits everywhere
        running = np.float32(running + v)
    assert plain.item() == np.float32(running / np.float32(len(values)))
