"""What comes of a finished run: predictions for images, and the model in formats that others read."""

import json
import logging
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn

from fcil.errors import UserError
from fcil.method import Client, Setting
from fcil.methods import method
from fcil.plan import Plan
from fcil.records import flatten, read_tensors, unflatten, write_tensors
from fcil.scenario.images import resized
from fcil.scenario.memory import budget


@dataclass(frozen=True)
class Model:
    """What a device needs to classify, from a finished run."""

    method: str
    client: Client
    message: Any  # the server's last broadcast
    classes: list[str]
    shape: tuple[int, int, int]

    @staticmethod
    def of(folder: Path) -> "Model":
        """Read the model of a finished run."""
        wanted = Plan.read(folder)
        if not (folder / "model.safetensors").exists():
            raise UserError(f"{folder} has no model yet; finish it with: fcil run --resume {folder}")
        flat, facts = read_tensors(folder / "model.safetensors")
        classes, shape = json.loads(facts["classes"]), tuple(json.loads(facts["shape"]))
        allowed = budget(wanted.benchmark, math.prod(shape))
        setting = Setting(len(classes), shape, wanted.protocol, allowed, wanted.benchmark.network)
        made = method(wanted.method)
        down = get_type_hints(made.server.broadcast)["return"]  # type: ignore[attr-defined]
        return Model(wanted.method, made.client(wanted.config, setting), unflatten(down, flat), classes, shape)


def predict(folder: Path, images: list[Path], top: int = 3) -> list[list[tuple[str, float]]]:
    """Return for each image the `top` class names with the softmax of the method's scores."""
    model = Model.of(folder)
    pixels = torch.stack([read_image(path, model.shape) for path in images])
    with torch.inference_mode():
        shares = model.client.predict(model.message, pixels).softmax(1)
    best = shares.topk(min(top, len(model.classes)), dim=1)
    return [
        [(model.classes[j], share) for share, j in zip(row_shares, row, strict=True)]
        for row_shares, row in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def read_image(path: Path, shape: tuple[int, int, int]) -> Tensor:
    """Read an image file into the shape a model takes, uint8: short side resized, centre cropped."""
    try:
        with Image.open(path) as file:
            picture = resized(file.convert("RGB" if shape[0] == 3 else "L"), shape[1])
    except FileNotFoundError:
        raise UserError(f"there is no image {path}") from None
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} is not a readable image ({error})") from None
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(shape[1], shape[2], shape[0]).permute(2, 0, 1).contiguous()


def export_safetensors(folder: Path, path: Path) -> None:
    """Write all that a device needs to classify, with the class names beside it."""
    model = Model.of(folder)
    facts = {"classes": json.dumps(model.classes), "shape": json.dumps(model.shape), "method": model.method}
    try:
        write_tensors(path, flatten(model.message), facts)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def export_onnx(folder: Path, path: Path) -> float:
    """Write the classifier as ONNX, run it with onnxruntime, and return the largest difference of a score to PyTorch's.

    The model takes `images`, float32 in 0..1 of any batch size, and gives `scores`, one per class; the class names are
    in its metadata under `classes`.
    """
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - what torch exports with
    except ImportError as error:
        raise UserError(f"--onnx needs the package {error.name}: pip install fcil[onnx]") from None
    model = Model.of(folder)
    examples = torch.rand(4, *model.shape, generator=torch.Generator().manual_seed(0))
    module = Scores(model.client, model.message).eval()
    with torch.inference_mode():
        expected = module(examples)  # loads the weights, which the export then finds in place
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it reports operators of packages that are not used here
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        program = torch.onnx.export(
            module, (examples,), dynamo=True, input_names=["images"], output_names=["scores"],
            dynamic_shapes={"images": {0: torch.export.Dim("batch")}}, verbose=False,
        )  # fmt: skip
    assert program is not None
    made = program.model_proto
    onnx.helper.set_model_props(made, {"classes": json.dumps(model.classes), "source": "fcil"})
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    got = torch.from_numpy(session.run(None, {"images": examples[:3].numpy()})[0])
    gap = float((got - expected[:3]).nan_to_num(0.0).abs().max())
    if gap > 1e-3:
        raise UserError(f"the exported model differs from the original by {gap:.2g} in a score; {path} was not written")
    try:
        path.write_bytes(made.SerializeToString())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    return gap


class Scores(nn.Module):
    """A client's `predict` as a module, its networks registered so that an export finds their weights."""

    def __init__(self, client: Any, message: Any):
        super().__init__()
        self.nets = nn.ModuleDict(client.networks())
        self.client, self.message = client, message

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.client.predict(self.message, images)
        return scores
