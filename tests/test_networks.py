"""Networks: sizes, stages, images in either form, and normalisation of either kind."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fcil.blocks.training import loaded, weights_of
from fcil.networks import Classifier, ResNet8, ResNet18, SmallNet, build, build_autoencoder, build_encoder
from fcil.networks.autoencoder import Decoder
from fcil.networks.heads import CENTRE, SPREAD
from fcil.networks.norm import activated, normalisation


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


def test_resnet8_is_small() -> None:
    assert parameters(build("resnet8", (3, 32, 32), 20).body) == 77_392


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


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("body", [ResNet8, ResNet18, SmallNet])
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


# -- normalisation -----------------------------------------------------------------------------------------------------

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(16, 2), (32, 4), (64, 8), (128, 16), (256, 32), (512, 64), (4, 1), (1, 1), (21, 1), (27, 3), (24, 3)],
)
def test_groups_have_eight_channels_or_the_next_number_that_divides(channels: int, groups: int) -> None:
    norm = normalisation("group", channels)
    assert isinstance(norm, nn.GroupNorm) and norm.num_groups == groups
    assert isinstance(normalisation("batch", channels), nn.BatchNorm2d)


def test_there_is_no_third_normalisation() -> None:
    with pytest.raises(ValueError, match="by batch and by group, not by layer"):
        normalisation("layer", 16)


def test_batch_normalisation_is_what_there_is_unless_asked_otherwise(small: Classifier) -> None:
    norms = {f"body.layers.{layer}.1.{own}" for layer in range(3) for own in ("weight", "bias", *STATISTICS)}
    convolutions = {f"body.layers.{layer}.0.weight" for layer in range(3)}
    assert small.state_dict().keys() == {*norms, *convolutions, "head.weight", "head.bias"}


@pytest.mark.parametrize("name", ["resnet18", "resnet8", "small"])
def test_group_normalisation_has_the_same_parameters_and_no_statistics(name: str) -> None:
    for made in (build, build_encoder, partial(build_autoencoder, variational=True)):
        batch, group = (made(name, (3, 32, 32), 9, norm=norm) for norm in ("batch", "group"))
        assert {n: p.shape for n, p in batch.named_parameters()} == {n: p.shape for n, p in group.named_parameters()}
        assert any(n.endswith(STATISTICS) for n in batch.state_dict())
        assert group.state_dict().keys() == dict(group.named_parameters()).keys()


@pytest.mark.parametrize("name", ["resnet18", "resnet8", "small"])
def test_with_groups_an_image_does_not_depend_on_the_rest_of_its_batch(name: str) -> None:
    torch.manual_seed(0)
    images, others = torch.rand(2, 4, 3, 16, 16)
    mixed = torch.cat([images[:1], others[1:]])

    def alike(of: Callable[[Tensor], Tensor]) -> bool:
        with torch.no_grad():
            return torch.allclose(of(images)[0], of(mixed)[0], atol=1e-5)

    for norm, alone in (("batch", False), ("group", True)):
        classifier = build(name, (3, 16, 16), 7, norm).train()
        encoder = build_encoder(name, (3, 16, 16), 5, norm).train()
        decoder = Decoder(16, (3, 16, 16), 16, norm).train()
        assert alike(classifier) == alike(lambda x, net=encoder: net(x)[0]) == alone
        assert alike(lambda x, net=decoder: net(x[:, 0, 0])) == alone
        assert not torch.allclose(classifier(images)[0], classifier(others)[0], atol=1e-3)


@pytest.mark.parametrize("kind", ["batch", "group"])
@pytest.mark.parametrize(("slope", "beside"), [(0.0, False), (0.0, True), (0.2, False), (1.0, False)])
def test_what_follows_normalisation_in_place_has_the_gradients_of_a_copy(kind: str, slope: float, beside: bool) -> None:
    norm, generator = normalisation(kind, 16).double(), torch.Generator().manual_seed(0)
    drawn = [torch.randn(4, 16, 3, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
    with torch.no_grad():
        norm.weight.copy_(1 + drawn[2][0, :, 0, 0]), norm.bias.copy_(drawn[2][1, :, 0, 0])
    found = []
    for in_place in (True, False):
        norm.zero_grad()
        x, residual = (t.clone().requires_grad_() for t in drawn[:2])
        if in_place:
            y = activated(norm, 2 * x, 1 * residual if beside else None, slope)
        else:
            y = norm(2 * x) + (residual if beside else 0)
            y = torch.where(y > 0, y, slope * y)
        (y * drawn[2]).sum().backward()
        found.append([y, x.grad, norm.weight.grad, norm.bias.grad, *([residual.grad] if beside else [])])
    assert all(torch.allclose(one, other) for one, other in zip(*found, strict=True))
