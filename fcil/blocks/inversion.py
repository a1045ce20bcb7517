"""Images rebuilt from gradients: what a small network with known weights learns from an image shows the image.

Zhu, Liu and Han, "Deep Leakage from Gradients", NeurIPS 2019: an image is moved until its gradient is the one that was
sent. The label stands in the last layer's gradient (Zhao, Mopuri and Bilen, "iDLG", 2020). Images are centred and
scaled as networks see them, so that the search can begin at a draw from the standard normal distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.recorded import Recorded
from fcil.blocks.training import as_bytes, normal
from fcil.networks.heads import Normalise

CHANNELS, SIDE, STRIDES = 12, 5, (2, 2, 1)
SEED = 2022  # of the weights, which everyone knows, and of the noise that a search by features begins at
HISTORY = 20  # moves whose curvature L-BFGS remembers
NEAR = 1e-8  # a search ends where so much of a gradient's squared length is left to explain
STILL = 1e-9  # or where no number moves by more
PATIENCE = 10  # or after so many steps without a loss lower than before: the rest is rounding
LONGEST = 1.0  # most that a number moves at once; images are within about 2, and without a bound some searches fly off
POSITIVE = 1e-10  # least curvature that is believed
STEPS, INNER, LENGTH, FAINT = 30, 10, 0.5, 0.1  # of a search by features, which begins at faint noise


class LeNet(nn.Module):
    """Three convolutions of 12 channels with sigmoids, and a linear layer; its weights are the same everywhere."""

    def __init__(self, shape: tuple[int, int, int], classes: int):
        super().__init__()
        depths = (shape[0], CHANNELS, CHANNELS)
        self.layers = nn.ModuleList(
            nn.Conv2d(depth, CHANNELS, SIDE, stride, SIDE // 2) for depth, stride in zip(depths, STRIDES, strict=True)
        )
        height, width = (-(-side // 4) for side in shape[1:])
        self.head = nn.Linear(CHANNELS * height * width, classes)
        generator = torch.Generator().manual_seed(SEED)
        for p in self.parameters():
            p.data.copy_(torch.rand(p.shape, generator=generator) - 0.5)
            p.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sigmoid()
        logits: Tensor = self.head(x.flatten(1))
        return logits


def gradients(net: LeNet, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of each image's cross-entropy with respect to all weights, as a row.

    Written out as products of matrices, image by image: that is several times as fast as asking for each.
    """
    x, passed = images, []
    for layer, stride in zip(net.layers, STRIDES, strict=True):
        patches = F.unfold(x, SIDE, padding=SIDE // 2, stride=stride)
        out = (layer.weight.flatten(1) @ patches + layer.bias[:, None]).sigmoid()  # type: ignore[index, operator]
        passed.append((layer, patches, out, x.shape[2:], stride))
        x = out.view(len(x), CHANNELS, *(-(-side // stride) for side in x.shape[2:]))
    features = x.flatten(1)
    error = net.head(features).softmax(1) - F.one_hot(labels, net.head.out_features)
    found = [error, (error[:, :, None] * features[:, None]).flatten(1)]
    back = (error @ net.head.weight).view(len(images), CHANNELS, -1)
    for layer, patches, out, sides, stride in reversed(passed):
        back = back * out * (1 - out)
        found += [back.sum(2), (back @ patches.transpose(1, 2)).flatten(1)]
        if layer is not net.layers[0]:
            spread = layer.weight.flatten(1).T @ back
            back = F.fold(spread, sides, SIDE, padding=SIDE // 2, stride=stride).flatten(2)
    return torch.cat(found[::-1], 1)


def labels_in(net: LeNet, sent: Tensor) -> Tensor:
    """Return the label behind each gradient: of the last layer's rows, only that of the label is negative."""
    classes = net.head.out_features
    rows = sent[:, -classes * (net.head.in_features + 1) : -classes]
    return rows.reshape(len(sent), classes, -1).sum(2).argmin(1)


def rebuilt(
    net: LeNet, sent: Tensor, labels: Tensor, start: Tensor, steps: int, inner: int, lr: float, last: int
) -> Tensor:
    """Return the images after each of the `last` steps of a search for the gradients: (last, images, ...)."""

    def off(flat: Tensor) -> Tensor:
        return (gradients(net, flat.view_as(start), labels) - sent).square().sum(1)

    enough = NEAR * sent.square().sum(1)
    return descended(off, start.flatten(1), enough, steps, inner, lr, last, record=True).view(-1, *start.shape)


def inverted(
    function: Callable[[Tensor], Tensor], wanted: Tensor, normalise: Normalise, shape: tuple[int, int, int]
) -> Tensor:
    """Return images of which `function` makes, as nearly as a search finds, the rows that are `wanted`: uint8.

    It begins near grey: noise at the start stays wherever features do not see it.
    """
    draws = torch.Generator().manual_seed(SEED)
    start = FAINT * normal((len(wanted), *shape), draws).to(wanted)

    def off(flat: Tensor) -> Tensor:
        return (function(normalise.pixels(flat.view_as(start))) - wanted).flatten(1).square().sum(1)

    enough = NEAR * wanted.flatten(1).square().sum(1)
    found = descended(off, start.flatten(1), enough, STEPS, INNER, LENGTH, 1)[0]
    return as_bytes(normalise.pixels(found.view_as(start)))


def descended(
    loss: Callable[[Tensor], Tensor], start: Tensor, enough: Tensor, steps: int, inner: int, lr: float, last: int,
    record: bool = False,
) -> Tensor:  # fmt: skip
    """Move each row of `start` down a loss of its own by L-BFGS; return where all are after each of the last steps.

    As PyTorch's optimiser of that name with moves of fixed length, `inner` of them in a step, but every row has a
    curvature of its own and all go at once. A row with a loss that is `enough`, or that would leave all numbers, stays.
    A loss that is pure tensor code may be recorded: a step is thousands of kernels.
    """
    if record and start.is_cuda:
        torch.cuda.empty_cache()  # gives back what the graph of the last search had
    at = _Search.begun(loss, start, enough, lr)

    def work() -> None:
        _step(loss, at, enough, inner, lr)

    step = Recorded(work, start.device) if record else work
    kept: list[Tensor] = []
    for number in range(steps):
        step()
        kept = [*kept, at.x.clone()][-last:]
        if not at.alive.any():  # all further ones are the same
            kept = [*kept, *[kept[-1]] * (steps - 1 - number)][-last:]
            break
    return torch.stack(kept)


@dataclass
class _Search:
    """Where a search by L-BFGS is, in tensors that stay where they are."""

    x: Tensor
    slope: Tensor
    scale: Tensor  # of the first guess at the inverse curvature
    length: Tensor  # of the next move
    alive: Tensor
    lowest: Tensor  # loss so far
    waited: Tensor  # steps since then
    moves: list[Tensor]  # the last ones, with how each turned the slope, and one over their product
    turns: list[Tensor]
    weights: list[Tensor]

    @classmethod
    def begun(cls, loss: Callable[[Tensor], Tensor], start: Tensor, enough: Tensor, lr: float) -> "_Search":
        value, slope = _slope(loss, start)
        one = torch.ones_like(start[:, :1])
        length = lr / slope.abs().sum(1, keepdim=True).clamp_min(1)
        history = [[torch.zeros_like(like) for _ in range(HISTORY)] for like in (start, start, one)]  # weights of 0
        alive = (value > enough)[:, None]
        return cls(start.clone(), slope, one, length, alive, value, torch.zeros_like(value), *history)

    def take(self, **new: Tensor | list[Tensor]) -> None:
        """Copy what is new into place; what moves up in a list comes from a place that is not yet written."""
        for name, value in new.items():
            own = getattr(self, name)
            for mine, other in zip(own, value, strict=True) if isinstance(own, list) else [(own, value)]:
                mine.copy_(other)


def _step(loss: Callable[[Tensor], Tensor], at: _Search, enough: Tensor, inner: int, lr: float) -> None:
    """Move so many times, and see whether that was worth it."""
    x, slope, scale, alive, length = at.x, at.slope, at.scale, at.alive, at.length
    moves, turns, weights, value = at.moves, at.turns, at.weights, at.lowest
    for _ in range(inner):
        move = length * _way(slope, moves, turns, weights, scale)
        move = move * (LONGEST / move.abs().amax(1, keepdim=True).clamp_min(LONGEST))
        value, there = _slope(loss, x + move)
        alive = alive & there.isfinite().all(1, keepdim=True) & (move.abs().amax(1, keepdim=True) > STILL)
        move, turn = torch.where(alive, move, 0.0), torch.where(alive, there - slope, 0.0)
        bend = (move * turn).sum(1, keepdim=True)
        real = bend > POSITIVE
        scale = torch.where(real, bend / turn.square().sum(1, keepdim=True).clamp_min(POSITIVE), scale)
        moves, turns = [*moves[1:], move], [*turns[1:], turn]
        weights = [*weights[1:], torch.where(real, 1 / bend.clamp_min(POSITIVE), 0.0)]
        x, slope, alive = x + move, slope + turn, alive & (value > enough)[:, None]
        length = torch.full_like(length, lr)
    waited = torch.where(value < 0.99 * at.lowest, 0, at.waited + 1)
    at.take(
        x=x, slope=slope, scale=scale, length=length, moves=moves, turns=turns, weights=weights, waited=waited,
        lowest=torch.minimum(value, at.lowest), alive=alive & (waited < PATIENCE * max(1, 20 // inner))[:, None],
    )  # fmt: skip


def perturbed(loss: Callable[[Tensor], Tensor], x: Tensor, steps: int, lr: float, decay: float) -> Tensor:
    """Return images moved down their losses by plain gradient descent with weight decay."""
    for _ in range(steps):
        x = x - lr * (_slope(loss, x)[1] + decay * x)
    return x


def _slope(loss: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss and its slope."""
    with torch.enable_grad():
        value = loss(x := x.detach().requires_grad_())
        (slope,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), slope


def _way(slope: Tensor, moves: list[Tensor], turns: list[Tensor], weights: list[Tensor], scale: Tensor) -> Tensor:
    """Return minus the slope times what the last moves tell of the inverse curvature."""
    way, shares = -slope, []
    for move, turn, weight in zip(reversed(moves), reversed(turns), reversed(weights), strict=True):
        shares.append(share := weight * (move * way).sum(1, keepdim=True))
        way = way - share * turn
    way = way * scale
    for move, turn, weight, share in zip(moves, turns, weights, reversed(shares), strict=True):
        way = way + move * (share - weight * (turn * way).sum(1, keepdim=True))
    return way
