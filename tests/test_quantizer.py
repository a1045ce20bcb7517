"""Product quantisation: codes and maps, and k-means in which clients send nothing but sums."""

from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from torch import Tensor

from fcil.blocks import quantizer
from fcil.blocks.quantizer import Cells, cells, code_bytes, coded, decoded, moved, nearest, no_codebooks, quantised
from fcil.blocks.quantizer import vectors as vectors_of
from fcil.errors import UserError
from fcil.records import flatten, size_in_bytes
from fcil.scenario.datasets import load

BOOKS, CENTRES, WIDTH = 3, 5, 4


@pytest.fixture(autouse=True)
def _double(in_double: None) -> None:
    pass


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=draws(seed))


def added(found: list[Cells]) -> Cells:
    return Cells(*(sum(getattr(own, name) for own in found) for name in ("sums", "squares", "counts")))


def exchanged(codebooks: Tensor, clients: list[Tensor], exchanges: int) -> Tensor:
    """Move centres by what clients send, so many times."""
    return reduce(
        lambda now, e: moved(now, added([cells(now, own) for own in clients]), draws(e)), range(exchanges), codebooks
    )


def error(codebooks: Tensor, found: Tensor) -> Tensor:
    """Return the mean squared distance of vectors to their centres, by book."""
    chosen = codebooks[torch.arange(len(codebooks)), nearest(codebooks, found)]
    return (found - chosen).square().sum(2).mean(0)


# -- codes and maps ---------------------------------------------------------------------------------------------------


def test_a_vector_gets_the_number_of_the_nearest_centre() -> None:
    codebooks, found = some(BOOKS, CENTRES, WIDTH), some(50, BOOKS, WIDTH, seed=1)
    by_hand = [
        [min(range(CENTRES), key=lambda c: float((v[b] - codebooks[b, c]).norm())) for b in range(BOOKS)] for v in found
    ]
    assert nearest(codebooks, found).tolist() == by_hand and len({tuple(row) for row in by_hand}) > 20


def test_a_byte_stands_for_a_part_of_the_channels_in_one_place() -> None:
    maps = torch.arange(2 * 6 * 2 * 3.0).view(2, 6, 2, 3)
    found = vectors_of(maps, 2)
    assert found.shape == (2 * 2 * 3, 3, 2)
    place = 1 * 6 + 1 * 3 + 2  # the second map, row 1, column 2
    assert found[place].tolist() == maps[1, :, 1, 2].view(3, 2).tolist()


def test_maps_that_are_made_of_centres_come_back_from_their_codes() -> None:
    codebooks = some(BOOKS, 256, WIDTH)
    codes = torch.randint(0, 256, (7, 2 * 3 * BOOKS), generator=draws(1)).to(torch.uint8)
    maps = decoded(codebooks, codes, (BOOKS * WIDTH, 2, 3))
    assert maps.shape == (7, BOOKS * WIDTH, 2, 3)
    again = coded(codebooks, maps)
    assert again.dtype == torch.uint8 and torch.equal(again, codes), "all 256 numbers fit into a byte"
    assert torch.equal(quantised(codebooks, maps), maps)
    assert code_bytes(codebooks, (BOOKS * WIDTH, 2, 3)) == again[0].nbytes == 18


def test_quantised_maps_are_as_their_codes_give_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer, "AT_ONCE", 7)
    codebooks, maps = some(BOOKS, CENTRES, WIDTH), some(4, BOOKS * WIDTH, 3, 2, seed=2)
    there = decoded(codebooks, coded(codebooks, maps), (BOOKS * WIDTH, 3, 2))
    assert torch.equal(quantised(codebooks, maps), there) and not torch.equal(there, maps)


def test_no_maps_have_no_codes() -> None:
    codebooks, nothing = some(BOOKS, CENTRES, WIDTH), torch.zeros(0, BOOKS * WIDTH, 3, 2)
    assert coded(codebooks, nothing).shape == (0, 18)
    assert decoded(codebooks, coded(codebooks, nothing), (BOOKS * WIDTH, 3, 2)).shape == nothing.shape
    assert not cells(codebooks, vectors_of(nothing, WIDTH)).counts.any()


def test_channels_that_cannot_be_cut_evenly_are_refused() -> None:
    with pytest.raises(UserError, match="12 channels cannot be cut into parts of 5"):
        no_codebooks(12, 5, 256)


# -- k-means ----------------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@drawn(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(0, 99))
def test_what_clients_send_adds_up_to_what_one_would_have(sizes: list[int], seed: int) -> None:
    codebooks, clients = (
        some(BOOKS, CENTRES, WIDTH),
        [some(n, BOOKS, WIDTH, seed=seed + i) for i, n in enumerate(sizes)],
    )
    apart, pooled = added([cells(codebooks, own) for own in clients]), cells(codebooks, torch.cat(clients))
    assert torch.equal(apart.counts, pooled.counts) and int(pooled.counts.sum()) == BOOKS * sum(sizes)
    assert torch.allclose(apart.sums, pooled.sums) and torch.allclose(apart.squares, pooled.squares)


