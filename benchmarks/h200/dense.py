"""Small lossless images in three quarters of their bytes: a hundred at a time as one picture, for a slow line.

`dense.py pack FROM TO` makes pictures of the images in a folder's parquet files; `dense.py unpack FROM TO` makes
parquet files of them again, with the same pixels, labels and class names. All else is copied, files of JPEGs among it.
TO is there when it is whole, and left alone when it is there.
"""

import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SIDE = 10  # images beside and above each other
PLAIN = "folders"  # copied as they are


def pack(source: Path, target: Path) -> None:
    """Write what is not an image as a parquet file, and the images into a folder of its name."""
    for file in sorted(source.iterdir()):
        column = pngs(file)
        if column is None:
            shutil.copytree(file, target / PLAIN / file.name) if file.is_dir() else shutil.copy2(file, target)
            continue
        table = pq.read_table(file)
        encoded = [image["bytes"] for image in table[column].to_pylist()]
        pages = [encoded[start : start + SIDE**2] for start in range(0, len(encoded), SIDE**2)]
        folder = target / file.name.replace(".parquet", f".{column}")
        folder.mkdir()
        with ProcessPoolExecutor() as pool:
            for number, page in enumerate(pool.map(joined, pages)):
                (folder / f"{number:05}.webp").write_bytes(page)
        place = table.column_names.index(column)
        pq.write_table(table.drop_columns([column]), folder / f"rest.{place}.parquet")


def unpack(source: Path, target: Path) -> None:
    """Undo `pack`."""
    for found in sorted(source.iterdir()):
        if found.is_file():
            shutil.copy2(found, target)
            continue
        if found.name == PLAIN:
            shutil.copytree(found, target, dirs_exist_ok=True)
            continue
        (kept,) = found.glob("rest.*.parquet")
        rest = pq.read_table(kept)
        with ProcessPoolExecutor() as pool:
            pages = pool.map(parted, sorted(found.glob("*.webp")))
            encoded = [image for page in pages for image in page][: len(rest)]
        name, column = found.name.rsplit(".", 1)
        images = pa.StructArray.from_arrays([pa.array(encoded, pa.binary())], ["bytes"])
        pq.write_table(rest.add_column(int(kept.name.split(".")[1]), column, images), target / f"{name}.parquet")


def pngs(file: Path) -> str | None:
    """Return the column of a table that holds PNGs, if this is a file with one."""
    if file.suffix != ".parquet" or file.is_dir():
        return None
    (first,) = next(pq.ParquetFile(file).iter_batches(1)).to_pylist()
    found = (name for name, cell in first.items() if isinstance(cell, dict) and "bytes" in cell)
    return next((name for name in found if bytes(first[name]["bytes"] or b"").startswith(b"\x89PNG")), None)


def joined(encoded: list[bytes]) -> bytes:
    """Return images as one lossless picture, whose last places may stay black."""
    images = [np.asarray(Image.open(BytesIO(image))) for image in encoded]
    size = len(images[0])
    assert all(image.shape == (size, size, 3) for image in images), "square images in RGB, all of one size"
    places = np.zeros((SIDE**2, size, size, 3), np.uint8)
    places[: len(images)] = images
    page = places.reshape(SIDE, SIDE, size, size, 3).swapaxes(1, 2).reshape(SIDE * size, SIDE * size, 3)
    return written(page, "WEBP", lossless=True, quality=90, method=5)


def parted(path: Path) -> list[bytes]:
    """Return the images of a picture, each as a file."""
    page = np.asarray(Image.open(path).convert("RGB"))
    size = len(page) // SIDE
    places = page.reshape(SIDE, size, SIDE, size, 3).swapaxes(1, 2).reshape(SIDE**2, size, size, 3)
    return [written(place, "PNG", compress_level=1) for place in places]


def written(pixels: np.ndarray, kind: str, **how: object) -> bytes:
    """Return an image as the content of a file."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind, **how)
    return file.getvalue()


if __name__ == "__main__":
    what, source, target = sys.argv[1], *map(Path, sys.argv[2:])
    if not target.exists():
        partial = target.with_name(f"{target.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        {"pack": pack, "unpack": unpack}[what](source, partial)
        partial.rename(target)
