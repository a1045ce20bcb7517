"""A finished run's model elsewhere: safetensors and ONNX, which answer as `fcil predict` does."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from fcil import cli
from fcil.deploy.plans import deployed
from fcil.errors import UserError
from fcil.model import export_onnx, read_image
from fcil.plan import Plan, plan, repeating
from fcil.records import read_tensors, write_tensors
from fcil.results.runs import folders
from fcil.scenario.datasets import load
from tests.typed import TINY, class_folders, done, ended, start, typed


@pytest.fixture(scope="module", params=["batch", "group"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    done(f"run joint --set tasks=2 --set rounds=5 --set steps=5 --set norm={request.param} --out {folder}")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Twenty test digits as files."""
    folder = tmp_path_factory.mktemp("pictures")
    for number, image in enumerate(load("digits").test_images[::18]):
        Image.fromarray(image[0].numpy()).save(folder / f"{number:02}.png")
    return sorted(folder.iterdir())


def predicted(run: Path, pictures: list[Path]) -> list[str]:
    lines = done(f"predict {run} {' '.join(map(str, pictures))} --top 1").out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(path) for path in pictures]
    return [line.partition(": ")[2].partition(" ")[0] for line in lines]


def test_onnx_answers_as_predict_does(run: Path, pictures: list[Path], tmp_path: Path) -> None:
    said = done(f"export {run} --onnx {tmp_path}/model.onnx")
    assert f"written: {tmp_path}/model.onnx (scores agree with PyTorch's to " in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])
    images = np.stack([np.asarray(Image.open(path), dtype=np.float32)[None] / 255 for path in pictures])
    (scores,) = session.run(["scores"], {"images": images})
    assert scores.shape == (len(pictures), 4) == (len(pictures), len(classes))
    answers = [classes[j] for j in scores.argmax(1)]
    assert answers == predicted(run, pictures)
    assert len(set(answers)) > 1


def test_safetensors_hold_the_model_and_the_names(run: Path, tmp_path: Path) -> None:
    assert "written: " in done(f"export {run} --safetensors {tmp_path}/model.safetensors").out
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        facts, names = file.metadata(), set(file.keys())
    ours = read_tensors(run / "model.safetensors")[0]
    assert names == set(ours)
    for name, tensor in read_tensors(tmp_path / "model.safetensors")[0].items():
        assert torch.equal(tensor, ours[name])
    assert len(json.loads(facts["classes"])) == 4 and facts["method"] == "joint"
    assert json.loads(facts["shape"]) == [1, 8, 8]


def test_predict_names_the_classes_by_their_share(run: Path, pictures: list[Path]) -> None:
    (line,) = done(f"predict {run} {pictures[0]}").out.splitlines()
    named = line.partition(": ")[2].split(", ")
    shares = [int(text.partition("(")[2].rstrip("%)")) for text in named]
    assert len(named) == 3 and shares == sorted(shares, reverse=True) and sum(shares) <= 101


def test_an_image_is_turned_and_cropped_as_in_training(tmp_path: Path) -> None:
    upright = Image.new("RGB", (16, 8), "black")
    upright.paste((255, 0, 0), (4, 0, 8, 8))
    upright.save(tmp_path / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera on its side
    upright.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)
    ours = read_image(tmp_path / "upright.png", (3, 8, 8))
    assert ours.shape == (3, 8, 8) and ours.dtype == torch.uint8
    assert ours[0, :, :4].min() == 255 and ours[0, :, 4:].max() == 0
    assert torch.equal(read_image(tmp_path / "turned.png", (3, 8, 8)), ours)
    assert read_image(tmp_path / "upright.png", (1, 8, 8)).shape == (1, 8, 8)


