"""Datasets by name or by path, as uint8 tensors.

A known dataset is looked for below the folder that FCIL_DATA names, and else fetched from the Hugging Face hub.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fcil.errors import UserError, unknown
from fcil.scenario import synthetic
from fcil.scenario.images import decoded, resized
from fcil.scenario.reach import within_reach
from fcil.scenario.sources import Source, find, folder_source, is_empty

LICENCES = {
    "digits": "UCI handwritten digits (Alpaydin and Kaynak 1998), CC BY 4.0; the copy of scikit-learn, BSD",
    "cifar100": "CIFAR-100 (Krizhevsky 2009), for research use",
    "tiny-imagenet": "TinyImageNet (Stanford CS231n), under ImageNet's terms: non-commercial research",
    "imagenet-subset": "ImageNet (Deng et al. 2009), under its terms: non-commercial research",
    "synthetic": "made up by fcil, Apache-2.0",
}
OWN = "the user's own"
HUB = {"cifar100": ("uoft-cs/cifar100", "test"), "tiny-imagenet": ("zh-plus/tiny-imagenet", "valid")}
IMAGENET_LAYOUTS = ("imagenet", "imagenet/ILSVRC/Data/CLS-LOC", "ILSVRC/Data/CLS-LOC", "ILSVRC")
HOLDS = "set it to the folder that has a folder for each dataset, such as cifar100"
IMAGENET_CLASSES, IMAGENET_SIZE = 200, 84


@dataclass(frozen=True)
class Dataset:
    """Images and labels of both halves; labels count from 0 in the order of `class_names`."""

    name: str
    train_images: Tensor  # uint8 (N, channels, height, width)
    train_labels: Tensor  # int64 (N,)
    test_images: Tensor
    test_labels: Tensor
    class_names: tuple[str, ...]
    licence: str
    skipped: int  # images that could not be read
    digest: str = ""  # of the user's own images and labels, by which it is known that they have changed
    unread: tuple[str, ...] = ()  # the first of the images that could not be read


def load(name: str, image_size: int = 0) -> Dataset:
    """Return a dataset by its name, or from a path to class folders or parquet files.

    A class without a usable training or test image is an error; a few unreadable images are skipped and counted.
    """
    within_reach(f"the dataset {name}")
    if name == "digits":
        return _digits(image_size)
    if asked := synthetic.size(name):
        return _synthetic(name, *asked, image_size)
    if name == "imagenet-subset":
        return _from_source(name, LICENCES[name], _imagenet_subset(), image_size or IMAGENET_SIZE)
    if name in HUB:
        folder = _known_folder(name)
        shown = folder.name if folder.name.startswith(name) else name
        return _from_source(shown, LICENCES[name], _known_source(name, folder), image_size)
    path = Path(name).expanduser()
    if not name or (os.sep not in name and not path.exists()):
        raise unknown("dataset", name, [*LICENCES, "a path to class folders or parquet files"])
    return _from_source(path.resolve().name, OWN, find(path), image_size)


def require(name: str) -> None:
    """Say in a sentence where a known dataset is not here and cannot be fetched, without reading its images."""
    if name == "imagenet-subset":
        _imagenet_subset()
    elif name in HUB:
        _known_source(name, _known_folder(name))


def _from_source(name: str, licence: str, source: Source, image_size: int) -> Dataset:
    data = decoded(source, image_size)
    names = _in_words(source.where, data.names)
    n = data.train
    return Dataset(
        name, data.images[:n], data.labels[:n], data.images[n:], data.labels[n:], names, licence, data.skipped,
        data.digest() if licence == OWN else "", data.unread,
    )  # fmt: skip


def _in_words(folder: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """Replace synsets by their first word where words.json tells it."""
    try:
        words = json.loads((folder / "words.json").read_text())
        spoken = tuple(str(words.get(name, name)).split(",")[0] for name in names)
    except (OSError, ValueError, AttributeError):
        return names
    return spoken if len(set(spoken)) == len(names) else names


def _digits(image_size: int) -> Dataset:
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)
    if image_size:
        pixels = np.stack([np.asarray(resized(Image.fromarray(image), image_size)) for image in pixels])
    images, labels = torch.from_numpy(pixels)[:, None], torch.from_numpy(data.target.astype(np.int64))
    test = np.zeros(len(labels), dtype=bool)
    for j in range(10):
        mine = np.random.RandomState(j).permutation(np.flatnonzero(data.target == j))
        test[mine[: round(len(mine) / 5)]] = True
    licence, names = LICENCES["digits"], tuple("0123456789")
    return Dataset("digits", images[~test], labels[~test], images[test], labels[test], names, licence, 0)


def _synthetic(name: str, classes: int, train: int, image_size: int) -> Dataset:
    halves = synthetic.images(name, classes, train, image_size)
    pixels = [torch.from_numpy(half).flatten(0, 1) for half in halves]
    labels = [torch.arange(classes).repeat_interleave(half.shape[1]) for half in halves]
    names = tuple(f"pattern {j}" for j in range(classes))
    return Dataset(name, pixels[0], labels[0], pixels[1], labels[1], names, LICENCES["synthetic"], 0)


def _known_folder(name: str) -> Path:
    here = _data_folder()
    if here:
        for folder in (here / name, here / f"{name}-50"):
            if folder.is_dir():
                return folder
        if any(here.glob("*.parquet")):
            raise UserError(f"FCIL_DATA is {here}, which holds images itself; {HOLDS}")
    repo, half = HUB[name]
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo, repo_type="dataset", allow_patterns=["*.parquet"]))
    except Exception as error:  # the hub's client passes on whatever its transport raises
        place = f"into {here / name}" if here else f"into a folder {name} and set FCIL_DATA to the folder that holds it"
        raise UserError(
            f"{name} is not here and the Hugging Face hub does not answer; "
            f"put train*.parquet and {half}*.parquet of its dataset {repo} {place}"
        ) from error


def _known_source(name: str, folder: Path) -> Source:
    """Return what lies in the folder of a known dataset, or say what belongs there if that is nothing."""
    if is_empty(folder):
        repo, half = HUB[name]
        raise UserError(f"{folder} has no images; put train*.parquet and {half}*.parquet of the dataset {repo} into it")
    return find(folder)


def _imagenet_subset() -> Source:
    here = _data_folder()
    roots = [here / layout for layout in IMAGENET_LAYOUTS if (here / layout / "train").is_dir()] if here else []
    if not roots:
        place = f"{here}/imagenet" if here else "FCIL_DATA/imagenet, where FCIL_DATA names a folder of yours"
        raise UserError(
            f"ImageNet is not here, and its terms forbid fetching it; put train/SYNSET/ and val/SYNSET/ into {place}"
        )
    try:
        return folder_source(roots[0], _imagenet_classes)
    except OSError as error:
        raise UserError(f"{roots[0]} cannot be read ({error.strerror}); it must hold train/ and val/") from None


def _imagenet_classes(synsets: list[str]) -> list[str]:
    if len(synsets) < IMAGENET_CLASSES:
        raise UserError(f"imagenet-subset takes {IMAGENET_CLASSES} of ImageNet's classes, but there are {len(synsets)}")
    return [synsets[j] for j in np.random.RandomState(1993).permutation(len(synsets))[:IMAGENET_CLASSES]]


def _data_folder() -> Path | None:
    named = os.environ.get("FCIL_DATA")
    if not named:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise UserError(f"FCIL_DATA is {folder}, {'a file' if folder.exists() else 'which does not exist'}; {HOLDS}")
    return folder
