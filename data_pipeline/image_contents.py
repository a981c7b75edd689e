"""Contents of a folder of images: shape, images per class, and a picture of some of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_pipeline.prepare.images.contact_sheet import draw_sheet
from data_pipeline.shards.reader import ShardSet, shard_labels
from longctx.errors import ConfigError, DataError
from longctx.files import write_atomically

SHEET_IMAGES = 64
"""Images on a picture."""


@dataclass(frozen=True, kw_only=True)
class ImageContents:
    """Shape and classes of a folder of images."""

    height: int
    width: int
    channels: int
    colors: int
    """Palette size; 0 if tokens are the pixels' values."""
    tokens_per_image: int
    classes: list[str]
    """Class names in label order; empty without classes."""
    images_per_class: list[int]


def image_contents(shards: ShardSet) -> ImageContents:
    """Return the contents of a folder of images; reads all labels, 4 bytes per image."""
    found = shards.image_format
    counts = np.bincount(_labels(shards, len(found.classes)) + 1, minlength=len(found.classes) + 1)
    return ImageContents(
        height=found.height,
        width=found.width,
        channels=found.channels,
        colors=found.num_colors,
        tokens_per_image=found.num_tokens,
        classes=list(found.classes),
        images_per_class=counts[1:].tolist(),
    )


def write_sheet(folder: str | Path, file: Path) -> list[str]:
    """Write a PNG file with up to ``SHEET_IMAGES`` images, as equally from all classes as possible; return their names.

    Raises DataError unless ``folder`` contains images, and ConfigError for a file that is not named as a PNG file.
    """
    if file.suffix.lower() != ".png":
        raise ConfigError(f"--picture {file} is written as PNG. Name it {file.with_suffix('.png')}.")
    shards = ShardSet.open(folder)
    found = shards.image_format
    labels = _labels(shards, len(found.classes))
    numbers = _by_turns(labels)[:SHEET_IMAGES]
    # Grouped by class; within a class in the folder's order.
    numbers = numbers[np.lexsort((numbers, labels[numbers]))]
    shards.check_files(numbers.tolist())
    images = [found.pixels_of(shards.document(number)) for number in numbers.tolist()]
    names = [shards.name(number) for number in numbers.tolist()]
    captions = [name.rpartition("/")[2] for name in names]
    if found.classes:
        captions = [found.classes[label] for label in labels[numbers].tolist()]
    title = f"{folder}: {len(images)} of {shards.num_documents:,} images, {found.describe()}"
    write_atomically(file, draw_sheet(images, captions, title))
    return names


def _labels(shards: ShardSet, num_classes: int) -> np.ndarray:
    """Return the class index of every image, int32 [N]; raise DataError if one is beyond the classes."""
    numbers = range(len(shards.manifest.shards))
    labels = np.concatenate([np.empty(0, np.int32), *(shard_labels(shards, number) for number in numbers)])
    if len(labels) and not -1 <= labels.min() <= labels.max() < max(num_classes, 1):
        raise DataError(
            f"{shards.folder} has labels beyond its {num_classes} classes. Run `longctx data verify {shards.folder}`."
        )
    return labels


def _by_turns(labels: np.ndarray) -> np.ndarray:
    """Return all image numbers, ordered so that the first of each class come first, then the second, and so on."""
    by_class = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[by_class], labels[by_class], side="left")
    rank = np.arange(len(labels)) - starts
    return by_class[np.argsort(rank, kind="stable")]
