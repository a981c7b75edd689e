"""Small data sets of images, made without the code under test: folders, IDX files and Parquet tables."""

from __future__ import annotations

import gzip
import io
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

CLASSES = ("cat", "dog", "owl")


def random_images(count: int, shape: tuple[int, ...] = (5, 7, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """A lossless file, so that what comes back can be compared."""
    content = io.BytesIO()
    if pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def write_folder(root: Path, images: np.ndarray, classes: Sequence[str] = CLASSES) -> dict[str, np.ndarray]:
    """Images in folders by class, one class after the other; return them by their relative paths."""
    found = {}
    for number, pixels in enumerate(images):
        name = f"{classes[number % len(classes)]}/{number:03d}.png"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(pixels))
        found[name] = pixels
    return found


def idx(values: np.ndarray) -> bytes:
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(np.uint8).tobytes()


def write_idx(root: Path, images: np.ndarray, labels: Sequence[int] | None, name: str = "train", mark: str = "-"):
    """Files as those of MNIST, compressed."""
    root.mkdir(parents=True, exist_ok=True)
    dims = images.ndim
    (root / f"{name}-images{mark}idx{dims}-ubyte.gz").write_bytes(gzip.compress(idx(images)))
    if labels is not None:
        (root / f"{name}-labels{mark}idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array(labels))))


def write_table(
    path: Path,
    contents: Sequence[bytes | None],
    labels: pa.Array | None,
    *,
    names: Sequence[str] = (),
    plain: bool = False,
    **options,
) -> None:
    """A table as Hugging Face's `datasets` writes one; ``plain``: bytes without a struct."""
    column = pa.array(contents, pa.binary())
    if not plain:
        values = [
            None if content is None else {"bytes": content, "path": f"{n}.png"} for n, content in enumerate(contents)
        ]
        column = pa.array(values, pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    columns = {"image": column}
    if labels is not None:
        columns["label"] = labels
    table = pa.table(columns)
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
