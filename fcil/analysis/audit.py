"""An audit of a finished run: what its model, its clients' memories and their messages tell of training images.

Whatever the method, the same is measured: whether one can tell that an image was trained on, and how near the pictures
that the run leaves come to images. Beside them stand raw images, WebP files and latent codes of several sizes, made of
the same images; and what all of it weighs.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcil.analysis.exposure import Pairs, kept, made, sent
from fcil.analysis.memory import exemplars_of, memory_report
from fcil.analysis.privacy import Auc, Nearest, auc, losses, margins, matched, nearest, psnr, ssim
from fcil.blocks.codec import Codec, RawCodec, TransformCodec, WebpCodec
from fcil.errors import UserError
from fcil.experiment import restored
from fcil.files import write_text
from fcil.parts import Parts
from fcil.records import Weights
from fcil.results.runs import read_result
from fcil.seeds import seed_of

FORMAT = 1
SHARES = (96, 48, 24, 15, 10, 5)  # of an image, one over: latent codes that are tried, 32 to 614 bytes of CIFAR's 3,072
WEBP_SHARE = 10.24  # likewise: 300 bytes
MOST_MEMBERS = 5000  # training and test images whose membership is asked
Found = dict[str, Any]


@dataclass(frozen=True)
class Images:
    """The images of a run, and how near test images come to a training image: as new images do."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    usual: Nearest


@dataclass(frozen=True)
class Pictures:
    """What an audit shows."""

    kept: Pairs  # where nothing is kept, training images themselves
    tried: dict[str, Tensor]  # the sources of those, as other codecs give them back
    sent: dict[str, Pairs]
    made: Tensor
    nearest: Tensor  # the training image nearest to each of `made`


def audit(folder: Path, device: str = "auto", most: int = 500) -> tuple[Found, Pictures]:
    """Measure what a finished run tells of its training images; look at `most` exemplars, and as many made-up ones."""
    result = read_result(folder) if (folder / "result.json").exists() else {}
    _, parts = restored(folder, device)
    try:
        message = parts.engine.receive(parts.server.broadcast())
        images = _images(parts, most)
        exemplars, heard = kept(parts, message, most, str(result.get("device", "cpu"))), sent(parts, message)
        invented = made(parts, message, most)
        samples = exemplars if len(exemplars.labels) else _samples(images, most)
        tried = {name: (codec, fitted) for name, codec, fitted in _codecs(parts, images)}
        shown = {n: codec.decode(fitted, codec.encode(fitted, samples.sources)) for n, (codec, fitted) in tried.items()}
        found = {
            "format": FORMAT,
            **{key: result.get(key) for key in ("method", "benchmark", "protocol", "seed", "settings", "command")},
            "classes": [parts.scenario.class_names[j] for j in parts.scenario.tasks[-1].seen],
            "images": {"train": len(images.train), "test": len(images.test)},
            "membership": membership(parts, message, images, exemplars, invented),
            "kept": likeness(exemplars, images, _bytes_each(parts)),
            "sent": {name: likeness(some, images) for name, some in _by_size(heard)},
            "made": copying(invented, images),
            "tried": {
                name: likeness(samples._replace(pictures=shown[name]), images, codec.size)
                for name, (codec, _) in tried.items()
            },
            "memory": {
                "budget": parts.scenario.budget.per_client,
                **memory_report(
                    parts.transport.memories, message, len(parts.scenario.tasks[-1].seen), parts.scenario.schedule.total
                ),
            },
        }  # fmt: skip
    finally:
        parts.transport.close()
    near = images.train[nearest(invented, images.train).row] if len(invented) else invented
    return found, Pictures(samples, shown, heard, invented, near)


