"""Prototypes that travel as gradients: what a small network with known weights learns from a typical image of a class.

Dong et al., "Federated Class-Incremental Learning", CVPR 2022. A client moves its most typical image of each class down
the loss of its own model, and sends the gradient. The proxy server looks for images with these gradients, and judges
models by them. Whoever has the gradients has the images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks import inversion
from fcil.blocks.augment import augmented
from fcil.blocks.inversion import LeNet
from fcil.blocks.losses import masked
from fcil.blocks.training import as_bytes, by_class, in_parts, loaded, normal
from fcil.networks.heads import Normalise
from fcil.records import Weights


def typical(images: Tensor, labels: Tensor, classes: Sequence[int], features: Callable[[Tensor], Tensor]) -> Tensor:
    """Return of each class the image whose feature, of length 1, is nearest to their mean."""
    own = {j: images[labels == j] for j in classes}
    found = {j: F.normalize(rows) for j, rows in by_class(features, own).items()}
    return torch.stack([own[j][(f - f.mean(0)).square().sum(1).argmin()] for j, f in found.items()])


def unnamed_gradients(net: LeNet, images: Tensor, classes: Tensor, generator: torch.Generator) -> Weights:
    """Return what the network learns from each image, in random order: the names say nothing of the classes."""
    rows = inversion.gradients(net, images, classes)
    order = torch.randperm(len(rows), generator=generator, device=rows.device)
    return {str(i): row.clone() for i, row in enumerate(rows[order])}


@dataclass(frozen=True)
class Search:
    """How the images behind gradients are looked for."""

    steps: int  # of L-BFGS
    inner: int  # moves in a step
    lr: float  # length of a move
    iterates: int  # last steps whose pictures count


def rebuilt(
    net: LeNet, sent: Tensor, shape: tuple[int, int, int], draws: torch.Generator, search: Search
) -> tuple[Tensor, Tensor]:
    """Return the images behind gradients, uint8 (iterates, images, ...), and the label of each."""
    labels, normalise = inversion.labels_in(net, sent), Normalise(shape[0]).to(sent.device)
    start = normal((len(sent), *shape), draws).to(sent)
    found = inversion.rebuilt(net, sent, labels, start, search.steps, search.inner, search.lr, search.iterates)
    return as_bytes(normalise.pixels(found)), labels


class ProxyServer:
    """Rebuilds prototypes from their gradients, and says how well a model classifies them."""

    def __init__(self, net: nn.Module, shape: tuple[int, int, int], classes: int, augment: str, device: str):
        self.net, self.lenet, self.shape = net, LeNet(shape, classes), shape
        self.augment, self.device = augment, torch.device(device)

    def rebuilt(self, sent: Tensor, most: int, search: Search, seed: int) -> tuple[Tensor, Tensor]:
        """Return at most so many prototypes, as the last steps of the search have them, uint8, and their labels."""
        lenet = self.lenet.to(sent.device)
        labels = inversion.labels_in(lenet, sent).tolist()
        alike = sorted(range(len(labels)), key=lambda i: labels[:i].count(labels[i]))  # the first of each class first
        found, label = rebuilt(lenet, sent[alike[:most]], self.shape, torch.Generator().manual_seed(seed), search)
        return found.flatten(0, 1).cpu(), label.cpu().repeat(len(found))

    @torch.no_grad()
    def accuracy(self, weights: Weights, seen: Tensor, proxies: Tensor, labels: Tensor, seed: int) -> float:
        """Return a model's accuracy on prototypes, which are augmented as images are in training."""
        images = proxies.to(self.device).to(torch.get_default_dtype()) / 255
        images = augmented(images, self.augment, torch.Generator(self.device).manual_seed(seed))
        net, size = loaded(self.net.to(self.device), weights), max(1, 2**17 // images[0].numel())
        said = masked(in_parts(net, images, size), seen.to(self.device)).argmax(1)
        return float((said.cpu() == labels).double().mean())
