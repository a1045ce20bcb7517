"""Small lossless images in three quarters of their bytes: a hundred at a time as one picture, for a slow line.

`dense.py pack FROM TO` makes pictures of the images in a folder's parquet files; `dense.py unpack FROM TO` makes
parquet files of them again, with the same pixels, labels and class names. Files of JPEGs are copied as they are.
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


def pack(source: Path, target: Path) -> None:
    """Write what is not an image as a parquet file, and the images into a folder of its name."""
    for file in sorted(source.glob("*.parquet")):
        table = pq.read_table(file)
        column = table.column_names[0]
        encoded = [image["bytes"] for image in table[column].to_pylist()]
        if not encoded[0].startswith(b"\x89PNG"):
            shutil.copy2(file, target / file.name)
            continue
        pages = [encoded[start : start + SIDE**2] for start in range(0, len(encoded), SIDE**2)]
        folder = target / file.name.replace(".parquet", f".{column}")
        folder.mkdir()
        with ProcessPoolExecutor() as pool:
            for number, page in enumerate(pool.map(joined, pages)):
                (folder / f"{number:05}.webp").write_bytes(page)
        pq.write_table(table.drop_columns([column]), folder / "rest.parquet")


def unpack(source: Path, target: Path) -> None:
    """Undo `pack`."""
    for file in source.glob("*.parquet"):
        shutil.copy2(file, target / file.name)
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        rest = pq.read_table(folder / "rest.parquet")
        with ProcessPoolExecutor() as pool:
            pages = pool.map(parted, sorted(folder.glob("*.webp")))
            encoded = [image for page in pages for image in page][: len(rest)]
        name, column = folder.name.rsplit(".", 1)
        images = pa.StructArray.from_arrays([pa.array(encoded, pa.binary())], ["bytes"])
        pq.write_table(rest.add_column(0, column, images), target / f"{name}.parquet")


def joined(encoded: list[bytes]) -> bytes:
    """Return images as one lossless picture, whose last places may stay black."""
    images = [np.asarray(Image.open(BytesIO(image)).convert("RGB")) for image in encoded]
    size = len(images[0])
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
    what, source, target = sys.argv[1:]
    Path(target).mkdir(parents=True)
    {"pack": pack, "unpack": unpack}[what](Path(source), Path(target))