@pytest.mark.parametrize("exchanges", [1, 4, 30])
def test_over_clients_it_is_scikit_learns_k_means(exchanges: int) -> None:
    """From the same start, where no centre is without vectors: Lloyd's algorithm on all vectors in one place."""
    clients = [some(n, BOOKS, WIDTH, seed=n) + some(BOOKS, WIDTH, seed=n) for n in (60, 90, 10, 1)]
    found = torch.cat(clients)
    start = found[:CENTRES].transpose(0, 1).contiguous()
    ours = exchanged(start, clients, exchanges)
    for b in range(BOOKS):
        points = np.ascontiguousarray(found[:, b].numpy())
        theirs = KMeans(CENTRES, init=start[b].numpy(), n_init=1, max_iter=exchanges, tol=0).fit(points)
        assert np.abs(ours[b].numpy() - theirs.cluster_centers_).max() < 1e-9
    assert (ours - start).abs().max() > 0.1


def test_an_exchange_never_raises_the_error() -> None:
    clients = [some(40, BOOKS, WIDTH, seed=i) for i in range(3)]
    now, last = no_codebooks(BOOKS * WIDTH, WIDTH, CENTRES), torch.full((BOOKS,), torch.inf)
    for e in range(12):
        now = moved(now, added([cells(now, own) for own in clients]), draws(e))
        off = error(now, torch.cat(clients))
        assert (off <= last + 1e-12).all()
        last = off


def test_empty_centres_are_drawn_anew_until_all_have_vectors() -> None:
    found = some(4000, BOOKS, WIDTH)
    now = no_codebooks(BOOKS * WIDTH, WIDTH, 64)
    assert (cells(now, found).counts > 0).sum(1).tolist() == [1] * BOOKS, "at first, one centre has all"
    assert (cells(exchanged(now, [found], 10), found).counts > 0).all()


def test_a_full_centre_moves_to_its_mean_and_an_empty_one_into_the_cell_with_the_largest_error() -> None:
    found = torch.cat([10 + some(300, 1, WIDTH), 1e-3 * some(300, 1, WIDTH, seed=1)])
    now = torch.stack([torch.full((WIDTH,), 10.0), torch.zeros(WIDTH), torch.full((WIDTH,), 99.0)])[None]
    then = moved(now, cells(now, found), draws(0))
    assert torch.allclose(then[0, 0], found[:300, 0].mean(0)) and torch.allclose(then[0, 1], found[300:, 0].mean(0))
    assert 0.1 < float((then[0, 2] - 10).norm()) < 10, "beside the wide cell, not the narrow one"


def test_fewer_vectors_than_centres_come_back_as_they_are() -> None:
    found = some(6, BOOKS, WIDTH)
    now = exchanged(no_codebooks(BOOKS * WIDTH, WIDTH, 64), [found], 25)
    assert now.isfinite().all() and error(now, found).max() < 1e-12
    alike = exchanged(no_codebooks(BOOKS * WIDTH, WIDTH, 64), [found[:1].expand(9, -1, -1)], 5)
    assert alike.isfinite().all() and error(alike, found[:1]).max() < 1e-12


def test_without_any_vector_nothing_moves() -> None:
    now = some(BOOKS, CENTRES, WIDTH)
    assert torch.equal(moved(now, cells(now, torch.zeros(0, BOOKS, WIDTH)), draws(0)), now)


def test_the_start_is_nearly_as_good_as_one_that_sees_all_vectors() -> None:
    """On patches of digits, ten exchanges from nothing against scikit-learn's k-means++, run to its end."""
    patches = vectors_of(load("digits").train_images.double().unfold(2, 4, 4).unfold(3, 4, 4).reshape(-1, 16, 2, 2), 16)
    found = patches[:3000]
    ours = error(exchanged(no_codebooks(16, 16, 64), [found], 10), found)
    theirs = KMeans(64, n_init=1, random_state=0).fit(found[:, 0].numpy()).inertia_ / len(found)
    assert float(ours) < 1.1 * theirs


def test_the_same_draws_give_the_same_codebooks_and_others_do_not() -> None:
    found, now = some(500, BOOKS, WIDTH), no_codebooks(BOOKS * WIDTH, WIDTH, 16)
    one, again = (moved(now, cells(now, found), draws(3)) for _ in range(2))
    assert torch.equal(one, again) and not torch.equal(one, moved(now, cells(now, found), draws(4)))


def test_what_is_sent_does_not_grow_with_the_vectors() -> None:
    codebooks = some(BOOKS, CENTRES, WIDTH)
    few, many = (cells(codebooks, some(n, BOOKS, WIDTH)) for n in (3, 300))
    assert size_in_bytes(few) == size_in_bytes(many)
    assert all(t.shape[:2] == (BOOKS, CENTRES) for t in flatten(many).values())
