"""The autoencoder of Hybrid Replay: sizes (methods.md 2.6), images of any side, and what an encoder says."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fcil.federation.engine import threads
from fcil.networks import AutoEncoder, ResNet8, ResNet18, SmallNet, build_autoencoder
from fcil.networks.autoencoder import Decoder, Encoder
from fcil.networks.enlarging import enlarged, enlargements, transposed


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.fixture
def small() -> AutoEncoder:
    torch.manual_seed(0)
    return build_autoencoder("small", (1, 8, 8), 6, variational=True).eval()


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_the_autoencoder_has_the_parameters_of_the_paper() -> None:
    net = build_autoencoder("resnet18", (3, 32, 32), 307, variational=True)
    assert parameters(net.encoder) == 11_483_814
    assert parameters(net.decoder) == 1_411_459  # its 1.4M
    assert parameters(net) == 11_483_814 + 1_411_459


def test_a_deterministic_encoder_has_one_head_fewer() -> None:
    net = build_autoencoder("resnet18", (3, 32, 32), 307, variational=False)
    assert parameters(net.encoder) == 11_326_323
    assert parameters(net.decoder) == 1_411_459


@pytest.mark.parametrize(("side", "latent", "exactly"), [(64, 1229, 1_753_389), (84, 2117, 1_755_011)])
def test_decoders_of_larger_images_have_about_the_papers_parameters(side: int, latent: int, exactly: int) -> None:
    number = parameters(Decoder(latent, (3, side, side)))
    assert 1_750_000 <= number <= 1_850_000  # its 1.8M
    assert number == exactly


def test_a_decoder_has_four_layers() -> None:
    layers = [m for m in Decoder(6, (1, 8, 8)).modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    assert [type(m) for m in layers] == [nn.Linear, nn.Conv2d, nn.Conv2d, nn.Conv2d]


def test_a_long_code_gets_few_maps_but_never_none() -> None:
    assert Decoder(100, (3, 32, 32)).maps == 64
    assert Decoder(10_000, (3, 32, 32), width=4).maps == 2
    assert Decoder(40_000, (3, 32, 32), width=4).maps == 1


@pytest.mark.parametrize(
    ("name", "body", "begins"), [("resnet18", ResNet18, 64), ("resnet8", ResNet8, 16), ("small", SmallNet, 16)]
)
def test_an_autoencoder_has_the_named_body_and_a_decoder_that_begins_as_wide(
    name: str, body: type[nn.Module], begins: int
) -> None:
    net = build_autoencoder(name, (3, 16, 16), 5, variational=True)
    assert isinstance(net.encoder.body, body)
    assert [c.out_channels for c in net.decoder.convolutions] == [2 * begins, begins, 3]


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [1, 8, 28, 31, 32, 64, 84])
def test_a_decoder_makes_images_of_its_side_in_0_to_1(side: int, channels: int) -> None:
    torch.manual_seed(0)
    decoder = Decoder(10, (channels, side, side), width=4).eval()
    with torch.inference_mode():
        images = decoder(30 * torch.randn(3, 10))
        assert images.shape == (3, channels, side, side)
        assert 0 <= images.min() < images.max() <= 1
        assert decoder(1e4 * torch.randn(3, 10)).isfinite().all()
    assert not torch.allclose(images[0], images[1])  # another code is another image


@pytest.mark.parametrize("side", [8, 9, 31])
@pytest.mark.parametrize("variational", [True, False])
def test_a_code_has_the_size_asked_for(side: int, variational: bool) -> None:
    net = build_autoencoder("small", (1, side, side), 7, variational).eval()
    mean, logvar = net.encode(torch.rand(3, 1, side, side))
    assert mean.shape == logvar.shape == (3, 7)
    assert net.decode(mean).shape == (3, 1, side, side)


def test_enlargements_reach_every_side() -> None:
    for side in range(1, 301):
        grid, first, second = enlargements(side)
        assert 1 <= grid <= 8 and 2 <= first <= second
        assert (grid - 1) * first * second < side <= grid * first * second  # no whole row of the grid is cut off


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_a_convolution_of_enlarged_maps_is_one_transposed_convolution(factor: int) -> None:
    convolution = torch.nn.Conv2d(3, 5, 3, padding=1).double()
    x = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    back = torch.randn(2, 5, 4 * factor, 6 * factor, dtype=torch.float64)
    both, at_once = convolution(enlarged(x, factor)), transposed(convolution, x, factor)
    of = [x, *convolution.parameters()]
    assert torch.allclose(both, at_once)
    for one, other in zip(torch.autograd.grad(both, of, back), torch.autograd.grad(at_once, of, back), strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize("side", [8, 28, 32, 64, 84, 96, 224])
def test_enlargements_hit_usual_sides_exactly(side: int) -> None:
    grid, first, second = enlargements(side)
    assert grid * first * second == side


@pytest.mark.parametrize(("side", "expected"), [(8, (2, 2, 2)), (32, (8, 2, 2)), (45, (5, 3, 3)), (84, (7, 3, 4))])
def test_enlargements_prefer_little_waste_then_a_large_grid(side: int, expected: tuple[int, int, int]) -> None:
    assert enlargements(side) == expected


@pytest.mark.parametrize("shape", [(3, 32, 28), (1, 8, 16)])
def test_images_that_are_not_square_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"square here, not {shape[1]}x{shape[2]}"):
        Decoder(10, shape)
    with pytest.raises(ValueError, match="square"):
        build_autoencoder("small", shape, 10, variational=True)


# -- what an encoder says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_and_floats_encode_alike(channels: int) -> None:
    net = build_autoencoder("small", (channels, 8, 8), 6, variational=True).eval()
    images = torch.randint(0, 256, (5, channels, 8, 8), dtype=torch.uint8)
    for of_bytes, of_floats in zip(net.encode(images), net.encode(images.float() / 255), strict=True):
        assert torch.equal(of_bytes, of_floats)
        assert not torch.allclose(of_bytes[0], of_bytes[1])  # another image is another code


def test_mean_and_log_variance_are_heads_on_the_pooled_features(small: AutoEncoder) -> None:
    images = torch.rand(3, 1, 8, 8)
    encoder = small.encoder
    features = encoder.body.stages(encoder.normalise(images))[-1].flatten(2).mean(2)
    mean, logvar = small.encode(images)
    assert torch.allclose(mean, encoder.mean(features), atol=1e-6)
    assert torch.allclose(logvar, encoder.logvar(features), atol=1e-6)
    assert not torch.allclose(mean, logvar)


def test_the_log_variance_stays_within_10_and_the_mean_is_free(small: AutoEncoder) -> None:
    with torch.no_grad():
        for head in (small.encoder.mean, small.encoder.logvar):
            head.bias.copy_(torch.tensor([-1e3, -11.0, -5.0, 5.0, 11.0, 1e3]))
            head.weight.zero_()
    mean, logvar = small.encode(torch.rand(2, 1, 8, 8))
    assert logvar[0].tolist() == [-10.0, -10.0, -5.0, 5.0, 10.0, 10.0]
    assert mean[0].tolist() == [-1e3, -11.0, -5.0, 5.0, 11.0, 1e3]


def test_a_deterministic_encoder_has_no_weights_for_a_log_variance_and_says_zero() -> None:
    net = build_autoencoder("small", (1, 8, 8), 6, variational=False).eval()
    assert not [name for name in net.state_dict() if "logvar" in name]
    mean, logvar = net.encode(torch.rand(2, 1, 8, 8))
    assert (logvar == 0).all() and (mean != 0).any()


def test_an_encoder_is_variational_unless_told_otherwise() -> None:
    assert {name for name in Encoder(SmallNet(1), 6).state_dict() if "logvar" in name} == {
        "logvar.weight",
        "logvar.bias",
    }


def test_encoder_and_decoder_learn_from_an_image(small: AutoEncoder) -> None:
    images = torch.rand(4, 1, 8, 8)
    mean, logvar = small.train().encode(images)
    ((small.decode(mean) - images).square().sum() + logvar.square().sum()).backward()
    silent = [name for name, p in small.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert set(silent) <= {"decoder.linear.bias", "decoder.convolutions.0.bias", "decoder.convolutions.1.bias"}