def save(found: Found, folder: Path) -> Path:
    """Write an audit into its run folder."""
    path = folder / "audit.json"
    try:
        write_text(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None
    return path


# -- what is measured -------------------------------------------------------------------------------------------------


def membership(parts: Parts, message: Any, images: Images, exemplars: Pairs, invented: Tensor) -> list[Found]:
    """Ask of training images against test images whether they were trained on, and of exemplars' sources."""
    seen = sorted(parts.scenario.tasks[-1].seen)
    outside, outside_labels = _drawn(images.test, images.test_labels, "outside")
    found = []
    for whose, own, labels in (
        ("all training images", *_drawn(images.train, images.train_labels, "inside")),
        ("sources of exemplars", exemplars.sources, exemplars.labels),
    ):
        if not len(own):
            continue
        both, every = torch.cat([own, outside]), torch.cat([labels, outside_labels])
        scores, weights = parts.engine.scores(message, both)[:, seen], matched(labels.cpu(), outside_labels.cpu())
        place = torch.searchsorted(torch.tensor(seen, device=every.device), every)
        attacks = {"loss": -losses(scores, place), "margin": margins(scores, place)}
        attacks |= {
            f"distance to what is {name}": -nearest(both, pictures).distance
            for name, pictures in (("kept", exemplars.pictures), ("made up", invented)) if len(pictures)
        }  # fmt: skip
        for attack, score in attacks.items():
            measured = auc(score[: len(own)], score[len(own) :], weights)
            found.append({"images": whose, "attack": attack, **_rounded(measured)})
    return found


def likeness(pairs: Pairs, images: Images, size: int | None = None) -> Found | None:
    """Say how near pictures come to the images that they came from; medians, as some may be equal to them."""
    if not len(pairs.labels):
        return None
    ratio, alike = psnr(pairs.pictures, pairs.sources), ssim(pairs.pictures, pairs.sources)
    near = nearest(pairs.pictures, images.train, pairs.sources)
    middle = float(ratio.median())
    return {
        "bytes": size,
        "pictures": len(pairs.labels),
        "images_in_each": round(float(pairs.sizes.double().mean()), 1),
        "identical": _share(ratio.isinf()),
        "psnr": round(middle, 2) if math.isfinite(middle) else None,  # none where most are identical
        "ssim": round(float(alike.median()), 4),
        "source_is_nearest": _share(near.rank == 1),
        "rank": int(near.rank.median()),
        **_copying(near, images),
    }


def copying(pictures: Tensor, images: Images) -> Found | None:
    """Say how near pictures come to some training image, beside how near test images come."""
    return {"pictures": len(pictures), **_copying(nearest(pictures, images.train), images)} if len(pictures) else None


def _copying(near: Nearest, images: Images) -> Found:
    return {
        "distance": round(float(near.distance.median()), 2),
        "distance_of_test_images": round(float(images.usual.distance.median()), 2),
        "stands_out": _rounded(auc(-near.relative, -images.usual.relative)),
    }


# -- of what ----------------------------------------------------------------------------------------------------------


def _images(parts: Parts, most: int) -> Images:
    train, labels = parts.scenario.trained()
    tests = [parts.scenario.test(task) for task in parts.scenario.tasks]
    test, test_labels = (torch.cat(both) for both in zip(*tests, strict=True))
    return Images(train, labels, test, test_labels, nearest(test[_order(test, "usual")[:most]], train))


def _codecs(parts: Parts, images: Images) -> Iterator[tuple[str, Codec, Weights]]:
    """Return raw images, WebP and latent codes; these fitted to the first task's images, as a federation would."""
    shape = parts.scenario.shape
    numbers, first = math.prod(shape), torch.tensor(parts.scenario.tasks[0].new, device=images.train.device)
    yield "raw", RawCodec(shape), {}
    if shape[0] in (1, 3):
        size = max(WebpCodec.least, round(numbers / WEBP_SHARE))
        yield f"webp:{size}", WebpCodec(shape, size), {}
    early = images.train[torch.isin(images.train_labels, first)]
    sums = TransformCodec(shape, 1).statistics(early) if len(early) else None
    for size in sorted({max(1, round(numbers / share)) for share in SHARES}):
        codec = TransformCodec(shape, size)
        yield f"klt:{size}", codec, {name: part.to(early.device) for name, part in codec.fitted(sums).items()}


def _samples(images: Images, most: int) -> Pairs:
    """Return training images as if they were kept."""
    some = _order(images.train, "samples")[:most]
    rows = images.train[some]
    return Pairs(rows, rows, images.train_labels[some], torch.ones_like(some))


def _by_size(heard: dict[str, Pairs]) -> Iterator[tuple[str, Pairs]]:
    """Tell messages about one image from those about several."""
    for name, pairs in heard.items():
        for what, chosen in (("of one image", pairs.sizes == 1), ("of several", pairs.sizes > 1)):
            if chosen.any():
                yield f"{name} {what}", pairs.where(chosen)


def _drawn(images: Tensor, labels: Tensor, name: str) -> tuple[Tensor, Tensor]:
    some = _order(images, name)[:MOST_MEMBERS]
    return images[some], labels[some]


def _order(images: Tensor, name: str) -> Tensor:
    return torch.randperm(len(images), generator=torch.Generator().manual_seed(seed_of(name))).to(images.device)


def _bytes_each(parts: Parts) -> int | None:
    """Return the bytes of an exemplar as it is kept; all are alike."""
    rows = (own[0] for memory in parts.transport.memories.values() for own in exemplars_of(memory).values() if len(own))
    return next((row.numel() * row.element_size() for row in rows), None)


def _share(chosen: Tensor) -> float:
    return round(float(chosen.double().mean()), 4)


def _rounded(measured: Auc) -> Found:
    return {n: round(v, 4) if isinstance(v, float) else v for n, v in measured._asdict().items()}
