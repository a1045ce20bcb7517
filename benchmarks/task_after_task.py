"""What learning task after task from decoded images costs, and what a softmax beside the pull gives, unfederated.

`FCIL_DATA=... python benchmarks/task_after_task.py` fits the codec on the first ten classes of CIFAR-100 (order 1993).
A small residual network learns the next forty in four tasks, 250 training images of each, and keeps all it has learned
from: images, or codes of 307 bytes, also larger ones and such as `codec=trellis` makes. It draws them to fixed
centroids as `hr` does, by the pull alone or with `contrast` beside it, here as a multiple of the pull (`hr` has 3). It
prints what percentage of held-out training images is named rightly after each task, and of old and new classes after
the last. No test image is looked at. A row takes ten minutes on one core; arguments choose rows, by number.
"""

import sys

import numpy as np
import torch
from code_sizes import network, outputs, stepped
from torch import Tensor, nn

from fcil.blocks.augment import augmented
from fcil.blocks.centroids import scores
from fcil.blocks.codec import TransformCodec, build
from fcil.scenario.datasets import load

SEEDS = (0, 1)
FIRST, TASKS, NEW, USED, HELD_OUT = 10, 4, 10, 250, 100
EPOCHS, BATCH, RATE, PULL, APART, TEMPERATURE = 8, 100, 0.1, 1 / 15, 4.0, 2.5
ROWS = (
    ("images", 0), ("codes", 0), ("images", 3), ("codes", 3), ("codes", 9),
    ("codes of 400 bytes", 3), ("codes of 307 bytes by trellis", 3),
)  # fmt: skip
CODECS = {"codes": ("klt", 307), "codes of 400 bytes": ("klt", 400), "codes of 307 bytes by trellis": ("trellis", 307)}


def drawn(codes: Tensor, labels: Tensor, contrast: float, seen: int) -> Tensor:
    """Return the squared distance to one's centroid, and beside it a softmax over the distances to those seen."""
    centroids = APART * torch.eye(TASKS * NEW)
    pull = (codes - centroids[labels]).square().sum(1)
    return pull + contrast * nn.functional.cross_entropy(
        scores(codes, centroids[:seen], TEMPERATURE), labels, reduction="none"
    )


def learned(images: Tensor, contrast: float, test: Tensor, seed: int) -> list[Tensor]:
    """Learn task after task; return after each which of the test images are known."""
    torch.manual_seed(seed)
    draws, net, known = torch.Generator().manual_seed(seed), network(), []
    labels, answers = (torch.arange(TASKS * NEW).repeat_interleave(each) for each in (USED, HELD_OUT))
    for seen in range(NEW, TASKS * NEW + 1, NEW):
        sgd = torch.optim.SGD(net.parameters(), RATE, momentum=0.9, weight_decay=5e-4, nesterov=True)
        rate = torch.optim.lr_scheduler.OneCycleLR(sgd, RATE, total_steps=EPOCHS * seen * USED // BATCH)
        net.train()
        for _ in range(EPOCHS):
            for rows in torch.randperm(seen * USED, generator=draws).split(BATCH):
                codes = outputs(net, augmented(images[rows], "crop-flip", draws))
                stepped(PULL * drawn(codes, labels[rows], contrast, seen).mean(), sgd, rate)
        net.eval()
        with torch.no_grad():
            said = torch.cat([outputs(net, part)[:, :seen] for part in test[: seen * HELD_OUT].split(200)])
        known.append((said.argmax(1) == answers[: seen * HELD_OUT]).float())
    return known


def decoded(images: Tensor, to_fit: Tensor, kind: str, size: int) -> Tensor:
    """Return images as a codec gives them back that was fitted on others."""
    codec = build(kind, (3, 32, 32), size)
    assert isinstance(codec, TransformCodec)
    fitted = codec.fitted(codec.statistics(to_fit))
    return codec.decode(fitted, codec.encode(fitted, images))


if __name__ == "__main__":
    torch.set_num_threads(1)  # the same sums, and so the same numbers, on any machine's cores
    data, order = load("cifar100"), np.random.RandomState(1993).permutation(100)
    of = [data.train_images[data.train_labels == int(j)] for j in order[: FIRST + TASKS * NEW]]
    images, test = (torch.cat([own[part] for own in of[FIRST:]]) for part in (slice(USED), slice(-HELD_OUT, None)))
    print("| learned from | contrast | seed | after each task | old / new |\n| --- | ---: | --- | --- | ---: |")
    for name, contrast in [ROWS[int(row)] for row in sys.argv[1:] or range(len(ROWS))]:
        shown = decoded(images, torch.cat(of[:FIRST]), *CODECS[name]) if name in CODECS else images
        for seed in SEEDS:
            known = learned(shown.float() / 255, contrast, test.float() / 255, seed)
            old, new = known[-1][: -NEW * HELD_OUT].mean(), known[-1][-NEW * HELD_OUT :].mean()
            after = " ".join(f"{100 * one.mean():.1f}" for one in known)
            print(f"| {name} | {contrast} | {seed} | {after} | {100 * old:.1f} / {100 * new:.1f} |", flush=True)
