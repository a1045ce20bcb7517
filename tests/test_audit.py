"""`fcil audit`: all methods are measured alike, exemplars stand beside their true sources, wrong folders are named."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from fcil.analysis import exposure
from fcil.analysis.audit import Found, Pictures, audit
from fcil.analysis.memory import exemplars_of, memory_report, weighed
from fcil.analysis.privacy import nearest
from fcil.blocks import inversion
from fcil.blocks.codec import TransformCodec
from fcil.blocks.training import loaded
from fcil.errors import UserError
from fcil.experiment import execute, restored
from fcil.federation.engine import threads
from fcil.methods import METHODS
from fcil.methods.hr_literal import Memory as LiteralMemory
from fcil.records import ByClass, Nothing, Weights, record, size_in_bytes
from fcil.scenario.datasets import load
from tests.conftest import FILES, TINY, tiny_plan
from tests.typed import done, fingerprint, typed

RAW = ("icarl", "bic", "podnet", "dde", "geodl", "ssil", "glfc", "joint")
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return the folder of a tiny run, made when first asked for."""
    root, known = tmp_path_factory.mktemp("runs"), dict[str, Path]()

    def run(method: str, **settings: object) -> Path:
        name = f"{method}{sorted(settings.items())}"
        if name not in known:
            known[name] = root / str(len(known))
            for _ in execute(tiny_plan(method, **settings), known[name], "cpu", workers=1):
                pass
        return known[name]

    return run


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with threads(1):
        yield


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches for images by their features be short."""
    monkeypatch.setattr(inversion, "STEPS", 2)


def audited(folder: Path, most: int = 40) -> tuple[Found, Pictures]:
    return audit(folder, "cpu", most)


# -- every method -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", FILES)
def test_every_method_is_measured(made: Made, briefly: None, method: str) -> None:
    short = {"inversion_steps": 3} if method == "glfc" else {}
    found, pictures = audited(made(method, **short))
    json.dumps(found, allow_nan=False)
    told = {(row["images"], row["attack"]): row for row in found["membership"]}
    for row in told.values():
        assert 0 <= row["low"] <= row["value"] <= row["high"] <= 1
    assert {("all training images", "loss"), ("all training images", "margin")} <= set(told)
    keeps = METHODS[method].keeps != "nothing"
    assert (found["kept"] is not None) == keeps == (("sources of exemplars", "loss") in told)
    if method in RAW:
        assert found["kept"]["identical"] == found["kept"]["source_is_nearest"] == 1
        assert told["sources of exemplars", "distance to what is kept"]["value"] > 0.9
    if METHODS[method].family == "data-free" and method != "fedspace":
        assert not keeps and found["made"]["pictures"] > 0
    if keeps:
        train, labels = load("digits").train_images, restored(made(method, **short), "cpu")[1].scenario.trained()[1]
        near = nearest(pictures.kept.sources, train)
        assert (near.distance == 0).all() and set(pictures.kept.labels.tolist()) <= set(labels.tolist())
    assert found["memory"]["client_bytes"]["most"] <= found["memory"]["budget"] or METHODS[method].family == "bound"


def test_pictures_are_those_of_the_method_and_stand_beside_their_sources(made: Made) -> None:
    folder = made("hr", one_domain=True)
    _, parts = restored(folder, "cpu")
    client: Any = parts.engine.client
    message = parts.server.broadcast()
    pairs = exposure.kept(parts, message, 1000, "cpu")
    assert len(pairs.labels) == sum(len(own) for m in parts.transport.memories.values() for own in m.codes.values())
    codes = client.codec.encode(message.codec, pairs.sources)
    assert torch.equal(client.codec.decode(message.codec, codes), pairs.pictures)
    every = {bytes(row.tolist()) for m in parts.transport.memories.values() for own in m.codes.values() for row in own}
    assert {bytes(row.tolist()) for row in codes} == every


def test_the_literal_method_s_sources_are_the_images_it_encoded(made: Made) -> None:
    # after a single task nothing is encoded twice, and as floats codes lose nothing: a source's code is the one kept
    _, parts = restored(made("hr-literal", tasks=1, code_bits=32), "cpu")
    client: Any = parts.engine.client
    message, task = parts.server.broadcast(), parts.scenario.tasks[0]
    asked = 0
    for c, memory in parts.transport.memories.items():
        assert isinstance(memory, LiteralMemory)
        data = exposure._data(parts, c, task)
        shown = client.exposed(memory, data, message)
        loaded(client.net, message.weights)
        for j, codes in client.restored(memory, message).items():
            with torch.no_grad():
                own = client.encoded(data.of(j))
            off = torch.cdist(codes, own)
            assert off.amin(1).max() < 0.01 * off.median()
            assert torch.equal(shown.real[j], data.of(j)[off.argmin(1)])
            asked += len(codes)
    assert asked > 20


def test_a_class_that_comes_twice_is_looked_for_where_it_came_last(made: Made) -> None:
    plan = tiny_plan("hr-literal", replace(TINY, staying=0.5, clients=6))
    folder = made("hr").parent / "staying"
    for _ in execute(plan, folder, "cpu", workers=1):
        pass
    found, pictures = audited(folder, 1000)
    _, parts = restored(folder, "cpu")
    kept = sum(len(own) for memory in parts.transport.memories.values() for own in memory.codes.values())
    assert found["kept"]["pictures"] == kept == len(pictures.kept.sources)


def test_who_has_the_gradients_of_prototypes_has_the_prototypes(made: Made) -> None:
    found, _ = audited(made("glfc", task_detect="oracle", perturb_steps=0, inversion_steps=60), 5)
    assert found["sent"]["messages of one image"]["source_is_nearest"] > 0.7
    assert found["sent"]["messages of one image"]["psnr"] > 20


def test_a_mean_of_one_image_is_that_image(made: Made) -> None:
    folder = made("hr")
    _, parts = restored(folder, "cpu")
    message, last = parts.server.broadcast(), parts.scenario.tasks[-1]
    parts.scenario.begin(last)
    client: Any = parts.engine.client
    c = next(c for c in parts.scenario.present(last) if parts.scenario.share(last)[c].any())
    data = exposure._data(parts, c, last)
    alone = replace(data, images=data.images[:1], labels=data.labels[:1], cache={})
    shown = client.overheard(parts.method.memory(), alone, message)
    codes = client.codec.encode(message.codec, data.images[:1])
    assert torch.equal(shown.rebuilt[int(data.labels[0])], client.codec.decode(message.codec, codes))
    middle = client.codec.middle(client.codec.statistics(data.images[:1]))
    assert (middle.int() - data.images[0].int()).abs().max() <= 1  # sums are of whole numbers


def test_larger_codes_are_nearer_to_their_images(made: Made) -> None:
    found, _ = audited(made("hr"))
    sizes = {name: row for name, row in found["tried"].items() if name.startswith("klt")}
    assert [row["bytes"] for row in sizes.values()] == [1, 3, 4, 6, 13]
    for measure in ("psnr", "ssim", "source_is_nearest"):
        values = [row[measure] for row in sizes.values()]
        assert values == sorted(values) and values[-1] > values[0]
    assert found["tried"]["raw"]["psnr"] is None and found["tried"]["raw"]["identical"] == 1
    assert found["kept"]["bytes"] == 12 and found["tried"]["webp:64"]["bytes"] == 64


# -- a run that memorised, and one that learned nothing ---------------------------------------------------------------


def at_random(root: Path) -> Path:
    """Write digits into class folders that are drawn by lot: there is nothing to learn but the images themselves."""
    draws, images = torch.Generator().manual_seed(0), load("digits").train_images
    order = torch.randperm(len(images), generator=draws).tolist()
    for split, rows in (("train", order[:80]), ("test", order[80:200])):
        for row in rows:
            place = root / split / f"class{int(torch.randint(4, (1,), generator=draws))}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[row, 0].numpy()).save(place / f"{row}.png")
    return root


def test_a_run_that_memorised_on_purpose_gives_its_images_away(tmp_path: Path) -> None:
    how = "--tasks 1 --clients 1 --active 1 --set rounds=10 --set steps=30 --set lr=0.05 --set augment=none --workers 1"
    done(f"run joint --data {at_random(tmp_path / 'lots')} {how} --out {tmp_path / 'run'}")
    found, _ = audited(tmp_path / "run")
    told = {(row["images"], row["attack"]): row for row in found["membership"]}
    for attack in ("loss", "margin"):
        assert told["all training images", attack]["value"] > 0.9 and told["all training images", attack]["low"] > 0.8


def test_of_a_run_that_learned_nothing_nothing_can_be_told(made: Made) -> None:
    found, _ = audited(made("finetune", rounds=1, steps=1, lr=1e-9))
    assert [row["attack"] for row in found["membership"]] == ["loss", "margin"]
    for row in found["membership"]:
        assert row["low"] <= 0.5 <= row["high"] and row["high"] - row["low"] < 0.2


# -- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_weighed_to_the_byte(made: Made) -> None:
    _, parts = restored(made("hr-literal"), "cpu")
    memories = parts.transport.memories
    report = memory_report(memories, parts.server.broadcast(), 6, 4)
    kept = sum(map(size_in_bytes, memories.values()))
    assert report["federation"]["codes"]["bytes"] + report["federation"]["scales"]["bytes"] == kept
    assert report["client_bytes"] == {
        "most": max(map(size_in_bytes, memories.values())), "mean": round(kept / 4, 1),
    }  # fmt: skip
    assert report["exemplars"] == sum(len(own) for m in memories.values() for own in m.codes.values())
    assert report["numbers_per_exemplar"] == 6
    assert sum(part["bytes"] for part in report["broadcast"].values()) == size_in_bytes(parts.server.broadcast())
    weights = parts.server.state.weights
    decoder = sum(tensor.numel() for name, tensor in weights.items() if name.startswith("decoder."))
    assert report["decoder"]["numbers"] == decoder == weighed(parts.server.state)["weights: decoder"].numbers > 0


@record
class Odd:
    """A memory that has more than exemplars."""

    weights: Weights
    counts: ByClass
    exemplars: ByClass


def test_exemplars_are_told_from_what_is_kept_beside_them() -> None:
    assert exemplars_of(Nothing()) == {} and memory_report({}, Nothing(), 10, 5)["exemplars"] == 0
    rows = {3: torch.zeros(4, 7, dtype=torch.uint8)}
    odd = Odd({"w": torch.zeros(2, 2)}, {3: torch.tensor(4)}, rows)
    assert exemplars_of(odd) is rows
    report = memory_report({5: odd}, Nothing(), 2, 10)
    assert report["exemplars"] == 4 and report["numbers_per_exemplar"] == 7 and report["exemplars_per_class"] == 2
    assert report["federation"]["exemplars"] == {"numbers": 28, "bytes": 28}
    assert report["client_bytes"] == {"most": 16 + 8 + 28, "mean": 5.2}


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_tables_and_leaves_an_audit_in_the_folder(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made("hr"), folder)
    before = fingerprint(folder)
    said = done(f"audit {folder} --most 50 --device cpu")
    for words in (
        "Was this image trained on?",
        "sources of exemplars",
        "if it were webp:64",
        "memories: codes",
        "x 307 =",
    ):
        assert words in said.out
    assert f"written: {folder}/audit.json; drawn: {folder}/audit.png" in said.out
    after = fingerprint(folder)
    assert after.keys() - before.keys() == {"audit.json", "audit.png"}
    assert {name: after[name] for name in before} == before
    written = json.loads((folder / "audit.json").read_text())
    assert written["method"] == "hr" and written["kept"]["pictures"] == 50
    with Image.open(folder / "audit.png") as picture:
        assert picture.width > 800 and len(picture.convert("L").getcolors(256) or []) > 50
    again = done(f"audit {folder} --most 50 --device cpu")
    assert again == said and fingerprint(folder) == after


def test_a_method_that_says_nothing_of_itself_is_measured_all_the_same(tmp_path: Path) -> None:
    source = Path(__file__).parent.parent / "fcil/methods/finetune.py"
    (tmp_path / "own.py").write_text(source.read_text())
    done(f"run {tmp_path}/own.py --set tasks=2 --set rounds=1 --set steps=1 --out {tmp_path}/run")
    said = done(f"audit {tmp_path}/run")
    assert "all training images" in said.out and "sources of exemplars" not in said.out
    for place in ("", "run/"):  # with the run's own copy as it was, the file may change
        (tmp_path / f"{place}own.py").write_text(source.read_text() + "\n# changed\n")
        assert ("own.py has changed since" in typed(f"audit {tmp_path}/run").err) == bool(place)


def broken(folder: Path, how: str) -> Path:
    """Spoil a copy of a run."""
    if how == "missing":
        shutil.rmtree(folder)
    elif how == "empty":
        shutil.rmtree(folder)
        folder.mkdir()
    elif how == "foreign":
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "notes.txt").write_text("nothing to do with it")
    elif how == "a file":
        shutil.rmtree(folder)
        folder.write_text("no folder")
    elif how == "unfinished":
        (folder / "result.json").unlink()
    elif how == "torn result":
        (folder / "result.json").write_text((folder / "result.json").read_text()[:50])
    elif how == "torn config":
        (folder / "config.toml").write_text((folder / "config.toml").read_text()[:50])
    elif how == "without checkpoint":
        shutil.rmtree(folder / "checkpoint")
    elif how == "torn checkpoint":
        for path in (folder / "checkpoint").glob("memories*"):
            path.write_bytes(path.read_bytes()[:-5])
    elif how == "of another method":
        text = (folder / "config.toml").read_text()
        assert 'method = "icarl"' in text
        (folder / "config.toml").write_text(text.replace('method = "icarl"', 'method = "hr"'))
    return folder


WRONG = {
    "missing": "does not exist",
    "empty": "is not a run folder: it has no config.toml",
    "foreign": "is not a run folder: it has no config.toml",
    "a file": "is not a run folder",
    "unfinished": "is not finished; finish it with: fcil run --resume",
    "torn result": "result.json is not readable",
    "torn config": "config.toml",
    "without checkpoint": "has no whole checkpoint of its end, where the clients' memories are; `fcil run` always",
    "torn checkpoint": "has no whole checkpoint of its end",
    "of another method": "config.toml",
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_folder_is_named_in_a_sentence(made: Made, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made("icarl"), folder)
    broken(folder, how)
    before = fingerprint(folder) if folder.is_dir() else {}
    said = typed(f"audit {folder}")
    assert said.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("fcil: ") and str(folder) in said.err and WRONG[how] in said.err
    assert (fingerprint(folder) if folder.is_dir() else {}) == before


def test_draws_of_a_gpu_are_not_guessed_on_a_cpu(made: Made, tmp_path: Path) -> None:
    for method, refused in (("hr-literal", True), ("hr", False)):
        folder = tmp_path / method
        shutil.copytree(made(method), folder)
        result = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(result | {"device": "cuda:0"}))
        if refused:
            with pytest.raises(UserError, match="made on cuda:0, and which images its clients drew"):
                audited(folder)
        else:
            assert audited(folder)[0]["kept"]["pictures"] == 40


def test_a_folder_that_cannot_be_written_is_named(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made("finetune"), folder)
    (folder / "audit.json").mkdir()
    said = typed(f"audit {folder}")
    assert said.code == 2 and "cannot write" in said.err and "audit.json" in said.err


def test_a_codec_s_sums_show_the_mean_image() -> None:
    images: Tensor = load("digits").train_images[:9]
    codec = TransformCodec((1, 8, 8), 12)
    middle = codec.middle(codec.statistics(images)).double()
    assert (middle - images.double().mean(0)).abs().max() <= 1  # sums are of whole numbers
