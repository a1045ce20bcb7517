"""Prototypes that travel as gradients: what their order tells, which are rebuilt, and what models are judged on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fcil.blocks import inversion
from fcil.blocks.inversion import LeNet, labels_in
from fcil.blocks.prototype_gradients import ProxyServer, Search, typical, unnamed_gradients
from fcil.scenario.tasks import mask

SHAPE = (1, 8, 8)
FAST = Search(steps=3, inner=2, lr=0.1, iterates=2)


class Seen(nn.Module):
    """A network that notes what it is shown, and takes everything for class 1."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.shown.append(images)
        return torch.tensor([0.0, 1.0, 2.0]).expand(len(images), 3)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_order_of_gradients_tells_nothing_of_the_classes() -> None:
    net, classes = LeNet(SHAPE, 5), torch.tensor([0, 1, 2, 4])
    images = torch.randn(4, *SHAPE, generator=seeded(0))
    rows, orders = inversion.gradients(net, images, classes), set()
    for seed in range(20):
        sent = unnamed_gradients(net, images, classes, seeded(seed))
        assert list(sent) == ["0", "1", "2", "3"]
        found = labels_in(net, torch.stack(list(sent.values()))).tolist()
        assert sorted(found) == classes.tolist()
        assert all(
            torch.equal(row, rows[classes.tolist().index(j)]) for j, row in zip(found, sent.values(), strict=True)
        )
        orders.add(tuple(found))
    assert len(orders) > 10


def test_the_typical_image_is_nearest_to_the_mean_of_directions() -> None:
    images = torch.tensor([[9.0, 0.0], [1.0, 0.2], [0.0, 3.0], [5.0, 5.0], [0.1, 0.0]])
    labels = torch.tensor([0, 0, 0, 1, 0])
    assert typical(images, labels, [0, 1], lambda x: x).tolist() == [[1.0, pytest.approx(0.2)], [5.0, 5.0]]


def test_of_too_many_prototypes_every_class_keeps_one_before_any_keeps_two() -> None:
    proxy = ProxyServer(Seen(), SHAPE, 5, "none", "cpu")
    labels = torch.tensor([2, 2, 2, 0, 4, 0])
    sent = inversion.gradients(proxy.lenet, torch.randn(6, *SHAPE, generator=seeded(1)), labels)
    for most, kept in ((2, [0, 2]), (3, [0, 2, 4]), (4, [0, 2, 2, 4]), (9, [0, 0, 2, 2, 2, 4])):
        images, found = proxy.rebuilt(sent, most, FAST, 0)
        assert sorted(found.tolist()) == sorted(2 * kept), "two iterates each"
        assert images.shape == (2 * len(kept), *SHAPE) and images.dtype == torch.uint8


@pytest.mark.parametrize("augment", ["none", "crop"])
def test_models_are_judged_on_prototypes_as_training_shows_images(augment: str) -> None:
    net: Any = Seen()
    proxy = ProxyServer(net, SHAPE, 3, augment, "cpu")
    proxies = torch.randint(0, 256, (6, *SHAPE), dtype=torch.uint8, generator=seeded(2))
    labels = torch.tensor([1, 1, 2, 0, 1, 2])
    assert proxy.accuracy({}, mask((0, 1), 3), proxies, labels, 7) == 0.5, "class 2 has not been seen"
    assert proxy.accuracy({}, mask((0, 1, 2), 3), proxies, labels, 7) == pytest.approx(1 / 3)
    assert torch.equal(net.shown[0], net.shown[1]) and torch.equal(net.shown[0], proxies / 255) == (augment == "none")
    proxy.accuracy({}, mask((0, 1), 3), proxies, labels, 8)
    assert torch.equal(net.shown[0], net.shown[2]) == (augment == "none")
