"""Fractals: what a system is, what its images show, and that a network learns them."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fcil.blocks.fractals import MAPS, STRONGEST, Systems, beside, fractals, pretrained, rendered, systems
from fcil.blocks.training import weights_of
from fcil.federation.engine import threads
from fcil.networks import build

GREY, COLOUR = (1, 8, 8), (3, 32, 32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_map_contracts_and_a_system_has_two_to_four() -> None:
    own = systems(500, seeded())
    sizes = torch.linalg.svdvals(own.linear)
    assert len(own) == 500 and own.linear.shape == (500, MAPS, 2, 2) and float(sizes.max()) <= STRONGEST + 1e-5
    maps = (own.chance > 0).sum(1)
    assert set(maps.tolist()) == {2, 3, 4}
    assert torch.allclose(own.chance.sum(1), torch.ones(500))
    assert (own.chance[torch.arange(500), maps - 1] > 0).all(), "the maps that there are come first"
    assert {1.0, -1.0} == set(torch.linalg.det(own.linear[:, 0]).sign().tolist()), "some mirror"
    weight = (sizes[..., 0] + 2 * sizes[..., 1]).sum(1)
    assert (weight <= (6 + maps) / 2 + 1e-4).all() and float((weight >= (5 + maps) / 2 - 1e-4).double().mean()) > 0.5


def test_systems_beside_others_still_contract_and_are_near() -> None:
    own = systems(100, seeded())
    near = beside(own, 0.1, seeded(1))
    assert float(torch.linalg.svdvals(near.linear).max()) <= STRONGEST + 1e-5
    assert 0 < float((near.linear - own.linear).abs().mean()) < 0.1
    assert float((near.shift - own.shift).std()) == pytest.approx(0.1, rel=0.2)
    assert torch.equal(near.chance, own.chance)
    assert torch.allclose(beside(own, 0.0, seeded(1)).linear, own.linear, atol=1e-6)


@pytest.mark.parametrize("shape", [GREY, COLOUR, (3, 64, 64)])
def test_images_have_the_shape_asked_for_and_are_neither_empty_nor_full(shape: tuple[int, int, int]) -> None:
    images, labels = fractals(12, 3, shape, seeded())
    assert images.shape == (36, *shape) and images.dtype == torch.uint8
    assert labels.tolist() == [j for j in range(12) for _ in range(3)]
    lit = (images.amax(1) > 0).double().mean((1, 2))
    assert float(lit.min()) > 0.005 and float(lit.mean()) < 0.7
    assert (images.flatten(1).amax(1) > 100).all()
    if shape[0] == 3:
        assert (images.float().std(1).amax((1, 2)) > 20).double().mean() > 0.9, "they have colours"


def test_the_same_seed_draws_the_same_fractals() -> None:
    one, same, other = (fractals(5, 2, COLOUR, seeded(s))[0] for s in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_a_known_system_gives_a_known_picture() -> None:
    """Three maps that halve: Sierpinski's triangle, the pixels whose row and column share no binary digit."""
    half = torch.eye(2) / 2
    linear = torch.stack([half, half, half, torch.zeros(2, 2)])[None]
    shift = torch.tensor([[[0.0, 0.0], [0.5, 0.0], [0.0, 0.5], [9.0, 9.0]]])
    own = Systems(linear, shift, torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0]]))
    (image,) = rendered(own, (1, 32, 32), seeded())
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    triangle = (rows & columns) == 0
    agree = [((turned[0] > 0) == triangle).double().mean() for turned in flips(image)]
    assert max(agree) > 0.9 and sorted(agree)[-2] < 0.6  # pixels at its edges may go either way


def flips(image: Tensor) -> list[Tensor]:
    return [image, image.flip(1), image.flip(2), image.flip(1, 2)]


def test_images_of_a_class_are_alike_but_not_the_same() -> None:
    images, labels = fractals(20, 4, (1, 16, 16), seeded())
    shown = images.double() / 255
    # the nearest of all flips: how an image is mirrored says nothing
    far = torch.stack([torch.stack([(shown - f).square().flatten(1).sum(1) for f in flips(x)]).amin(0) for x in shown])
    same = labels[:, None] == labels
    apart = ~torch.eye(len(labels), dtype=torch.bool)
    assert float(far[same & apart].min()) > 0
    assert float(far[same & apart].mean()) < 0.7 * float(far[~same].mean())


def test_images_of_a_class_are_mirrored_at_random() -> None:
    """Without noise around it, a class has four images at most, one for each way to mirror it."""
    own = systems(1, seeded(2))[torch.zeros(64, dtype=torch.int64)]
    shown = rendered(own, (1, 16, 16), seeded()).double()
    nearest = [min(range(4), key=lambda k: float((flips(x)[k] - shown[0]).square().sum())) for x in shown]
    assert {k: nearest.count(k) > 5 for k in range(4)} == dict.fromkeys(range(4), True)


def test_a_network_learns_fractals_and_only_its_body_does() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        net = build("small", GREY, 10)
        first, generator = weights_of(net), seeded()
        images, labels = fractals(20, 16, GREY, generator)
        before, after = pretrained(net, images, labels, 100, 32, 3e-3, generator)
        assert before == pytest.approx(math.log(20), abs=0.5)
        assert after < 0.6 * before
        found.append((before, after, weights_of(net)))
        moved = {name for name, value in weights_of(net).items() if not torch.equal(value, first[name])}
        assert moved == {name for name in first if name.startswith("body.")}
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(found[0][2][name], value) for name, value in found[1][2].items())


def test_without_steps_nothing_is_learned() -> None:
    """As in the released code, whose loop takes no step: the loss stays, and so do the weights."""
    torch.manual_seed(0)
    net = build("small", GREY, 10, "group")
    first, generator = weights_of(net), seeded()
    before, after = pretrained(net, *fractals(5, 8, GREY, generator), 0, 32, 1e-3, generator)
    assert before == after and all(torch.equal(value, first[name]) for name, value in weights_of(net).items())
