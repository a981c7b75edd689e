"""Image files, one image each, and IDX files, many images of one size each.

IDX is the format of MNIST and its successors: two zero bytes, a type (8: bytes), the number of dimensions, their sizes
as big-endian uint32, then the values. ``…images-idx3-ubyte`` has count, rows and columns, ``idx4`` also channels; the
labels are in ``…labels-idx1-ubyte`` beside it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO

import numpy as np

from data_pipeline.prepare.readers.open_file import OpenFile, open_piece
from data_pipeline.prepare.readers.records import check_length, read_record_bytes
from data_pipeline.prepare.source_items import (
    Document,
    Fields,
    File,
    FileContentError,
    Format,
    Item,
    RawImage,
    Skip,
    full_piece,
)
from longctx.images.image_format import CHANNELS, MOST_SIDE

IMAGE, IDX = "image", "idx"
"""Format kinds."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_IMAGES = re.compile(r"(?:(?P<before>.*[/.-])|)images(?P<mark>[-.])idx[34](?P<after>-ubyte(?:\.\w+)?)", re.IGNORECASE)
_UNSIGNED_BYTES = 8


def image_formats(files: Sequence[File]) -> tuple[list[File], list[Skip]]:
    """Return the files with images in their formats, IDX files with their labels, and skips for all other files."""
    by_name = {file.name: file for file in files}
    labels: set[str] = set()
    found: list[File] = []
    for file in files:
        suffix = next((suffix for suffix in SUFFIXES if file.name.lower().endswith(suffix)), "")
        match = _IMAGES.fullmatch(file.name)
        if suffix:
            found.append(replace(file, format=Format(IMAGE, ending=suffix)))
        elif match is not None:
            name = f"{match['before'] or ''}labels{match['mark']}idx1{match['after']}"
            labels.add(name)
            # Content decides the type of values; the name only the compression.
            form = Format(IDX, file.format.compression, ".idx")
            found.append(replace(file, format=form, other=by_name.get(name)))
        elif file.format.kind == "parquet":
            found.append(file)
    known = labels | {file.name for file in found}
    return found, [Skip(name, "not an image") for name in by_name if name not in known]


def read_image_file(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield the file as one image; the first folder in its path is its class."""
    yield Document(source.name, "", image=RawImage(read_record_bytes(source.stream), class_of(source.file, fields)))


def class_of(file: File, fields: Fields) -> str | None:
    """Return an image file's class name: the first folder in its path; None directly in the source."""
    folder, slash, _ = file.name.partition("/")
    if slash and fields.label:
        return folder
    return None


def check_idx(source: OpenFile, fields: Fields) -> Skip | None:
    """Return a Skip if the headers of images and labels cannot be read or count differently."""
    count, *_ = _read_header(source.stream)
    if source.file.other is None or not fields.label:
        return None
    with open_piece(full_piece(source.file.other)) as labels:
        (num_labels,) = _read_sizes(labels.stream, 1)
    if num_labels == count:
        return None
    detail = f"{source.name} has {count:,} images, and {source.file.other.name} {num_labels:,} labels"
    return Skip(source.name, "labels of another number", detail, is_fault=True)


def read_idx(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield one image per entry, with its number from 0 in its name."""
    count, *shape = _read_header(source.stream)
    labels = None
    if source.file.other is not None and fields.label:
        labels = read_idx_labels(source.file.other)
        if len(labels) != count:
            raise FileContentError(f"it has {count:,} images, but its labels are {len(labels):,}")
    size = shape[0] * shape[1] * shape[2]
    for number in range(count):
        content = source.stream.read(size)
        if len(content) < size:
            # A damaged compressed stream raises its own reason here.
            source.stream.read(1)
            raise FileContentError(f"it ends after {number:,} of {count:,} images")
        pixels = np.frombuffer(content, np.uint8).reshape(shape)
        label = None
        if labels is not None:
            label = int(labels[number])
        yield Document(f"{source.name}:{number}", "", image=RawImage(pixels, label))
    if source.stream.read(1):
        raise FileContentError("there is more behind its last image")


def read_idx_labels(file: File) -> np.ndarray:
    """Return all labels in a file, uint8 [N]; raise FileContentError if it is damaged."""
    with open_piece(full_piece(file)) as source:
        (count,) = _read_sizes(source.stream, 1)
        check_length(count)
        content = source.stream.read(count + 1)
    if len(content) != count:
        raise FileContentError(f"{file.name} does not have the {count:,} labels in its header")
    return np.frombuffer(content, np.uint8)


def _read_header(stream: BinaryIO) -> tuple[int, int, int, int]:
    """Return count, height, width and channels from the header of images."""
    sizes = _read_sizes(stream, 3, 4)
    count, height, width = sizes[:3]
    channels = sizes[3] if len(sizes) == 4 else 1
    if not (1 <= height <= MOST_SIDE and 1 <= width <= MOST_SIDE) or channels not in CHANNELS:
        raise FileContentError(f"its header has images of {height} x {width} x {channels} values")
    return count, height, width, channels


def _read_sizes(stream: BinaryIO, *dimensions: int) -> tuple[int, ...]:
    """Return the sizes in a header; raise FileContentError unless it has bytes in so many ``dimensions``."""
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _UNSIGNED_BYTES or head[3] not in dimensions:
        allowed = " or ".join(map(str, dimensions))
        raise FileContentError(f"it is no IDX file of bytes in {allowed} dimensions (it begins with {head.hex()})")
    sizes = stream.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise FileContentError("it ends in its header")
    return struct.unpack(f">{head[3]}I", sizes)
