"""What learning from decoded images costs: a network learns from codes of several sizes, or from the images themselves.

`FCIL_DATA=... python benchmarks/code_sizes.py` fits the codec on the first ten classes of CIFAR-100 (order 1993) and
trains a small residual network on 250 training images of each of the next forty, decoded. It prints what percentage of
100 held-out training images of each is named rightly: as they are, decoded as well, and by the mean of both answers.
No test image is looked at. It takes half an hour on one core; sizes may be given as arguments, 0 is the image itself.
"""

import sys

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.augment import augmented
from fcil.blocks.codec import TransformCodec, build
from fcil.scenario.datasets import load

SIZES, SEEDS = (0, 307, 400, 512), (0, 1)
FIRST, CLASSES, USED, HELD_OUT = 10, 40, 250, 100
EPOCHS, BATCH, WIDTH, RATE = 12, 100, 32, 0.2


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(after)
        self.around = nn.Conv2d(before, after, 1, stride, bias=False) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.norm(self.first(x))))
        return F.relu(self.last_norm(y) + self.around(x))


def network() -> nn.Sequential:
    """Return a residual network with three blocks."""
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(),
        Block(WIDTH, WIDTH, 1), Block(WIDTH, 2 * WIDTH, 2), Block(2 * WIDTH, 4 * WIDTH, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * WIDTH, CLASSES),
    ).to(memory_format=torch.channels_last)  # fmt: skip


def outputs(net: nn.Module, images: Tensor) -> Tensor:
    """Show images of 0..1 to a network, in bf16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        shown: Tensor = net(((images - 0.48) / 0.27).to(memory_format=torch.channels_last))
    return shown.float()


def stepped(loss: Tensor, sgd: torch.optim.Optimizer, rate: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Take a step down the loss, and one along the learning rate's schedule."""
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    rate.step()


def learned(images: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """Train a network on images and their labels."""
    torch.manual_seed(seed)
    draws, net = torch.Generator().manual_seed(seed), network()
    sgd = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
    rate = torch.optim.lr_scheduler.OneCycleLR(sgd, RATE, total_steps=EPOCHS * len(labels) // BATCH)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels), generator=draws).split(BATCH):
            stepped(F.cross_entropy(outputs(net, augmented(images[rows], "crop-flip", draws)), labels[rows]), sgd, rate)
    return net.eval()


if __name__ == "__main__":
    torch.set_num_threads(1)  # the same sums, and so the same numbers, on any machine's cores
    data, order = load("cifar100"), np.random.RandomState(1993).permutation(100)
    of = [data.train_images[data.train_labels == int(j)] for j in order[: FIRST + CLASSES]]
    train, test = (torch.cat([own[part] for own in of[FIRST:]]) for part in (slice(USED), slice(-HELD_OUT, None)))
    labels, answers = (torch.arange(CLASSES).repeat_interleave(each) for each in (USED, HELD_OUT))
    print("| learned from | dB | named as they are | decoded | by both |\n| --- | ---: | --- | --- | --- |")
    for size in map(int, sys.argv[1:] or SIZES):
        codec = build("klt", (3, 32, 32), size or 307)
        assert isinstance(codec, TransformCodec)
        fitted = codec.fitted(codec.statistics(torch.cat(of[:FIRST])))
        shown, seen = (codec.decode(fitted, codec.encode(fitted, x)) if size else x for x in (train, test))
        error = (seen.float() - test.float()).square().mean()
        found = []
        for seed in SEEDS:
            net = learned(shown.float() / 255, labels, seed)
            with torch.no_grad():
                plain, coded = (torch.cat([outputs(net, part / 255) for part in x.split(200)]) for x in (test, seen))
            right = [(answer.argmax(1) == answers).float().mean() for answer in (plain, coded, plain + coded)]
            found.append([f"{100 * share:.1f}" for share in right])
        decibels = f"{10 * torch.log10(255**2 / error):.2f}" if size else ""
        columns = [" ".join(by_seed) for by_seed in zip(*found, strict=True)]
        name = f"codes of {size} bytes" if size else "images as they are"
        print(f"| {name} | {decibels} | {' | '.join(columns if size else [columns[0], '', ''])} |", flush=True)
