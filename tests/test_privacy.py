"""What can be told of images: measures against scikit-image, scikit-learn, brute force, a model that memorised."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.analysis import privacy
from fcil.scenario.datasets import load


def generated(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_images(seed: int, *shape: int) -> Tensor:
    return torch.randint(256, shape, generator=generated(seed), dtype=torch.uint8)


# -- likeness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (1, 7, 9), (3, 20, 11)])
@pytest.mark.parametrize("noise", [0, 3, 60])
def test_psnr_and_ssim_agree_with_scikit_image(shape: tuple[int, int, int], noise: int) -> None:
    metrics = pytest.importorskip("skimage.metrics")
    images = some_images(1, 6, *shape)
    off = (noise * torch.randn(images.shape, generator=generated(2))).round()
    others = (images + off).clamp(0, 255).to(torch.uint8)
    ratios, alike = privacy.psnr(images, others), privacy.ssim(images, others)
    for i, (image, other) in enumerate(zip(images.numpy(), others.numpy(), strict=True)):
        with np.errstate(divide="ignore"):
            ratio = metrics.peak_signal_noise_ratio(image, other, data_range=255)
        assert math.isclose(ratios[i], ratio, rel_tol=1e-12)
        wanted = metrics.structural_similarity(image, other, data_range=255, channel_axis=0)
        assert math.isclose(alike[i], wanted, rel_tol=1e-9)
    assert noise or (ratios.isinf().all() and torch.allclose(alike, torch.ones(6, dtype=torch.float64)))


def test_ssim_of_real_digits_agrees_with_scikit_image() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    images = load("digits").train_images[:40]  # with flat corners, where variances are 0
    alike = privacy.ssim(images[:20], images[20:])
    for i in range(20):
        pair = (images[row, 0].numpy() for row in (i, 20 + i))
        assert math.isclose(alike[i], metrics.structural_similarity(*pair, data_range=255), rel_tol=1e-9, abs_tol=1e-12)


def test_images_smaller_than_the_window_are_compared_by_a_smaller_one() -> None:
    metrics = pytest.importorskip("skimage.metrics")
    a, b = some_images(3, 2, 1, 6, 6)
    wanted = metrics.structural_similarity(a[0].numpy(), b[0].numpy(), data_range=255, win_size=5)
    assert math.isclose(privacy.ssim(a[None], b[None])[0], wanted, rel_tol=1e-9)


# -- nearest images ---------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_nearest_images_and_ranks_are_those_of_brute_force(seed: int, pictures: int, images: int) -> None:
    drawn = some_images(seed, pictures + images, 1, 2, 3) // 64 * 60  # coarse, so that some are equally near
    seen, every = drawn[:pictures], drawn[pictures:]
    which = torch.randint(images, (pictures,), generator=generated(seed))
    found = privacy.nearest(seen, every, every[which])
    for i, picture in enumerate(seen.long()):
        squares = [int((picture - image).square().sum()) for image in every.long()]
        assert squares[found.row[i]] == min(squares)
        assert math.isclose(found.distance[i], math.sqrt(min(squares) / 6))
        assert found.rank[i] == 1 + sum(square < squares[which[i]] for square in squares)
        crowd = [math.sqrt(square) for square in sorted(squares)[: privacy.CROWD]]
        assert math.isclose(found.relative[i], crowd[0] / max(1e-12, sum(crowd) / len(crowd)), abs_tol=1e-9)


def test_parts_of_a_long_list_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, images = some_images(1, 9, 3, 4, 4), some_images(2, 30, 3, 4, 4)
    at_once = privacy.nearest(pictures, images, images[:9])
    monkeypatch.setattr(privacy, "AT_ONCE", 64)
    in_parts = privacy.nearest(pictures, images, images[:9])
    for whole, pieced in zip(at_once, in_parts, strict=True):
        assert torch.equal(whole, pieced)


def test_a_copy_stands_out_and_a_blur_does_not() -> None:
    images = load("digits").train_images[:500]
    off = (10 * torch.randn(20, 1, 8, 8, generator=generated(0))).round()
    copies = (images[:20] + off).clamp(0, 255).to(torch.uint8)
    blurs = images.view(20, 25, 1, 8, 8).double().mean(1).round().to(torch.uint8)
    new = load("digits").test_images[:20]
    copied, blurred, usual = (privacy.nearest(pictures, images).relative.median() for pictures in (copies, blurs, new))
    assert copied < 0.5 * usual and blurred > usual


# -- the area under the curve -----------------------------------------------------------------------------------------


def test_an_area_is_the_share_of_pairs_in_order_with_ties_half() -> None:
    found = privacy.auc(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 0.0, 2.0]))
    assert math.isclose(found.value, (3 + 1 + 0.5) / 6) and (found.inside, found.outside) == (2, 3)
    assert 0 <= found.low <= found.value <= found.high <= 1


def test_weighted_areas_are_those_of_scikit_learn() -> None:
    draws = generated(3)
    inside, outside = torch.randn(40, generator=draws) + 0.5, torch.randn(60, generator=draws)
    weights = torch.rand(60, generator=draws)
    member, every = np.repeat([1, 0], [40, 60]), torch.cat([inside, outside]).numpy()
    wanted = roc_auc_score(member, every, sample_weight=np.concatenate([np.ones(40), weights.numpy()]))
    found = privacy.auc(inside, outside, weights)
    assert math.isclose(found.value, wanted, rel_tol=1e-6)
    assert found == privacy.auc(inside, outside, weights)  # a seed fixes the interval, too
    assert found.low < found.value < found.high and found.high - found.low < 0.3


def test_the_interval_holds_what_is_true_about_as_often_as_it_says() -> None:
    true = 0.5 * (1 + math.erf(0.5 / 2))  # of normal scores half a deviation apart
    held = 0
    for seed in range(60):
        draws = generated(seed)
        found = privacy.auc(torch.randn(80, generator=draws) + 0.5, torch.randn(80, generator=draws))
        held += found.low <= true <= found.high
    assert 52 <= held <= 60


def test_classes_that_are_hard_do_not_pass_for_membership() -> None:
    draws = generated(0)
    inside, outside = (torch.tensor([0, 1]).repeat_interleave(torch.tensor(n)) for n in ((180, 20), (100, 100)))
    score = [labels + 0.3 * torch.randn(len(labels), generator=draws) for labels in (inside, outside)]
    assert privacy.auc(*score).high < 0.4  # the hard class is frequent among the outside ones
    found = privacy.auc(*score, privacy.matched(inside, outside))
    assert found.low <= 0.5 <= found.high


# -- membership -------------------------------------------------------------------------------------------------------


def test_losses_do_not_depend_on_the_unit_of_scores() -> None:
    scores, labels = torch.randn(50, 4, generator=generated(1)), torch.arange(50) % 4
    assert torch.allclose(privacy.losses(scores, labels), privacy.losses(1000 * scores, labels))
    ruled_out = torch.cat([scores, torch.full((50, 1), -torch.inf)], 1)
    assert privacy.losses(ruled_out, labels).isfinite().all()


def test_a_margin_is_positive_where_an_image_is_classified_rightly() -> None:
    scores = torch.tensor([[2.0, 1.0, -torch.inf], [0.0, 3.0, 1.0]])
    margins = privacy.margins(scores, torch.tensor([0, 2]))
    assert margins[0] > 0 > margins[1] and math.isclose(margins[1] / margins[0], -2)


@pytest.fixture(scope="module")
def memorised() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the losses and margins of 150 digits whose random labels a network has learned, and of 150 others."""
    data, draws = load("digits"), generated(0)
    order = torch.randperm(len(data.train_images), generator=draws)[:300]
    images, labels = data.train_images[order].flatten(1) / 255, torch.randint(10, (300,), generator=draws)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(200):
        loss = F.cross_entropy(net(images[:150]), labels[:150])
        adam.zero_grad()
        loss.backward()
        adam.step()
    with torch.no_grad():
        scores = net(images)
    losses, margins = privacy.losses(scores, labels), privacy.margins(scores, labels)
    return losses[:150], losses[150:], margins[:150], margins[150:]


def test_a_model_that_memorised_on_purpose_gives_its_images_away(memorised: tuple[Tensor, ...]) -> None:
    inside, outside, near, far = memorised
    for found in (privacy.auc(-inside, -outside), privacy.auc(near, far)):
        assert found.value > 0.9 and found.low > 0.9


@pytest.mark.parametrize("kind", [0, 1, 2, 3])
def test_of_images_that_are_members_by_lot_nothing_can_be_told(memorised: tuple[Tensor, ...], kind: int) -> None:
    rows = memorised[kind]
    by_lot = torch.randperm(len(rows), generator=generated(7))
    found = privacy.auc(rows[by_lot[:75]], rows[by_lot[75:]])
    assert found.low <= 0.5 <= found.high
