"""What a simulated federation replays, as pictures: replay.png in the run folder, a row for each class shown.

A row follows one exemplar of one client: the real image, what the client's memory gives back after each task, and what
the last model makes up for the class; or, where no client keeps anything, what is made up for the class after each
task. The tensors behind it are in replay.safetensors, so a resumed run goes on with its gallery.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fcil.errors import UserError
from fcil.files import set_aside, whole
from fcil.records import read_tensors, write_tensors

ROWS = 20  # classes shown, at least one of each task pictured; and tasks pictured
CELL = 48  # least side of a picture on the page, in pixels
GAP, LABELS, HEADER = 4, 120, 22
PAPER, INK, BLANK = (255, 255, 255), (40, 40, 40), (235, 235, 235)


def shown(classes: Sequence[int], tasks: int) -> Sequence[int]:
    """Return which of a task's classes get a row, if there are so many tasks in all: its first ones."""
    return classes[: max(1, ROWS // tasks)]


def pictured(task: int, tasks: int) -> bool:
    """Tell whether a task, of so many in all, gets a column: all do, and of a long sequence about twenty and the last.

    Otherwise rows and columns both grew with the tasks, and the page with their square.
    """
    return task + 1 == tasks or (task + 1) % -(-tasks // ROWS) == 0


class Gallery:
    """The pictures of a run so far: uint8 (channels, height, width) each."""

    def __init__(self, folder: Path):
        self.tensors_at, self.picture_at = folder / "replay.safetensors", folder / "replay.png"
        self.pictures: dict[str, Tensor] = {}
        self.owners: dict[int, int] = {}  # class -> the client whose exemplar is followed
        if self.tensors_at.exists():
            # a damaged gallery is no reason to stop a run
            with suppress(UserError, KeyError, ValueError, AttributeError):
                pictures, facts = read_tensors(self.tensors_at)
                self.owners = {int(j): int(client) for j, client in json.loads(facts["owners"]).items()}
                self.pictures = pictures

    @staticmethod
    def set_aside(folder: Path) -> None:
        """Keep the gallery of a run that starts over under another name, as its ledger is kept."""
        for name in ("replay.safetensors", "replay.png"):
            if (folder / name).exists():
                set_aside(folder / name)

    def add(
        self, task: int, real: Mapping[int, Tensor], kept: Mapping[int, Tensor], made: Mapping[int, Tensor]
    ) -> None:
        """Add what was seen after a task."""
        for name, images in ((f"{task}/real", real), (f"{task}/kept", kept), (f"{task}/made", made)):
            self.pictures |= {f"{name}/{j}": image.cpu() for j, image in images.items()}

    def save(self, class_names: Sequence[str], tasks: int) -> None:
        """Write the tensors and draw the page."""
        write_tensors(self.tensors_at, self.pictures, {"owners": json.dumps(self.owners)})
        with whole(self.picture_at) as partial:
            self.page(class_names, tasks).save(partial, format="PNG")

    def page(self, class_names: Sequence[str], tasks: int) -> Image.Image:
        """Draw the page: rows are classes, columns the real image, the exemplar after each task, the made-up one.

        Of a method without exemplars, the made-up ones after each task.
        """
        side = next(iter(self.pictures.values())).shape[-1]
        cell = side * max(1, -(-CELL // side))
        rows = sorted({int(name.split("/")[2]) for name in self.pictures})
        numbers = [t + 1 for t in range(tasks) if pictured(t, tasks)]
        columns = ["real", *(f"after {n}" for n in numbers), "made up"]
        if not self.keeps():
            columns = ["real", *(f"made {n}" for n in numbers)]
        page = Image.new("RGB", (LABELS + len(columns) * (cell + GAP), HEADER + len(rows) * (cell + GAP)), PAPER)
        draw, font = ImageDraw.Draw(page), ImageFont.load_default(12)
        for x, title in enumerate(columns):
            draw.text((LABELS + x * (cell + GAP) + cell / 2, HEADER / 2), title, INK, font, anchor="mm")
        for y, j in enumerate(rows):
            top = HEADER + y * (cell + GAP)
            draw.text((LABELS - 8, top + cell / 2), _shortened(class_names[j]), INK, font, anchor="rm")
            for x, picture in enumerate(self._row(j, tasks)):
                left = LABELS + x * (cell + GAP)
                if picture is None:
                    draw.rectangle((left, top, left + cell - 1, top + cell - 1), BLANK)
                else:
                    page.paste(_image(picture).resize((cell, cell), Image.Resampling.NEAREST), (left, top))
        return page

    def keeps(self) -> bool:
        """Tell whether any exemplar was ever kept."""
        return any("/kept/" in name for name in self.pictures)

    def _row(self, j: int, tasks: int) -> list[Tensor | None]:
        real = [self.pictures.get(f"{t}/real/{j}") for t in range(tasks)]
        made = [self.pictures.get(f"{t}/made/{j}") for t in range(tasks)]
        first = next((picture for picture in real if picture is not None), None)
        last = next((picture for picture in reversed(made) if picture is not None), None)
        if not self.keeps():
            return [first, *(picture for t, picture in enumerate(made) if pictured(t, tasks))]
        return [first, *(self.pictures.get(f"{t}/kept/{j}") for t in range(tasks) if pictured(t, tasks)), last]


def save_grid(path: Path, pictures: Tensor) -> None:
    """Draw rows and columns of pictures, uint8 (rows, columns, channels, height, width)."""
    rows, columns, width = pictures.shape[0], pictures.shape[1], pictures.shape[-1]
    cell = GAP + width * max(1, -(-CELL // width))
    page = Image.new("RGB", (columns * cell + GAP, rows * cell + GAP), PAPER)
    for y, row in enumerate(pictures.cpu()):
        for x, picture in enumerate(row):
            shown = _image(picture).resize((cell - GAP, cell - GAP), Image.Resampling.NEAREST)
            page.paste(shown, (GAP + x * cell, GAP + y * cell))
    with whole(path) as partial:
        page.save(partial, format="PNG")


def _image(picture: Tensor) -> Image.Image:
    colours = picture.expand(3, -1, -1) if len(picture) != 3 else picture
    return Image.fromarray(colours.to(torch.uint8).permute(1, 2, 0).contiguous().numpy())


def _shortened(name: str) -> str:
    return name if len(name) <= 16 else name[:15] + "…"
