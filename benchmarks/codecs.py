"""How near decoded images are to the real ones, by codec and bytes, on classes that the codec never saw.

`FCIL_DATA=... python benchmarks/codecs.py` fits each codec on the training images of the first ten classes of CIFAR-100
(order 1993), or the first five of TinyImageNet, and prints the peak signal-to-noise ratio on the first 4,000 test
images of all other classes, with WebP beside it and the milliseconds an image takes on one core.
"""

import io
import time

import numpy as np
import torch
from PIL import Image

from fcil.blocks.codec import TransformCodec, build
from fcil.scenario.datasets import load

SIZES = (32, 64, 128, 154, 205, 256, 307, 410, 512, 614)
QUALITIES = (5, 20, 40, 60, 70, 80)


def psnr(images: torch.Tensor, decoded: torch.Tensor) -> float:
    """Return 10 log10 of 255^2 over the mean squared error, in dB."""
    return float(10 * torch.log10(255**2 / (images.double() - decoded.double()).square().mean()))


def webp(images: torch.Tensor, quality: int) -> tuple[float, torch.Tensor]:
    """Return the mean bytes of a WebP file, headers counted, and the images it gives back."""
    total, back = 0, []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "webp", quality=quality, method=6)
        total += file.tell()
        back.append(torch.from_numpy(np.array(Image.open(file).convert("RGB"))).permute(2, 0, 1))
    return total / len(images), torch.stack(back)


def compare(dataset: str, first: int) -> None:
    """Print a table for one dataset."""
    data = load(dataset)
    order = np.random.RandomState(1993).permutation(len(data.class_names))
    seen = torch.tensor(order[:first].copy())
    fit = data.train_images[torch.isin(data.train_labels, seen)]
    test = data.test_images[~torch.isin(data.test_labels, seen)][:4000]
    shape = tuple(test.shape[1:])
    print(f"\n{dataset}, fitted on {len(fit):,} images of {first} classes, {len(test):,} test images of others\n")
    print("| codec | bytes | PSNR, dB | ms to encode | ms to decode |\n| --- | ---: | ---: | ---: | ---: |")
    scale = test[0].numel() / 3072
    for kind in ("klt", "dct"):
        codec = build(kind, shape)
        assert isinstance(codec, TransformCodec)
        sums = codec.statistics(fit)
        for size in SIZES:
            codec = build(kind, shape, round(size * scale))
            fitted = codec.fitted(sums)
            start = time.perf_counter()
            codes = codec.encode(fitted, test)
            middle = time.perf_counter()
            decoded = codec.decode(fitted, codes)
            each = [1000 * t / len(test) for t in (middle - start, time.perf_counter() - middle)]
            print(f"| {kind} | {codec.size:,} | {psnr(test, decoded):.2f} | {each[0]:.2f} | {each[1]:.2f} |", flush=True)
    for quality in QUALITIES:
        size, decoded = webp(test[:1000], quality)
        print(f"| WebP, quality {quality}, 1,000 images | {size:.0f} | {psnr(test[:1000], decoded):.2f} | | |", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare("cifar100", 10)
    compare("tiny-imagenet", 5)
