import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fcil.errors import UserError
from fcil.scenario import datasets, images
from fcil.scenario.datasets import LICENCES, load, require
from fcil.scenario.sources import find

needs_data = pytest.mark.skipif("FCIL_DATA" not in os.environ, reason="FCIL_DATA is not set")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("FCIL_CACHE", str(folder))
    return folder


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.delenv("FCIL_DATA", raising=False)


def encoded(value, size=(16, 16), kind="PNG", mode="RGB"):
    data = io.BytesIO()
    pixels = np.random.RandomState(value).randint(0, 30, (size[1], size[0], 3)).astype(np.uint8) + value % 200
    Image.fromarray(pixels).convert(mode).save(data, kind)
    return data.getvalue()


def write_folder(root, classes=3, count=10, size=(16, 16)):
    for j in range(classes):
        for i in range(count):
            file = root / f"class{j}" / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded(40 * j + i, size))
    return root


def write_parquet(file, classes=3, count=10, columns=("image", "label"), names=None, labels=None, data=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    data = [encoded(40 * j + i) for i in range(count) for j in range(classes)] if data is None else data
    labels = [j for _ in range(count) for j in range(classes)] if labels is None else labels
    table = pa.table({columns[0]: [{"bytes": x, "path": None} for x in data], columns[1]: labels})
    if names:
        about = {"info": {"features": {columns[1]: {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    pq.write_table(table, file, row_group_size=7)
    return file


def same(one, two):
    pairs = ((one.train_images, two.train_images), (one.train_labels, two.train_labels))
    pairs += ((one.test_images, two.test_images), (one.test_labels, two.test_labels))
    return one.class_names == two.class_names and all(torch.equal(a, b) for a, b in pairs)


def test_digits():
    data = load("digits")
    assert data.train_images.shape == (1438, 1, 8, 8) and data.test_images.shape == (359, 1, 8, 8)
    assert data.train_images.dtype == torch.uint8 and data.train_labels.dtype == torch.int64
    assert data.train_images.max() == 255 and data.train_images.min() == 0
    assert data.test_labels.bincount().tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert data.licence == LICENCES["digits"] and data.class_names == tuple("0123456789")
    assert same(data, load("digits"))
    assert load("digits", 16).train_images.shape == (1438, 1, 16, 16)


def test_a_folder_holds_out_a_fifth(tmp_path):
    data = load(str(write_folder(tmp_path / "own")))
    assert data.name == "own" and data.class_names == ("class0", "class1", "class2") and data.skipped == 0
    assert data.train_images.shape == (24, 3, 16, 16)
    assert data.train_labels.bincount().tolist() == [8, 8, 8] and data.test_labels.bincount().tolist() == [2, 2, 2]
    everything = {tuple(x.flatten().tolist()) for x in torch.cat([data.train_images, data.test_images])}
    expected = [np.asarray(Image.open(f)).transpose(2, 0, 1) for f in (tmp_path / "own").rglob("*.png")]
    assert everything == {tuple(x.flatten().tolist()) for x in expected}


def test_what_is_held_out_follows_the_path_below_the_folder(tmp_path):
    one, two = (load(str(write_folder(tmp_path / name))) for name in ("a", "b"))
    assert same(one, two)


def test_a_folder_with_halves(tmp_path):
    write_folder(tmp_path / "own" / "train", count=4)
    write_folder(tmp_path / "own" / "val", count=3)
    data = load(str(tmp_path / "own"))
    assert data.train_labels.bincount().tolist() == [4, 4, 4] and data.test_labels.bincount().tolist() == [3, 3, 3]


@pytest.mark.parametrize("half", ["test", "val", "valid", "validation"])
def test_a_test_set_beside_the_classes(tmp_path, half):
    write_folder(tmp_path / "own", count=4)
    write_folder(tmp_path / "own" / half, count=3)
    data = load(str(tmp_path / "own"))
    assert data.class_names == ("class0", "class1", "class2")
    assert data.train_labels.bincount().tolist() == [4, 4, 4] and data.test_labels.bincount().tolist() == [3, 3, 3]


def test_of_two_test_sets_beside_the_classes_neither_is_a_class(tmp_path):
    for name, count in (("own", 4), ("own/test", 3), ("own/val", 2)):
        write_folder(tmp_path / name, count=count)
    data = load(str(tmp_path / "own"))
    assert data.class_names == ("class0", "class1", "class2") and data.test_labels.bincount().tolist() == [3, 3, 3]


def test_what_is_either_a_test_set_or_a_class_is_refused(tmp_path):
    write_folder(tmp_path / "own")
    (tmp_path / "own" / "test" / "other").mkdir(parents=True)
    (tmp_path / "own" / "test" / "other" / "0.png").write_bytes(encoded(1))
    said = "own/test holds folders .other. .* put the training images under .*own/train, and if it is a class"
    with pytest.raises(UserError, match=said):
        load(str(tmp_path / "own"))
    (tmp_path / "own" / "test" / "other").rename(tmp_path / "own" / "test" / "class1")
    with pytest.raises(UserError, match="class 'class0' in .* has no test image"):
        load(str(tmp_path / "own"))


def test_a_class_may_be_called_test(tmp_path):
    write_folder(tmp_path / "own")
    (tmp_path / "own" / "class0").rename(tmp_path / "own" / "test")
    assert load(str(tmp_path / "own")).class_names == ("class1", "class2", "test")


def test_a_class_may_be_called_train(tmp_path):
    write_folder(tmp_path / "own")
    (tmp_path / "own" / "class0").rename(tmp_path / "own" / "train")
    assert load(str(tmp_path / "own")).class_names == ("class1", "class2", "train")
    write_folder(tmp_path / "one" / "train")
    assert load(str(tmp_path / "one")).class_names == ("class0", "class1", "class2")


def test_other_files_and_hidden_ones_are_ignored(tmp_path):
    root = write_folder(tmp_path / "own")
    (root / "README.txt").write_text("mine")
    (root / "class0" / "notes.txt").write_text("mine")
    (root / "class0" / ".hidden.png").write_bytes(b"no image")
    (root / ".git").mkdir()
    (root / ".git" / "x.png").write_bytes(encoded(1))
    (root / "empty").mkdir()
    (root / "class1" / "deeper").mkdir()
    (root / "class1" / "deeper" / "more.PNG").write_bytes(encoded(1))
    data = load(str(root))
    assert data.class_names == ("class0", "class1", "class2") and data.skipped == 0
    assert len(data.train_labels) + len(data.test_labels) == 31


@pytest.mark.parametrize(
    ("size", "asked", "expected"),
    [
        ((16, 16), 0, 16),
        ((96, 96), 0, 96),
        ((97, 97), 0, 64),
        ((40, 30), 0, 64),
        ((16, 16), 8, 8),
        ((300, 200), 84, 84),
    ],
)
def test_sizes(tmp_path, size, asked, expected):
    data = load(str(write_folder(tmp_path / "own", classes=2, count=3, size=size)), asked)
    assert data.train_images.shape[1:] == (3, expected, expected)


def test_unlike_sizes_are_made_alike(tmp_path):
    root = write_folder(tmp_path / "own")
    (root / "class2" / "large.png").write_bytes(encoded(3, (20, 30)))
    data = load(str(root))
    assert data.train_images.shape[1:] == (3, 64, 64)
    assert len(data.train_labels) + len(data.test_labels) == 31


def test_the_centre_is_kept(tmp_path):
    for j in range(2):
        (tmp_path / "own" / str(j)).mkdir(parents=True)
        for i in range(2):
            pixels = np.zeros((50, 150, 3), dtype=np.uint8)
            pixels[:, 50:100] = 200
            Image.fromarray(pixels).save(tmp_path / "own" / str(j) / f"{i}.png")
    assert (load(str(tmp_path / "own"), 50).train_images == 200).all()


def test_kinds_of_images(tmp_path):
    root = tmp_path / "own"
    for j in range(2):
        (root / str(j)).mkdir(parents=True)
        for name, kind, mode in (
            ("grey.png", "PNG", "L"),
            ("palette.gif", "GIF", "P"),
            ("see-through.png", "PNG", "RGBA"),
            ("photo.jpg", "JPEG", "RGB"),
            ("cmyk.jpeg", "JPEG", "CMYK"),
        ):
            (root / str(j) / name).write_bytes(encoded(100, kind=kind, mode=mode))
        deep = Image.fromarray(np.full((16, 16), 115 * 256, dtype=np.uint16))
        deep.save(root / str(j) / "deep.png")
    data = load(str(root))
    assert data.skipped == 0 and data.train_images.shape[1:] == (3, 16, 16)
    both = torch.cat([data.train_images, data.test_images]).float()
    assert ((both.mean((1, 2, 3)) - 115).abs() < 12).all()


def test_photos_are_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[:32] = 255
    for j in range(2):
        (tmp_path / "own" / str(j)).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(pixels).save(tmp_path / "own" / str(j) / f"{i}.jpg", exif=exif)
    image = load(str(tmp_path / "own")).train_images[0].float()
    assert image[:, :, 40:].mean() > 250 and image[:, :, :24].mean() < 5


def test_damaged_images_are_skipped_and_counted(tmp_path):
    root = write_folder(tmp_path / "own")
    (root / "class0" / "torn.png").write_bytes(encoded(5)[:60])
    (root / "class1" / "empty.jpg").write_bytes(b"")
    (root / "class1" / "link.jpg").symlink_to(tmp_path / "nowhere.jpg")
    data = load(str(root))
    assert data.skipped == 3 and len(data.train_labels) + len(data.test_labels) == 30
    assert load(str(root)).skipped == 3


@pytest.mark.parametrize(
    "names", [("train-0.parquet", "test-0.parquet"), ("data/train-0.parquet", "data/valid-0.parquet")]
)
def test_parquet_with_halves(tmp_path, names):
    words = ["ant", "bee", "cow"]
    for name, count in zip(names, (5, 2), strict=True):
        write_parquet(tmp_path / "own" / name, count=count, columns=("img", "fine_label"), names=words)
    data = load(str(tmp_path / "own"))
    assert data.class_names == ("ant", "bee", "cow")
    assert data.train_labels.tolist() == [0, 1, 2] * 5 and data.test_labels.tolist() == [0, 1, 2] * 2
    expected = np.asarray(Image.open(io.BytesIO(encoded(41)))).transpose(2, 0, 1)
    assert np.array_equal(data.train_images[4].numpy(), expected)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ("train-00000-of-00002", "test-00000-of-00001"),
            "only 1 of the 2 files train.*; put train-00001-of-00002.parq",
        ),
        (("data/train-00000-of-00001", "data/test-00003-of-00004"), "put test-00000-of-00004.parquet and 2 more into"),
        (("part-1-of-3", "part-3-of-3"), "only 2 of the 3 .*; put part-2-of-3.parquet into"),
        (("train-00001-of-00002-a1b2", "test"), "put train-00000-of-00002.parquet into"),
    ],
)
def test_files_that_names_promise_must_be_there(tmp_path, names, said):
    for name in names:
        write_parquet(tmp_path / "own" / f"{name}.parquet")
    with pytest.raises(UserError, match=said):
        load(str(tmp_path / "own"))
    if "of" in names[1]:
        assert len(load(str(tmp_path / "own" / f"{names[1]}.parquet")).class_names) == 3  # by itself, if one says so


def test_all_files_that_names_promise(tmp_path):
    for name in ("train-00000-of-00002", "train-00001-of-00002-a1b2", "test-00000-of-00001", "validation-0-of-9"):
        write_parquet(tmp_path / "own" / f"{name}.parquet")  # the last one is used for nothing
    data = load(str(tmp_path / "own"))
    assert len(data.train_labels) == 60 and len(data.test_labels) == 30


def test_one_parquet_file_holds_out_a_fifth(tmp_path):
    data = load(str(write_parquet(tmp_path / "own.parquet")))
    assert data.class_names == ("0", "1", "2")
    assert data.train_labels.bincount().tolist() == [8, 8, 8] and data.test_labels.bincount().tolist() == [2, 2, 2]


def test_parquet_labels(tmp_path):
    texts = write_parquet(tmp_path / "texts.parquet", labels=["cow", "ant", "bee"] * 10)
    assert load(str(texts)).class_names == ("ant", "bee", "cow")
    sparse = write_parquet(tmp_path / "sparse.parquet", labels=[10, 2, None] * 10)
    data = load(str(sparse))
    assert data.class_names == ("2", "10") and data.skipped == 10
    few = write_parquet(tmp_path / "few.parquet", classes=2, names=["a", "b", "unused"])
    assert load(str(few)).class_names == ("a", "b")
    floats = write_parquet(tmp_path / "floats.parquet", labels=[0.5, 1.5, 2.5] * 10)
    with pytest.raises(UserError, match="'label' of .*floats.parquet holds double; labels are whole numbers or text"):
        load(str(floats))


def test_plain_bytes_in_parquet(tmp_path):
    table = pa.table({"image": [encoded(i) for i in range(8)], "label": [0, 1] * 4})
    pq.write_table(table, tmp_path / "own.parquet")
    assert load(str(tmp_path / "own.parquet")).train_images.shape == (6, 3, 16, 16)
    pq.write_table(pa.table({"image": [1, 2], "label": [0, 1]}), tmp_path / "wrong.parquet")
    with pytest.raises(UserError, match="'image' of .* holds int64; images are bytes"):
        load(str(tmp_path / "wrong.parquet"))


def test_words_for_synsets(tmp_path):
    write_parquet(tmp_path / "own" / "train.parquet", names=["n1", "n2", "n3"])
    (tmp_path / "own" / "words.json").write_text(json.dumps({"n1": "goldfish, Carassius", "n2": "frog"}))
    assert load(str(tmp_path / "own")).class_names == ("goldfish", "frog", "n3")
    (tmp_path / "own" / "words.json").write_text("no json")
    assert load(str(tmp_path / "own")).class_names == ("n1", "n2", "n3")


def test_wrong_paths(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist; data may be a folder of class folders, a parquet"):
        load(str(tmp_path / "nowhere"))
    (tmp_path / "data.zip").write_bytes(b"PK")
    with pytest.raises(UserError, match="data.zip is another kind of file"):
        load(str(tmp_path / "data.zip"))
    for name in ("cifr100", ""):
        with pytest.raises(UserError, match=f"there is no dataset '{name}'; .*allowed: digits, cifar100"):
            load(name)


def test_folders_without_classes(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no class folders"):
        load(str(tmp_path / "empty"))
    (tmp_path / "bare" / "a").mkdir(parents=True)
    with pytest.raises(UserError, match="bare has no images"):
        load(str(tmp_path / "bare"))
    with pytest.raises(UserError, match="one has one class only; there must be at least two"):
        load(str(write_folder(tmp_path / "one", classes=1)))
    with pytest.raises(UserError, match="has one class only"):
        load(str(write_parquet(tmp_path / "one.parquet", classes=1)))


def test_unreadable_folders(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "own")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"own cannot be read \(Permission denied\)"):
        load(str(root))


def test_wrong_parquet_files(tmp_path):
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UserError, match="torn.parquet is not a readable parquet file"):
        load(str(tmp_path / "torn.parquet"))
    whole = write_parquet(tmp_path / "damaged.parquet").read_bytes()
    (tmp_path / "damaged.parquet").write_bytes(whole[:200] + bytes(2000) + whole[2200:])
    with pytest.raises(UserError, match="damaged.parquet|none of the|no training image|no test image"):
        load(str(tmp_path / "damaged.parquet"))
    write_parquet(tmp_path / "other.parquet", columns=("picture", "label"))
    with pytest.raises(UserError, match="needs a column img or image and .* it has picture, label"):
        load(str(tmp_path / "other.parquet"))
    write_parquet(tmp_path / "halves" / "test-0.parquet")
    write_parquet(tmp_path / "halves" / "test-1.parquet")
    with pytest.raises(UserError, match="no file named train.*it has test-0.parquet, test-1.parquet"):
        load(str(tmp_path / "halves"))


def test_classes_without_usable_images(tmp_path):
    root = write_folder(tmp_path / "bad", classes=2, count=2)
    for file in root.rglob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(UserError, match="none of the 4 images in .*bad can be read"):
        load(str(root))
    root = write_folder(tmp_path / "single")
    (root / "lonely").mkdir()
    (root / "lonely" / "0.png").write_bytes(encoded(1))
    needs = "that can be read, and needs two: one for training, one held out for testing; add images or remove"
    with pytest.raises(UserError, match=f"class 'lonely' in .* has only one image {needs}"):
        load(str(root))
    (root / "lonely" / "0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=f"class 'lonely' in .* has no image {needs}"):
        load(str(root))
    root = tmp_path / "halves"
    write_folder(root / "train")
    write_folder(root / "test", classes=2)
    with pytest.raises(UserError, match="class 'class2' in .* has no test image"):
        load(str(root))


def test_the_second_time_comes_from_the_cache(tmp_path, cache, monkeypatch):
    root = write_folder(tmp_path / "own")
    first = load(str(root))
    assert [f.suffix for f in cache.iterdir()] == [".safetensors"]
    with monkeypatch.context() as patch:
        patch.setattr(images, "pixels_of", None)  # decoding would fail
        assert same(first, load(str(root)))
    load(str(root), 8)
    assert len(list(cache.iterdir())) == 2


def test_changed_files_are_decoded_anew(tmp_path):
    root = write_folder(tmp_path / "own")
    first = load(str(root))
    changed = root / "class0" / "0.png"
    changed.write_bytes(encoded(199))
    os.utime(changed, ns=(1, 1))
    assert not same(first, load(str(root)))
    (root / "class0" / "new.png").write_bytes(encoded(7))
    assert len(load(str(root)).train_labels) == 25


def test_ones_own_images_have_a_digest(tmp_path, cache):
    root = write_folder(tmp_path / "own")
    first = load(str(root)).digest
    assert first and load("digits").digest == load("synthetic-2x4").digest == ""
    os.utime(root / "class0" / "0.png", ns=(1, 1))
    assert load(str(root)).digest == first  # the same images, read anew
    assert load(str(write_folder(tmp_path / "copy"))).digest == first
    seen = {first, load(str(root), 8).digest}
    (root / "class0" / "new.png").write_bytes(encoded(7))
    seen.add(load(str(root)).digest)
    (root / "class0" / "new.png").rename(root / "class1" / "new.png")
    seen.add(load(str(root)).digest)
    (root / "class1" / "new.png").unlink()
    (root / "class0").rename(root / "class00")
    seen.add(load(str(root)).digest)
    assert len(seen) == 5


def test_a_digest_is_that_of_what_was_kept(tmp_path):
    kept = images.decoded(find(write_folder(tmp_path / "own")))
    assert kept.known == replace(kept, known="").digest()  # as from a cache that is older than digests


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "foreign"])
def test_a_damaged_cache_is_rebuilt(tmp_path, cache, damage):
    root = write_folder(tmp_path / "own")
    first = load(str(root))
    kept = next(cache.iterdir())
    whole = kept.read_bytes()
    other = json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    kept.unlink()  # `first` still has it mapped
    foreign = len(other).to_bytes(8, "little") + other + b"1"
    kept.write_bytes(
        {"cut": whole[: len(whole) // 2], "empty": b"", "garbage": os.urandom(500), "foreign": foreign}[damage]
    )
    assert same(first, load(str(root)))
    assert kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    root = write_folder(tmp_path / "own")
    first = load(str(root))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FCIL_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(images.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    assert same(first, load(str(root)))
    assert list((tmp_path / "temporary").iterdir()) == []
    monkeypatch.setattr(images.tempfile, "gettempdir", lambda: str(tmp_path / "file" / "other"))
    with pytest.raises(UserError, match="neither .* nor .* has room for the images"):
        load(str(root))


def test_an_interrupted_decoding_leaves_nothing(tmp_path, cache, monkeypatch):
    root = write_folder(tmp_path / "own")
    with monkeypatch.context() as patch:
        patch.setattr(images, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load(str(root))
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("no_data")
def test_offline_says_what_to_put_where(tmp_path, monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(UserError, match=r"does not answer; put train\*.parquet and test\*.parquet of .*FCIL_DATA"):
        load("cifar100")
    monkeypatch.setenv("FCIL_DATA", str(tmp_path))
    with pytest.raises(UserError, match=rf"valid\*.parquet of .*zh-plus/tiny-imagenet into {tmp_path}/tiny-imagenet$"):
        load("tiny-imagenet")
    (tmp_path / "cifar100" / "empty").mkdir(parents=True)
    for named in (load, require):
        with pytest.raises(
            UserError, match=r"cifar100 has no images; put train\*.parquet and test\*.parquet of the data"
        ):
            named("cifar100")


def test_another_folder_than_that_of_all_datasets_is_told(tmp_path, monkeypatch):
    write_parquet(tmp_path / "cifar100" / "train-0.parquet")
    (tmp_path / "file").touch()
    wrong = {"nowhere": "does not exist", "file": "a file", "cifar100": "holds images itself"}
    for folder, said in wrong.items():
        monkeypatch.setenv("FCIL_DATA", str(tmp_path / folder))
        with pytest.raises(UserError, match=f"{folder}.*{said}; set it to the folder that has a folder for each"):
            load("cifar100")


@pytest.mark.usefixtures("no_data")
def test_known_datasets_are_looked_for_and_fetched(tmp_path, monkeypatch):
    hub = tmp_path / "snapshot"
    for half in ("train", "test"):
        write_parquet(hub / "cifar100" / f"{half}-00000.parquet", columns=("img", "fine_label"), names=["a", "b", "c"])
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(hub))
    data = load("cifar100")
    assert data.name == "cifar100" and data.licence == LICENCES["cifar100"] and len(data.test_labels) == 30
    for half in ("train", "valid"):
        write_parquet(tmp_path / "data" / "tiny-imagenet-50" / f"{half}.parquet")
    monkeypatch.setenv("FCIL_DATA", str(tmp_path / "data"))
    assert load("tiny-imagenet").name == "tiny-imagenet-50"
    for half in ("train", "valid"):
        write_parquet(tmp_path / "data" / "tiny-imagenet" / f"{half}.parquet", classes=4)
    assert load("tiny-imagenet").name == "tiny-imagenet" and len(load("tiny-imagenet").class_names) == 4


@pytest.mark.parametrize("layout", ["imagenet", "ILSVRC/Data/CLS-LOC"])
def test_imagenet_subset(tmp_path, monkeypatch, layout):
    monkeypatch.setenv("FCIL_DATA", str(tmp_path))
    with pytest.raises(UserError, match="ImageNet is not here"):
        load("imagenet-subset")
    monkeypatch.setattr(datasets, "IMAGENET_CLASSES", 5)
    for half, count in (("train", 2), ("val", 1)):
        write_folder(tmp_path / layout / half, classes=8, count=count, size=(100, 90))
    data = load("imagenet-subset")
    assert data.class_names == tuple(f"class{j}" for j in np.random.RandomState(1993).permutation(8)[:5])
    assert data.train_images.shape == (10, 3, 84, 84) and data.test_images.shape == (5, 3, 84, 84)
    monkeypatch.setattr(datasets, "IMAGENET_CLASSES", 200)
    with pytest.raises(UserError, match="takes 200 of ImageNet's classes, but there are 8"):
        load("imagenet-subset")


LOAD_CIFAR = """
import sys
from pathlib import Path
from PIL import Image
from fcil.scenario.datasets import load
if sys.argv[1] == "again":
    Image.open = None  # nothing is decoded a second time
data = load("cifar100")
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(peak, data.train_labels.sum().item())
"""


@pytest.mark.data
@needs_data
def test_cifar_is_light_at_first_and_decoded_once():
    def run(which):
        done = subprocess.run([sys.executable, "-c", LOAD_CIFAR, which], capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    first, again = run("first"), run("again")
    assert first[0] < 1024 * 1024  # KiB; measured: 0.6 GiB, of which 0.2 are torch
    assert first[1] == again[1] == 500 * sum(range(100))
    data = load("cifar100")
    assert data.train_images.shape == (50_000, 3, 32, 32) and data.test_images.shape == (10_000, 3, 32, 32)
    assert data.class_names[68] == "road" and data.test_labels.bincount().tolist() == [100] * 100
    means = data.train_images.double().mean((0, 2, 3)) / 255
    assert torch.allclose(means, torch.tensor([0.5071, 0.4867, 0.4408], dtype=torch.float64), atol=5e-4)
