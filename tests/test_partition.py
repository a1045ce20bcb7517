import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fcil.errors import UserError
from fcil.scenario.benchmarks import PARTITIONS
from fcil.scenario.partition import evenly, partition

COMPLETE = [kind for kind in PARTITIONS if kind != "class_subset"]
EQUAL = ["lda_equal", "dirichlet_balanced"]
CIFAR_TASK = np.random.RandomState(0).permutation(np.repeat(np.arange(10), 500))

label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(lambda values: np.array(values, dtype=np.int64))
alphas = st.sampled_from([0.0, 1e-4, 0.1, 1.0, 1000.0])


def deal(kind, labels, clients, seed=0, **options):
    return partition(kind, labels, clients, np.random.default_rng(seed), **options)


def counts(shares, labels, classes):
    return np.array([np.bincount(labels[share], minlength=classes) for share in shares])


@pytest.mark.parametrize("kind", COMPLETE)
@settings(max_examples=40, deadline=None)
@given(labels=label_lists, clients=st.integers(1, 40), alpha=alphas, seed=st.integers(0, 5))
def test_every_image_goes_to_exactly_one_client(kind, labels, clients, alpha, seed):
    shares = deal(kind, labels, clients, seed, alpha=alpha)
    assert len(shares) == clients
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(len(labels)))
    again = deal(kind, labels, clients, seed, alpha=alpha)
    assert all(np.array_equal(a, b) for a, b in zip(shares, again, strict=True))
    if kind in EQUAL or (alpha == 0 and kind == "dirichlet_class"):
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1


@settings(max_examples=40, deadline=None)
@given(labels=label_lists, clients=st.integers(1, 20), share=st.floats(0.01, 1), seed=st.integers(0, 5))
def test_class_subset_gives_whole_classes(labels, clients, share, seed):
    classes = np.unique(labels)
    owned = max(1, round(share * len(classes)))
    for mine in deal("class_subset", labels, clients, seed, class_share=share):
        held = np.unique(labels[mine])
        assert len(held) == owned
        assert np.array_equal(mine, np.flatnonzero(np.isin(labels, held)))


@settings(max_examples=40, deadline=None)
@given(labels=label_lists, clients=st.integers(1, 20), seed=st.integers(0, 5))
def test_dealing_evenly_leaves_differences_of_one(labels, clients, seed):
    shares = evenly(labels, clients, np.random.default_rng(seed))
    table = counts(shares, labels, 5)
    assert (table.max(axis=0) - table.min(axis=0)).max() <= 1
    assert table.sum(axis=1).max() - table.sum(axis=1).min() <= 1


def test_lda_of_a_cifar_task():
    shares = deal("lda_equal", CIFAR_TASK, 50)
    assert [len(share) for share in shares] == [100] * 50
    tables = np.concatenate([counts(deal("lda_equal", CIFAR_TASK, 50, seed), CIFAR_TASK, 10) for seed in range(20)])
    assert 6 <= np.median(tables) <= 7
    assert 22 <= np.percentile(tables, 90) <= 26
    assert 0.12 <= (tables == 0).mean() <= 0.16
    assert 0.12 <= (tables > 20).mean() <= 0.16


def test_dirichlet_class_of_a_cifar_task():
    tables = np.concatenate([counts(deal("dirichlet_class", CIFAR_TASK, 50, s), CIFAR_TASK, 10) for s in range(20)])
    assert 6 <= np.median(tables) <= 7
    assert 22 <= np.percentile(tables, 90) <= 27
    assert (tables.sum(axis=1) > 0).all()


@pytest.mark.parametrize("kind", EQUAL)
def test_a_large_alpha_is_even(kind):
    table = counts(deal(kind, CIFAR_TASK, 50, alpha=100_000), CIFAR_TASK, 10)
    assert np.median(np.abs(table - 10)) <= 3
    assert np.abs(table - 10).mean() < 4  # the last in line get what is left, so a few are far off


def test_alpha_changes_the_mix():
    sharp, flat = (counts(deal("dirichlet_balanced", CIFAR_TASK, 50, alpha=a), CIFAR_TASK, 10) for a in (0.1, 100.0))
    assert (sharp == 0).mean() > 0.3
    assert (flat == 0).mean() == 0


def test_lda_leaves_no_fixed_client_the_rest():
    last = [counts(deal("lda_equal", CIFAR_TASK, 50, seed), CIFAR_TASK, 10)[-1] for seed in range(40)]
    assert np.mean([(row > 0).sum() for row in last]) > 7


def test_glfc_split():
    for share in deal("class_subset", CIFAR_TASK, 30, class_share=0.6):
        assert sorted(np.bincount(CIFAR_TASK[share], minlength=10)) == [0] * 4 + [500] * 6


def test_powerlaw_sizes_and_classes():
    table = counts(deal("powerlaw_dirichlet", CIFAR_TASK, 50, class_share=0.5, exponent=2.0), CIFAR_TASK, 10)
    sizes = np.sort(table.sum(axis=1))[::-1]
    assert sizes[:5].sum() > 3 * sizes[-25:].sum() / 5
    assert sizes[0] > 2 * np.median(sizes)
    assert (table > 0).sum(axis=1).max() <= 5
    assert (table.sum(axis=0) == 500).all()
    steep = counts(deal("powerlaw_dirichlet", CIFAR_TASK, 50, class_share=0.5, exponent=50.0), CIFAR_TASK, 10)
    assert steep.sum(axis=1).max() < sizes[0]


def test_reseeding_repeats_the_proportions():
    first = counts(deal("dirichlet_class", CIFAR_TASK, 50, 3), CIFAR_TASK, 10)
    second = counts(deal("dirichlet_class", CIFAR_TASK[::-1].copy(), 50, 3), CIFAR_TASK[::-1], 10)
    assert np.array_equal(first, second)


@pytest.mark.parametrize("kind", PARTITIONS)
def test_more_clients_than_images(kind):
    shares = deal(kind, CIFAR_TASK[:360], 5000)
    assert len(shares) == 5000
    dealt = np.unique(np.concatenate(shares))
    assert np.array_equal(dealt, np.arange(360))


def test_no_clients_and_wrong_kinds():
    assert deal("lda_equal", CIFAR_TASK, 0) == []
    with pytest.raises(UserError, match="did you mean 'lda_equal'"):
        deal("lda_equl", CIFAR_TASK, 3)
