"""The ledger's lines as TensorBoard curves: needs the extra `tensorboard`."""

from collections.abc import Iterator
from pathlib import Path

from fcil.errors import UserError, lacking
from fcil.federation.loop import Line
from fcil.report.progress import overall_of


def mirrored(lines: Iterator[Line], folder: Path) -> Iterator[Line]:
    """Pass the lines on and write loss, accuracy and traffic to `folder` on the way."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise lacking("--tensorboard needs the package tensorboard", "tensorboard") from None
    try:
        writer = SummaryWriter(str(folder))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose a folder you can write") from None
    with writer:
        step = 0
        for line in lines:
            if line["kind"] != "task":
                step = line["task"] * line["rounds"] + line["round"] + 1
            if line["kind"] == "round":
                scalars = {"loss": line["loss"], "bytes/down": line["down"], "bytes/up": line["up"]}
            elif line["kind"] == "task":
                scalars = {"accuracy/all": overall_of(line["correct"], line["total"]), "bytes/kept": line["kept"]}
                for t, (right, asked) in enumerate(zip(line["correct"], line["total"], strict=True)):
                    scalars[f"accuracy/task {t + 1}"] = 100 * right / asked
            else:
                scalars = {"accuracy/all": overall_of(line["correct"], line["total"])}
            for name, value in scalars.items():
                if value is not None:
                    writer.add_scalar(name, value, step)
            yield line