def test_a_model_that_came_out_different_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(onnxruntime.InferenceSession):  # type: ignore[misc]
        def run(self, *asked: object) -> list[np.ndarray]:
            return [scores + 1 for scores in super().run(*asked)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    with pytest.raises(Exception, match="differs from the original by 1 in a score"):
        export_onnx(run, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_other_shapes_is_refused_in_a_sentence(run: Path, pictures: list[Path], tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    shutil.copytree(run, stored)
    tensors, facts = read_tensors(run / "model.safetensors")
    halved = {name: tensor[: len(tensor) // 2] if tensor.ndim else tensor for name, tensor in tensors.items()}
    write_tensors(stored / "model.safetensors", halved, facts)
    for command in (f"predict {stored} {pictures[0]}", f"export {stored} --safetensors {tmp_path}/model.safetensors"):
        said = typed(command)
        assert said.code == 2 and not (tmp_path / "model.safetensors").exists()
        assert f"{stored}/model.safetensors is not a model of joint: it has tensors of other names" in said.err


@pytest.mark.parametrize("whose", ["a benchmark", "own images"])
def test_a_run_stored_without_its_model_says_how_to_repeat_it(tmp_path: Path, whose: str) -> None:
    data = class_folders(tmp_path / "photos")
    if whose == "own images":
        done(f"run finetune --data {data} {TINY} --set network=small --out {tmp_path}/theirs/finetune")
    else:  # the command is a whole sweep into a folder that another reader cannot have
        done(f"sweep --methods finetune,lwf --seeds 0 {TINY} --out {tmp_path}/theirs")
    [model, *_] = sorted((tmp_path / "theirs").rglob("finetune*/**/model.safetensors"))
    shutil.copytree(model.parent, tmp_path / "stored")
    (tmp_path / "stored" / "model.safetensors").unlink()
    said = typed(f"predict {tmp_path}/stored {data}/class0/0.png")
    what, _, how = said.err.partition("repeat it with: ")
    assert said.code == 2 and what.endswith("is finished, but was stored without its model; ")
    before, _, line = how.strip().partition("fcil ")
    repeated = ended(start(line, tmp_path, before))
    assert (repeated.code, repeated.err) == (0, "")
    (weights, facts), (first, first_facts) = read_tensors(tmp_path / "again" / model.name), read_tensors(model)
    assert facts == first_facts and weights.keys() == first.keys()
    assert all(torch.equal(weights[name], first[name]) for name in first)


def test_advice_about_a_committed_run_is_a_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    caught: list[Plan] = []
    monkeypatch.setattr(cli, "_execute", lambda wanted, *how: caught.append(wanted))
    monkeypatch.setattr(cli, "show_result", lambda folder: None)
    committed, repeated = folders(Path(__file__).parent.parent / "results"), 0
    for folder in committed:
        try:
            wanted = Plan.read(folder)
        except UserError as error:  # `hr` has lost knobs since
            assert folder.parent.name.startswith("hr") and re.search("no setting '(loss|whole)'", str(error))
            continue
        done(repeating(wanted, folder).removeprefix("fcil "))
        assert caught.pop().same_as(wanted), folder
        repeated += 1
    assert repeated > 250


@pytest.mark.parametrize(
    ("terms", "command"),
    [('{"nodes": []}', "serve"), ('{"nodes": ["anna"]}', "run"), ('{"nodes": [', "run")],
    ids=["deployed", "simulated", "torn"],
)
def test_a_deployment_is_repeated_by_whoever_served_it(tmp_path: Path, terms: str, command: str) -> None:
    wanted = deployed("finetune", None, 0, {}, 10, "")
    (tmp_path / "config.toml").write_text(wanted.to_toml())
    (tmp_path / "deploy.json").write_text(terms)
    assert repeating(wanted, tmp_path).endswith(f"deploy.json again && fcil {command} --resume again")


def test_a_private_run_is_repeated_from_its_file_where_its_extra_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = plan("icarl", "digits", settings={"dp": "local", "dp_clip": "8"})
    (tmp_path / "config.toml").write_text(wanted.to_toml())
    assert repeating(wanted, tmp_path).startswith("fcil run icarl --benchmark digits")
    monkeypatch.setattr("fcil.federation.privacy.find_spec", lambda name: None)
    assert repeating(wanted, tmp_path) == f"mkdir again && cp {tmp_path}/config.toml again && fcil run --resume again"
