"""What images are worth that `hr` makes up of a class: a network learns from them alone, and is tested on real ones.

`FCIL_DATA=... python benchmarks/made_up.py` fits the codec on the first ten classes of CIFAR-100 (order 1993), takes
sums over 400 training images of each of the next ten, makes up as many from them as `--set tied=N` does, trains on
these, and prints how many of the 100 held-out training images of each class are named rightly, once decoded by the
codec; and last, how many made-up ones a network names that was trained on decoded ones. No test image is looked at.
docs/made-up.png shows some: real ones first, then a row for each N.
"""

from pathlib import Path

import numpy as np
import torch
from code_sizes import stepped
from torch import Tensor

from fcil.blocks import made_up as making
from fcil.blocks.augment import augmented
from fcil.blocks.codec import TransformCodec, build
from fcil.blocks.losses import cross_entropy
from fcil.networks import build as network
from fcil.records import Weights
from fcil.results.gallery import save_grid
from fcil.scenario.datasets import load

TIED, SEEDS = (0, 32, 64, 128, 256), (0, 1, 2)
CLASSES, USED, EPOCHS, BATCH = 10, 400, 15, 100
OUT = Path("docs/made-up.png")


def made(codec: TransformCodec, fitted: Weights, images: dict[int, Tensor], tied: int, seed: int) -> dict[int, Tensor]:
    """Make up as many images of each class as there are."""
    leading = making.leading(codec, fitted, tied)
    sums = making.summed(making.numbers_of(codec, fitted, images), leading)
    counts = {j: torch.tensor(float(len(own))) for j, own in images.items()}
    moments = making.moments(*sums, counts, leading, list(images))
    return making.made(codec, fitted, moments, tied, images, USED, torch.Generator().manual_seed(seed))


def learned(images: dict[int, Tensor], held_out: dict[int, Tensor], seed: int) -> float:
    """Train a small network on some images, and return the percentage of others that it names rightly."""
    torch.manual_seed(seed)
    draws, net = torch.Generator().manual_seed(seed), network("small", (3, 32, 32), CLASSES)
    pixels, labels = torch.cat(list(images.values())), torch.arange(CLASSES).repeat_interleave(USED)
    steps = EPOCHS * (len(labels) // BATCH)
    sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    rate = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=steps)
    everything = torch.ones(CLASSES, dtype=torch.bool)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(labels), generator=draws).split(BATCH):
            shown = net(augmented(pixels[rows], "crop-flip", draws))
            stepped(cross_entropy(shown, labels[rows], everything), sgd, rate)
    net.eval()
    with torch.no_grad():
        right = sum(int((net(own).argmax(1) == j).sum()) for j, own in held_out.items())
    return 100 * right / sum(map(len, held_out.values()))


def prepared() -> tuple[list[Tensor], TransformCodec, Weights]:
    """Return the training images of the first twenty classes, and the codec that the first ten of them make."""
    data = load("cifar100")
    order = np.random.RandomState(1993).permutation(100)
    of = [data.train_images[data.train_labels == int(j)] for j in order[: 2 * CLASSES]]
    codec = build("klt", (3, 32, 32))
    assert isinstance(codec, TransformCodec)
    return of, codec, codec.fitted(codec.statistics(torch.cat(of[:CLASSES])))


if __name__ == "__main__":
    of, codec, fitted = prepared()
    real = {j: images[:USED] for j, images in enumerate(of[CLASSES:])}
    decoded = {j: codec.decode(fitted, codec.encode(fitted, images)) for j, images in enumerate(of[CLASSES:])}
    held_out = {j: images[USED:] for j, images in decoded.items()}
    print(f"| trained on | {' | '.join(f'seed {seed}' for seed in SEEDS)} |\n| --- |{' ---: |' * len(SEEDS)}")
    shown = {j: images[:USED] for j, images in decoded.items()}
    found = [learned(shown, held_out, seed) for seed in SEEDS]
    print(f"| decoded images themselves | {' | '.join(f'{right:.1f}' for right in found)} |", flush=True)
    rows = [torch.stack([images[0] for images in real.values()])]
    for tied in TIED:
        drawn = [made(codec, fitted, real, tied, seed) for seed in SEEDS]
        found = [learned(images, held_out, seed) for images, seed in zip(drawn, SEEDS, strict=True)]
        print(f"| made up, `tied={tied}` | {' | '.join(f'{right:.1f}' for right in found)} |", flush=True)
        rows.append(torch.stack([images[0] for images in drawn[0].values()]))
    save_grid(OUT, torch.stack(rows))
    print(OUT)
    known = [learned(shown, images, 0) for images in (shown, made(codec, fitted, real, 32, 0))]
    print("trained on decoded images, it names {:.1f} % of them, and {:.1f} % of what is made up".format(*known))
