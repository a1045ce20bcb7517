"""Networks: sizes, stages, and images in either form."""

import pytest
import torch
from torch import nn

from fcil.blocks.training import loaded, weights_of
from fcil.networks import Classifier, ResNet18, SmallNet, build
from fcil.networks.heads import CENTRE, SPREAD


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.fixture(scope="module")
def resnet() -> Classifier:
    torch.manual_seed(0)
    return build("resnet18", (3, 32, 32), 100).eval()


@pytest.fixture
def small() -> Classifier:
    torch.manual_seed(0)
    return build("small", (1, 8, 8), 10).eval()


def test_resnet_has_the_parameters_of_the_papers(resnet: Classifier) -> None:
    assert parameters(resnet.body) == 11_168_832
    assert parameters(resnet) == 11_220_132


def test_the_small_network_is_small(small: Classifier) -> None:
    convolutions = 9 * (1 * 16 + 16 * 32 + 32 * 64)
    norms = 2 * (16 + 32 + 64)
    assert parameters(small) == convolutions + norms + 64 * 10 + 10


@pytest.mark.parametrize("side", [32, 64, 84])
def test_resnet_halves_the_side_three_times(resnet: Classifier, side: int) -> None:
    with torch.inference_mode():
        maps = resnet.stages(torch.rand(1, 3, side, side))
    half = [side, -(-side // 2), -(-side // 4), -(-side // 8)]
    assert [tuple(m.shape) for m in maps] == [(1, c, s, s) for c, s in zip((64, 128, 256, 512), half, strict=True)]


def test_the_small_network_halves_the_side_twice(small: Classifier) -> None:
    maps = small.stages(torch.rand(2, 1, 8, 8))
    assert [tuple(m.shape) for m in maps] == [(2, 16, 8, 8), (2, 32, 4, 4), (2, 64, 2, 2)]


@pytest.mark.parametrize(("body", "channels"), [(ResNet18, 1), (ResNet18, 3), (SmallNet, 1), (SmallNet, 3)])
def test_a_body_takes_any_number_of_channels(body: type[nn.Module], channels: int) -> None:
    net = Classifier(body(channels), 7).eval()
    with torch.inference_mode():
        images = torch.rand(2, channels, 16, 16)
        features = net.features(images)
        assert features.shape == (2, net.body.width) and net(images).shape == (2, 7)
        assert torch.equal(net.head(features), net(images))


def test_features_are_the_mean_of_the_last_stage(small: Classifier) -> None:
    images = torch.rand(3, 1, 8, 8)
    assert torch.allclose(small.features(images), small.stages(images)[-1].flatten(2).mean(2))


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_and_floats_give_the_same_scores(channels: int) -> None:
    net = build("small", (channels, 8, 8), 10).eval()
    images = torch.randint(0, 256, (5, channels, 8, 8), dtype=torch.uint8)
    assert torch.equal(net(images), net(images.float() / 255))


def test_images_are_centred_and_scaled(resnet: Classifier) -> None:
    grey = torch.tensor(CENTRE).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    assert torch.allclose(resnet.normalise(grey), torch.zeros(1, 3, 2, 2), atol=1e-6)
    white = resnet.normalise(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
    assert white.tolist() == pytest.approx([(1 - c) / s for c, s in zip(CENTRE, SPREAD, strict=True)], rel=1e-5)


def test_the_constants_of_normalisation_do_not_travel(resnet: Classifier) -> None:
    assert not [name for name in resnet.state_dict() if "normalise" in name]
    assert {name for name, _ in resnet.named_buffers() if "normalise" in name} == {
        "normalise.centre",
        "normalise.spread",
    }


def test_weights_of_is_a_copy_and_loaded_puts_it_back(small: Classifier) -> None:
    images = torch.rand(3, 1, 8, 8)
    scores, weights = small(images), weights_of(small)
    small.train()
    small(images + 1)  # moves the statistics
    with torch.no_grad():
        small.head.weight.zero_()
    assert weights["head.weight"].abs().sum() > 0 and not weights["head.weight"].requires_grad
    assert torch.equal(loaded(small, weights)(images), scores) and not small.training
