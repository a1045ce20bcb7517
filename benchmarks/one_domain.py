"""Whether made-up images can stand for old classes: where new images are not made up, too, they cannot.

`FCIL_DATA=... python benchmarks/one_domain.py` trains a small network on ten classes of CIFAR-100, then on ten more
with nothing kept of the first but the sums that `hr` makes images up from, and prints how many held-out training images
of old and of new classes are named rightly, all decoded by the codec. No test image is looked at.
"""

from copy import deepcopy

import torch
from made_up import BATCH, CLASSES, USED, made, prepared
from torch import Tensor, nn
from torch.nn import functional as F

from fcil.blocks.augment import augmented
from fcil.networks import build as network

TIED = 32
ByClass = dict[int, Tensor]


def learned(net: nn.Module, images: ByClass, epochs: int, lr: float, teacher: nn.Module | None = None) -> nn.Module:
    """Train a network on the images of some classes; a teacher says what it sees of old ones in them."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(0)
    pixels = torch.cat(list(images.values()))
    labels = torch.cat([torch.full((len(own),), j) for j, own in images.items()])
    sgd = torch.optim.SGD(net.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    rate = torch.optim.lr_scheduler.OneCycleLR(sgd, lr, total_steps=epochs * (len(labels) // BATCH + 1))
    for _ in range(epochs):
        for rows in torch.randperm(len(labels), generator=draws).split(BATCH):
            shown = augmented(pixels[rows].float() / 255, "crop-flip", draws)
            out = net(shown)
            loss = F.cross_entropy(out, labels[rows])
            if teacher is not None:
                with torch.no_grad():
                    taught = teacher(shown)[:, :CLASSES].softmax(1)
                loss = loss - (taught * out[:, :CLASSES].log_softmax(1)).sum(1).mean()
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            rate.step()
    return net.eval()


@torch.no_grad()
def right(net: nn.Module, images: ByClass) -> float:
    """Return the percentage of images that are named rightly."""
    return 100 * sum(int((net(own).argmax(1) == j).sum()) for j, own in images.items()) / sum(map(len, images.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)  # the same sums, and so the same numbers, on any machine's cores
    of, codec, fitted = prepared()
    decoded = [codec.decode(fitted, codec.encode(fitted, images)) for images in of]
    shown, held_out = ({j: own[part] for j, own in enumerate(decoded)} for part in (slice(USED), slice(USED, None)))
    drawn = made(codec, fitted, {j: images[:USED] for j, images in enumerate(of)}, TIED, 0)
    old, new = range(CLASSES), range(CLASSES, 2 * CLASSES)
    torch.manual_seed(0)
    net = learned(network("small", (3, 32, 32), 2 * CLASSES), {j: shown[j] for j in old}, 15, 0.1)
    teacher = deepcopy(net)
    first = right(net, {j: held_out[j] for j in old})
    print(
        f"after the first ten classes: {first:.1f}\n\n| old ones, new ones | old | new | all |\n| --- |{' ---: |' * 3}"
    )
    for title, images, taught in (
        ("made up, decoded", {j: (drawn if j in old else shown)[j] for j in shown}, False),
        ("made up, decoded; the old network teaches", {j: (drawn if j in old else shown)[j] for j in shown}, True),
        ("made up, made up", drawn, False),
        ("made up, made up; the old network teaches", drawn, True),
        ("decoded, decoded: codes of both are there", shown, False),
    ):
        again = learned(deepcopy(net).train(), images, 10, 0.05, teacher if taught else None)
        found = [right(again, {j: held_out[j] for j in some}) for some in (old, new, range(2 * CLASSES))]
        print(f"| {title} | {' | '.join(f'{percent:.1f}' for percent in found)} |", flush=True)
