"""What comes of a finished run: predictions for images, and the model in formats that others read."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn

from fcil.errors import UserError, lacking, quoted
from fcil.files import whole
from fcil.method import Client
from fcil.methods import method
from fcil.parts import setting_of
from fcil.plan import Plan, repeating
from fcil.records import flatten, read_tensors, unflatten, write_tensors
from fcil.run_folder import check_source
from fcil.scenario.images import resized, rgb


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
            if (folder / "result.json").exists():
                how = repeating(wanted, folder)
                raise UserError(f"{folder} is finished, but was stored without its model; repeat it with: {how}")
            raise UserError(f"{folder} has no model yet; finish it with: fcil run --resume {quoted(folder)}")
        check_source(wanted, folder)
        flat, facts = read_tensors(folder / "model.safetensors")
        made = method(wanted.code)
        down = get_type_hints(made.server.broadcast)["return"]  # type: ignore[attr-defined]
        unlike = f"{folder / 'model.safetensors'} is not a model of {wanted.method}"
        try:
            classes, shape = json.loads(facts["classes"]), tuple(json.loads(facts["shape"]))
            capacity = int(facts.get("capacity", len(classes)))
            message = unflatten(down, flat)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{unlike} ({error!r})") from None
        client = made.client(wanted.config, setting_of(wanted, capacity, shape))
        try:
            with torch.no_grad():
                client.predict(message, torch.zeros(1, *shape, dtype=torch.uint8))
        except RuntimeError as error:
            raise UserError(f"{unlike}: it has tensors of other names or shapes") from error
        return Model(wanted.method, client, message, classes, shape)


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
            upright = resized(rgb(ImageOps.exif_transpose(file)), shape[1])
            picture = upright if shape[0] == 3 else upright.convert("L")
    except FileNotFoundError:
        raise UserError(f"there is no image {path}") from None
    except UnidentifiedImageError:
        raise UserError(f"{path} is not an image; it may be PNG, JPEG or another format that Pillow reads") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} is not a readable image ({getattr(error, 'strerror', None) or error})") from None
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(shape[1], shape[2], shape[0]).permute(2, 0, 1).contiguous()


def export_safetensors(folder: Path, path: Path) -> None:
    """Write all that a device needs to classify, with the class names beside it."""
    model = Model.of(folder)
    facts = {"classes": json.dumps(model.classes), "shape": json.dumps(model.shape), "method": model.method}
    with _writing(path):
        write_tensors(path, flatten(model.message), facts)


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
        raise lacking(f"--onnx needs the package {error.name}", "onnx") from None
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
    with _writing(path), whole(path) as partial:
        partial.write_bytes(made.SerializeToString())
    return gap


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Say in a sentence why `path` cannot be written."""
    if path.is_dir():
        raise UserError(f"{path} is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error.__cause__ or error)
        raise UserError(f"cannot write {path}: {why}; choose a place you can write") from None


class Scores(nn.Module):
    """A client's `predict` as a module, its networks registered so that an export finds their weights."""

    def __init__(self, client: Any, message: Any):
        super().__init__()
        self.nets = nn.ModuleDict(client.networks())
        self.client, self.message = client, message

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.client.predict(self.message, images)
        return scores
