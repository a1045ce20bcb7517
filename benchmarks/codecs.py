"""How near decoded images are to the real ones, by codec and bytes, on classes that the codec never saw.

`FCIL_DATA=... python benchmarks/codecs.py` fits each codec on the training images of the first ten classes of CIFAR-100
(order 1993), or the first five of TinyImageNet, and prints the peak signal-to-noise ratio on the first 2,000 test
images of all other classes, and the milliseconds that an image takes on one core.
"""

import time

import numpy as np
import torch

from fcil.blocks.codec import WebpCodec, build
from fcil.scenario.datasets import load

SIZES = (32, 64, 128, 205, 307, 410, 512, 614)  # bytes for an image of 32x32, in step with its pixels beyond


def psnr(images: torch.Tensor, decoded: torch.Tensor) -> float:
    """Return 10 log10 of 255^2 over the mean squared error, in dB."""
    return float(10 * torch.log10(255**2 / (images.double() - decoded.double()).square().mean()))


def compare(dataset: str, first: int) -> None:
    """Print a table for one dataset."""
    data = load(dataset)
    order = np.random.RandomState(1993).permutation(len(data.class_names))
    seen = torch.tensor(order[:first].copy())
    fit = data.train_images[torch.isin(data.train_labels, seen)]
    test = data.test_images[~torch.isin(data.test_labels, seen)][:2000]
    shape = tuple(test.shape[1:])
    print(f"\n{dataset}, fitted on {len(fit):,} images of {first} classes, {len(test):,} test images of others\n")
    print("| codec | bytes | PSNR, dB | ms to encode | ms to decode |\n| --- | ---: | ---: | ---: | ---: |")
    for kind in ("klt", "trellis", "dct", "webp"):
        sums = None if kind == "webp" else build(kind, shape).statistics(fit)
        for size in SIZES:
            size = round(size * test[0].numel() / 3072)
            if kind == "webp" and size < WebpCodec.least:
                continue
            codec = build(kind, shape, size)
            fitted = {} if kind == "webp" else codec.fitted(sums)
            start = time.perf_counter()
            codes = codec.encode(fitted, test)
            middle = time.perf_counter()
            decoded = codec.decode(fitted, codes)
            each = [1000 * t / len(test) for t in (middle - start, time.perf_counter() - middle)]
            print(f"| {kind} | {size:,} | {psnr(test, decoded):.2f} | {each[0]:.2f} | {each[1]:.2f} |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare("cifar100", 10)
    compare("tiny-imagenet", 5)
