"""Gradients of a fixed LeNet, written out, and images rebuilt from them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fcil.blocks.inversion import LeNet, descended, gradients, inverted, labels_in, perturbed, rebuilt
from fcil.networks import build
from fcil.networks.heads import Normalise
from fcil.networks.split import SplitClassifier
from fcil.scenario.datasets import load
from fcil.scenario.scenario import Scenario
from tests.conftest import TINY

pytestmark = pytest.mark.usefixtures("in_double")

SHAPES = [((1, 8, 8), 10), ((3, 32, 32), 100), ((3, 64, 64), 7), ((3, 9, 14), 5)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("shape", "classes"), SHAPES)
def test_gradients_are_those_that_autograd_finds_image_by_image(shape: tuple[int, int, int], classes: int) -> None:
    net, images, labels = LeNet(shape, classes), drawn(3, *shape), torch.tensor([0, classes - 1, 2])
    parameters = [p.requires_grad_() for p in net.parameters()]
    for row, image, label in zip(gradients(net, images, labels).detach(), images, labels, strict=True):
        loss = F.cross_entropy(net(image[None]), label[None])
        each = torch.autograd.grad(loss, parameters)
        assert torch.allclose(row, torch.cat([g.flatten() for g in each]), atol=1e-12)


@pytest.mark.parametrize(("shape", "classes"), SHAPES)
def test_the_label_stands_in_the_last_layers_gradient(shape: tuple[int, int, int], classes: int) -> None:
    net, labels = LeNet(shape, classes), torch.arange(12) % classes
    assert torch.equal(labels_in(net, gradients(net, drawn(12, *shape), labels)), labels)


def test_the_network_is_the_papers_and_the_same_everywhere() -> None:
    torch.manual_seed(1)
    one = LeNet((3, 32, 32), 100)
    torch.manual_seed(2)
    other = LeNet((3, 32, 32), 100)
    assert sum(p.numel() for p in one.parameters()) == 85_036 and one.head.in_features == 768
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) and not p.requires_grad and p.abs().max() <= 0.5
    flat = torch.cat([p.flatten() for p in one.parameters()])
    assert flat.abs().max() > 0.499 and abs(float(flat.mean())) < 0.005
    assert LeNet((1, 8, 8), 10).head.in_features == 12 * 2 * 2 and LeNet((3, 84, 84), 9).head.in_features == 12 * 21**2


# -- the search -------------------------------------------------------------------------------------------------------


def valley(x: Tensor) -> Tensor:
    """Rosenbrock's function of each row, which bends."""
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1) / 50


