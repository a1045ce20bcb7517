"""What new images as they are, beside decoded ones, are worth: `whole` of `hr`, without a federation.

`FCIL_DATA=... python benchmarks/whole_images.py` fits the codec on the first ten classes of CIFAR-100 (order 1993). A
small residual network learns the next forty in four tasks, 250 training images of each, and keeps what it has learned
from: images, codes, or codes while half of a task's new images, drawn once, are seen as they are. These are drawn to
their centroid only as far as new classes differ; that they are new the decoded ones say, which weigh more for it. What
that weight does by itself is measured, too. It prints what percentage of held-out training images is named rightly
after each task, and of old and new classes after the last. No test image is looked at. It takes an hour on one core;
arguments choose rows, by number.
"""

import sys

import numpy as np
import torch
from code_sizes import network, outputs, stepped
from torch import Tensor, nn

from fcil.blocks.augment import augmented
from fcil.blocks.codec import TransformCodec, build
from fcil.scenario.datasets import load

SEEDS, SHARE = (0, 1), 0.5
FIRST, TASKS, NEW, USED, HELD_OUT = 10, 4, 10, 250, 100
EPOCHS, BATCH, RATE, PULL, APART = 8, 100, 0.1, 1 / 15, 4.0
WEIGHT = (1 - SHARE) ** -0.5  # of decoded new images beside whole ones


def off_centroid(codes: Tensor, labels: Tensor, whole: Tensor, old: int, weight: float) -> Tensor:
    """Return the squared distance to one's centroid; of whole images only as far as it tells new classes apart."""
    off = codes - APART * nn.functional.one_hot(labels, TASKS * NEW)
    each = off.square().sum(1)
    if not old:
        return each
    among = off[:, old : old + NEW]
    apart = (among - among.mean(1, keepdim=True)).square().sum(1)
    return torch.where(whole, apart, torch.where(labels >= old, weight, 1.0) * each)


def learned(
    kept: Tensor, new: Tensor, share: float | None, weight: float, test: Tensor, seed: int
) -> list[Tensor]:  # fmt: skip
    """Learn task after task, a share of new images, if any are to be drawn, as `new` has them; the others as `kept`.

    Return after each task which of the test images are known.
    """
    torch.manual_seed(seed)
    draws, net, known = torch.Generator().manual_seed(seed), network(), []
    labels, answers = (torch.arange(TASKS * NEW).repeat_interleave(each) for each in (USED, HELD_OUT))
    for old in range(0, TASKS * NEW, NEW):
        seen = old + NEW
        sgd = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
        rate = torch.optim.lr_scheduler.OneCycleLR(sgd, RATE, total_steps=EPOCHS * seen * USED // BATCH)
        net.train()
        whole = torch.zeros(len(labels), dtype=torch.bool)
        if share is not None:
            whole = (labels >= old) & (torch.rand(len(labels), generator=draws) < share)
        pool = torch.where(whole[:, None, None, None], new, kept)
        for _ in range(EPOCHS):
            for rows in torch.randperm(seen * USED, generator=draws).split(BATCH):
                codes = outputs(net, augmented(pool[rows], "crop-flip", draws))
                stepped(PULL * off_centroid(codes, labels[rows], whole[rows], old, weight).mean(), sgd, rate)
        net.eval()
        with torch.no_grad():
            said = torch.cat([outputs(net, part)[:, :seen] for part in test[: seen * HELD_OUT].split(200)])
        known.append((said.argmax(1) == answers[: seen * HELD_OUT]).float())
    return known


if __name__ == "__main__":
    torch.set_num_threads(1)  # the same sums, and so the same numbers, on any machine's cores
    data, order = load("cifar100"), np.random.RandomState(1993).permutation(100)
    of = [data.train_images[data.train_labels == int(j)] for j in order[: FIRST + TASKS * NEW]]
    codec = build("klt", (3, 32, 32), 307)
    assert isinstance(codec, TransformCodec)
    fitted = codec.fitted(codec.statistics(torch.cat(of[:FIRST])))
    images, test = (torch.cat([own[part] for own in of[FIRST:]]) for part in (slice(USED), slice(-HELD_OUT, None)))
    decoded = codec.decode(fitted, codec.encode(fitted, images)).float() / 255
    images, test = images.float() / 255, test.float() / 255
    rows = (
        ("images", images, None, 1.0), ("codes", decoded, None, 1.0),
        ("codes, the new weigh more", decoded, 0.0, WEIGHT),
        ("codes, and half of the new as they are", decoded, SHARE, WEIGHT),
    )  # fmt: skip
    print("| learned from | seed | after each task | old / new |\n| --- | --- | --- | ---: |")
    for row in map(int, sys.argv[1:] or range(len(rows))):
        name, kept, share, weight = rows[row]
        for seed in SEEDS:
            known = learned(kept, images, share, weight, test, seed)
            old, new = known[-1][: -NEW * HELD_OUT].mean(), known[-1][-NEW * HELD_OUT :].mean()
            after = " ".join(f"{100 * one.mean():.1f}" for one in known)
            print(f"| {name} | {seed} | {after} | {100 * old:.1f} / {100 * new:.1f} |", flush=True)
