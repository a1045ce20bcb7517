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
from fcil.blocks.losses import binary_cross_entropies, masked, one_hot
from fcil.blocks.training import as_bytes, by_class, in_parts, loaded, normal
from fcil.networks import Classifier
from fcil.networks.heads import Normalise
from fcil.records import ByClass, Weights, record

DECAY = 1e-5  # of an image that is moved, and of the weights in local training


def typical(images: Tensor, labels: Tensor, classes: Sequence[int], features: Callable[[Tensor], Tensor]) -> Tensor:
    """Return of each class the image whose feature, of length 1, is nearest to their mean."""
    own = {j: images[labels == j] for j in classes}
    found = {j: F.normalize(rows) for j, rows in by_class(features, own).items()}
    return torch.stack([own[j][(f - f.mean(0)).square().sum(1).argmin()] for j, f in found.items()])


def moved_down(net: Classifier, images: Tensor, classes: Tensor, seen: Tensor, steps: int, lr: float) -> Tensor:
    """Return an image of each class, as the network sees it, moved down the loss of the weights that are in it."""
    target = one_hot(classes, net.head.bias[None])

    def loss(x: Tensor) -> Tensor:
        return binary_cross_entropies(net(net.normalise.pixels(x)), target, seen)

    return inversion.perturbed(loss, net.normalise(images), steps, lr, DECAY)


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


def shown(net: LeNet, rows: Weights, shape: tuple[int, int, int], draws: torch.Generator, search: Search) -> ByClass:
    """Return a picture of each class that gradients tell of, whoever hears them."""
    (pictures, *_), labels = rebuilt(net, torch.stack(list(rows.values())), shape, draws, search)
    return {j: picture[None] for j, picture in zip(labels.tolist(), pictures, strict=True)}


@record
class Best:
    """The global model, and the best ones that came before it."""

    weights: Weights
    best_1: Weights  # the best model of the last task; empty if there is none
    best_2: Weights  # the best model since prototypes came
    knows_1: Tensor  # classes that each of them has outputs of, as a mask
    knows_2: Tensor
    seen: Tensor  # classes that have come so far
    noticed: bool  # whether prototypes of this task have come


@record
class Choice(Best):
    """Beside these, by what they were chosen."""

    accuracy: float  # of the best model on the proxy set that it was chosen by
    proxies: Tensor  # rebuilt prototypes, uint8, those of the last step at the end
    labels: Tensor


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

    def choose(self, kept: Choice, sent: Sequence[Tensor], most: int, search: Search, reset: bool, seed: int) -> None:
        """Take over what prototypes came, and keep the global model if none was better on the proxy set.

        When they come, the best model becomes that of the last task. The next one has to beat its accuracy, though on
        another proxy set, unless that is `reset`.
        """
        if sent:
            kept.proxies, kept.labels = self.rebuilt(torch.stack([*sent]), most, search, seed)
            kept.best_1, kept.knows_1, kept.noticed = kept.best_2, kept.knows_2, True
            kept.accuracy = 0.0 if reset else kept.accuracy
        if len(kept.labels):
            accuracy = self.accuracy(kept.weights, kept.seen, kept.proxies, kept.labels, seed)
            if accuracy >= kept.accuracy:
                kept.best_2, kept.knows_2, kept.accuracy = kept.weights, kept.seen, accuracy

    @torch.no_grad()
    def accuracy(self, weights: Weights, seen: Tensor, proxies: Tensor, labels: Tensor, seed: int) -> float:
        """Return a model's accuracy on prototypes, which are augmented as images are in training."""
        images = proxies.to(self.device).to(torch.get_default_dtype()) / 255
        images = augmented(images, self.augment, torch.Generator(self.device).manual_seed(seed))
        net, size = loaded(self.net.to(self.device), weights), max(1, 2**17 // images[0].numel())
        said = masked(in_parts(net, images, size), seen.to(self.device)).argmax(1)
        return float((said.cpu() == labels).double().mean())