def by_pytorch(loss: Callable[[Tensor], Tensor], start: Tensor, steps: int, inner: int, lr: float) -> Tensor:
    x = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([x], lr=lr, max_iter=inner, history_size=20, tolerance_grad=0, tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(x[None])[0]
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(closure)
    return x.detach()


@pytest.mark.parametrize(("steps", "inner", "lr"), [(1, 1, 0.1), (12, 1, 0.1), (4, 7, 0.1), (20, 1, 0.5)])
def test_every_row_goes_the_way_of_pytorchs_optimiser(steps: int, inner: int, lr: float) -> None:
    start = 0.3 * drawn(4, 6)
    found = descended(valley, start, torch.zeros(4), steps, inner, lr, 1)[-1]
    for row, begin in zip(found, start, strict=True):
        assert torch.allclose(row, by_pytorch(valley, begin, steps, inner, lr), atol=1e-8)


def test_the_last_places_are_those_after_each_of_the_last_steps() -> None:
    start, enough = 0.3 * drawn(2, 4), torch.zeros(2)
    found = descended(valley, start, enough, 9, 2, 0.1, 4)
    for i in range(4):
        assert torch.equal(found[i], descended(valley, start, enough, 6 + i, 2, 0.1, 1)[0])
    assert len(descended(valley, start, enough, 3, 1, 0.1, 20)) == 3


def test_a_row_that_has_arrived_stays_and_the_others_go_on() -> None:
    start = torch.stack([torch.ones(4), 0.3 * drawn(4)])
    found = descended(valley, start, torch.full((2,), 1e-6), 200, 1, 0.3, 3)
    assert torch.equal(found[:, 0], torch.ones(3, 4))
    assert 0 < valley(found[-1])[1] <= 1e-6 and len(found) == 3
    assert torch.equal(found[0], found[2]), "all arrived long before the end"


def test_a_row_that_would_leave_all_numbers_stays() -> None:
    def broken(x: Tensor) -> Tensor:
        return (x.square() / (x > 0.5)).sum(1)  # infinite below

    start = torch.tensor([[0.6, 2.0], [3.0, 2.0]])
    found = descended(broken, start, torch.zeros(2), 100, 1, 0.5, 1)[0]
    assert found.isfinite().all() and (found > 0.5).all()
    assert torch.equal(found[0], start[0]) and (found[1] < start[1]).all()


def test_no_number_moves_far_at_once() -> None:
    def ramp(x: Tensor) -> Tensor:
        return 1e-3 * x.square().sum(1)  # gentle and straight: L-BFGS would go all the way

    start = torch.tensor([[100.0, -50.0]])
    places = descended(ramp, start, torch.zeros(1), 30, 1, 1.0, 30)[:, 0]
    assert places.diff(dim=0).abs().max() == pytest.approx(1.0)
    assert torch.allclose(places[-1] / start[0], places[-1, 0] / 100), "the way stays the same"


def test_nothing_is_rebuilt_alike_from_another_start_but_the_image_is() -> None:
    scenario = Scenario(TINY, 0)
    images, labels = scenario.dataset.train_images[:6], scenario.dataset.train_labels[:6]
    net, wanted = LeNet((1, 8, 8), 10), Normalise(1)(images)
    sent = gradients(net, wanted, labels)
    one, other = (rebuilt(net, sent, labels, drawn(6, 1, 8, 8) + shift, 250, 20, 0.1, 20) for shift in (0.0, 0.1))
    assert one.shape == (20, 6, 1, 8, 8) and not torch.equal(one, other)
    for found in (one[-1], other[-1], one[0]):
        assert (found - wanted).square().mean() < 1e-4
    early = rebuilt(net, sent, labels, drawn(6, 1, 8, 8), 5, 1, 0.1, 1)[-1]
    assert (early - wanted).square().mean() > 0.1, "a few steps do not do it"


def test_images_are_perturbed_by_plain_descent_with_decay() -> None:
    start = 0.3 * drawn(3, 5)
    x = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.02, weight_decay=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        valley(x).sum().backward()
        optimizer.step()
    assert torch.allclose(perturbed(valley, start, 8, 0.02, 0.1), x.detach(), atol=1e-12)
    assert torch.equal(perturbed(valley, start, 0, 0.02, 0.1), start)


def test_pixels_undo_what_normalising_did() -> None:
    for channels in (1, 3):
        normalise, images = Normalise(channels), drawn(2, channels, 4, 4).sigmoid()
        assert torch.allclose(normalise.pixels(normalise(images)), images, atol=1e-7)


def test_an_image_is_found_by_its_maps() -> None:
    net = SplitClassifier(build("small", (1, 8, 8), 10, "batch"), 2).eval()
    images = load("digits").train_images[:6]
    normalise: Any = net.lower[0]
    with torch.no_grad():
        maps = net.lower(images)
    found = inverted(net.lower, maps, normalise, (1, 8, 8))
    assert found.dtype == torch.uint8 and found.shape == images.shape
    off = (found.double() - images.double()).flatten(1).norm(dim=1)
    others = (found.double() - images.roll(1, 0).double()).flatten(1).norm(dim=1)
    assert (off < 0.2 * others).all()
