"""What images without data are made with: the generator, the statistics of a network, and the losses on them."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from fcil.blocks.augment import augmented
from fcil.blocks.synthesis import (
    Moments,
    batch_norm_distance,
    batch_norm_divergence,
    blur,
    gone_by,
    indecision,
    jittered,
    most_certain,
    needs_batch_norm,
    roughness,
    unevenness,
    with_moments,
)
from fcil.errors import UserError
from fcil.networks import build
from fcil.networks.generator import Generator, grid_for

pytestmark = pytest.mark.usefixtures("in_double")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- the generator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 64, 64), (3, 84, 84)])
def test_noise_becomes_images_of_any_size(shape: tuple[int, int, int], bounded: bool) -> None:
    torch.manual_seed(0)
    generator = Generator(7, shape, 4, bounded)
    images = generator(drawn(3, 7))
    assert images.shape == (3, *shape) and images.isfinite().all()
    assert images.flatten(1).std(1).min() > 0 and not torch.allclose(images[0], images[1])
    if bounded:
        assert images.min() > 0 and images.max() < 1
    images.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in generator.parameters() if p is not generator.last.bias)


def test_the_grid_is_doubled_twice_for_small_images_and_more_often_for_large_ones() -> None:
    assert [grid_for(side) for side in (8, 28, 32, 64, 84, 96)] == [(2, 2), (7, 2), (8, 2), (8, 3), (11, 3), (6, 4)]


def test_it_has_the_size_of_the_published_one() -> None:
    parameters = sum(p.numel() for p in Generator(1000, (3, 32, 32), 64, bounded=False).parameters())
    assert (
        parameters == 1000 * 8192 + 8192 + 3 * 256 - 128 + (128 * 9 + 1) * 128 + (128 * 9 + 1) * 64 + (64 * 9 + 1) * 3
    )


def test_unbounded_images_have_the_mean_and_spread_that_a_classifier_expects() -> None:
    torch.manual_seed(0)
    images = Generator(7, (3, 32, 32), 4, bounded=False)(drawn(64, 7))
    normal = build("small", (3, 32, 32), 2).normalise(images)
    assert normal.mean((0, 2, 3)).abs().max() < 1e-9 and (normal.std((0, 2, 3)) - 1).abs().max() < 0.1


# -- statistics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "resnet8", "resnet18"])
def test_the_moments_of_every_layer_are_those_that_training_would_note(name: str) -> None:
    torch.manual_seed(0)
    net = build(name, (3, 8, 8), 5).train()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0  # the running statistics are the last batch's
    images = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    output, found = with_moments(net, images)
    layers = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert len(found) == len(layers) == {"small": 3, "resnet8": 9, "resnet18": 20}[name] and output.shape == (16, 5)
    assert {id(own.usual_mean) for own in found} == {id(layer.running_mean) for layer in layers}
    for own in found:
        assert torch.allclose(own.mean, own.usual_mean)
        assert ((own.usual_var / own.var) > 1).all(), "the running one is unbiased"
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_moments_carry_a_gradient_to_the_images_of_a_network_at_rest() -> None:
    torch.manual_seed(0)
    net = build("small", (1, 8, 8), 5).eval().requires_grad_(False)
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    batch_norm_divergence(with_moments(net, images)[1]).backward()
    assert images.grad is not None and images.grad.abs().sum() > 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_hooks_are_gone_after_a_failure() -> None:
    net = build("small", (1, 8, 8), 5)
    with pytest.raises(RuntimeError):
        with_moments(net, torch.rand(4, 7, 8, 8))
    assert not any(layer._forward_pre_hooks for layer in net.modules())


def some_layers() -> list[Moments]:
    return [
        Moments(drawn(n, seed=n), drawn(n, seed=n + 1).exp(), drawn(n, seed=n + 2), drawn(n, seed=n + 3).exp())
        for n in (4, 6)
    ]


def test_the_divergence_is_that_of_gaussians_averaged_over_channels_and_layers() -> None:
    layers = some_layers()
    means = [
        kl_divergence(Normal(own.usual_mean, own.usual_var.sqrt()), Normal(own.mean, own.var.sqrt())).mean()
        for own in layers
    ]
    assert batch_norm_divergence(layers).item() == pytest.approx(float(sum(means)) / 2, rel=1e-6)
    one = Moments(*(torch.tensor([v]) for v in (1.0, 4.0, 3.0, 9.0)))
    by_hand = math.log(2 / 3) - 0.5 * (1 - (9 + 4) / 4)
    assert batch_norm_divergence([one]).item() == pytest.approx(by_hand)
    same = [Moments(own.mean, own.var, own.mean, own.var) for own in layers]
    assert batch_norm_divergence(same).item() == pytest.approx(0, abs=1e-12)
    assert batch_norm_divergence([]).item() == batch_norm_distance([], [], 0.9).item() == 0


def test_a_dead_channel_is_no_infinity() -> None:
    dead = Moments(*(torch.zeros(2, requires_grad=i < 2) for i in range(4)))
    value = batch_norm_divergence([dead]) + batch_norm_distance([dead], [], 0.9)
    value.backward()
    assert value.item() == 0 and dead.mean.grad is not None and dead.mean.grad.isfinite().all()


def test_the_distance_is_euclidean_and_mixes_in_the_batches_before() -> None:
    layer = Moments(*(torch.tensor(v) for v in ([3.0, 0.0], [1.0, 1.0], [0.0, 4.0], [1.0, 13.0])))
    assert batch_norm_distance([layer], [], 0.9).item() == 5 + 12
    past = gone_by([layer], [], 0.9)
    assert [t.tolist() for t in past[0]] == [[3, 0], [1, 1]], "the first batch is all there is"
    later = Moments(layer.mean + 10, layer.var, layer.usual_mean, layer.usual_var)
    mixed = [4.0, 1.0]  # 0.9 of the past, 0.1 of 13 and 10
    assert batch_norm_distance([later], past, 0.9).item() == pytest.approx(math.hypot(mixed[0], mixed[1] - 4) + 12)
    assert gone_by([later], past, 0.9)[0][0].tolist() == pytest.approx(mixed)
    assert batch_norm_distance([layer, layer], [], 0.9).item() == 2 * 17


def test_networks_without_statistics_are_refused_in_one_sentence() -> None:
    needs_batch_norm("batch", "mfcl", "")
    with pytest.raises(UserError, match="mfcl makes images .* norm=group keeps none; set norm=batch, or this"):
        needs_batch_norm("group", "mfcl", "this")


# -- what predictions are to be like ----------------------------------------------------------------------------------

SEEN = torch.tensor([True, True, False, True])


def test_indecision_is_a_tempered_cross_entropy_with_the_own_choice() -> None:
    logits = torch.tensor([[1.0, 3.0, 99.0, 0.0], [2.0, 0.0, 99.0, -1.0]])
    rows = [([0.5, 1.5, 0.0], 1), ([1.0, 0.0, -0.5], 0)]
    expected = sum(math.log(sum(map(math.exp, row))) - row[j] for row, j in rows) / 2
    assert indecision(logits, SEEN, 2.0).item() == pytest.approx(expected)
    assert indecision(logits, SEEN, 1000.0).item() == pytest.approx(math.log(3), abs=0.01), "almost flat"


def test_unevenness_is_nothing_where_all_classes_come_alike_and_one_where_one_comes() -> None:
    sure = 200 * torch.eye(4)
    assert unevenness(sure[[0, 1, 3]], SEEN).item() == pytest.approx(0, abs=1e-9)
    assert unevenness(sure[[1, 1]], SEEN).item() == pytest.approx(1, abs=1e-9)
    expected = 1 - (-1 / 4 * math.log(1 / 4) - 3 / 4 * math.log(3 / 4)) / math.log(3)
    assert unevenness(sure[[0, 1, 1, 1]], SEEN).item() == pytest.approx(expected)
    assert unevenness(torch.zeros(2, 4), SEEN).item() == pytest.approx(0, abs=1e-9), "undecided is even, too"
    assert unevenness(sure, torch.tensor([True, False, False, False])).item() == 1, (
        "one class alone is no division by 0"
    )


def test_of_each_class_the_most_certain_image_is_shown() -> None:
    logits = torch.tensor([[1.0, 0, 9, 0], [3.0, 0, 0, 0], [0, 0, 9, 1.0], [2.0, 0, 0, 0]])
    assert most_certain(logits, SEEN) == {0: 1, 3: 2}


# -- smoothness and augmentation ---------------------------------------------------------------------------------------


def test_blurring_is_a_convolution_with_mirrored_borders() -> None:
    images = drawn(2, 3, 8, 8)
    line = torch.tensor([math.exp(-((m / 2) ** 2)) for m in (-2, -1, 0, 1, 2)])
    kernel = torch.outer(line, line) / line.sum() ** 2
    expected = F.conv2d(F.pad(images, (2,) * 4, mode="reflect").flatten(0, 1)[:, None], kernel[None, None])
    ours = blur(8)
    assert torch.allclose((ours @ images @ ours.T).flatten(0, 1), expected[:, 0])
    assert roughness(images, ours).item() == pytest.approx(
        (images.flatten(0, 1) - expected[:, 0]).square().mean().item()
    )
    assert roughness(torch.ones(1, 1, 8, 8), ours).item() == pytest.approx(0)


@pytest.mark.parametrize("how", ["none", "crop", "crop-flip"])
@pytest.mark.parametrize("side", [8, 32])
def test_jitter_is_the_augmentation_of_training(how: str, side: int) -> None:
    images, one, other = drawn(16, 2, side, side), torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    assert torch.allclose(jittered(images, how, one), augmented(images, how, other))
    assert torch.equal(one.get_state(), other.get_state())
    moving: Any = images.clone().requires_grad_()
    jittered(moving, how, one).sum().backward()
    assert moving.grad.sum().item() == pytest.approx(images.numel())
