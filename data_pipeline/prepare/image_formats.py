"""Chooses the format for a folder of images: shape, classes and palette, before any image is encoded."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import xxhash

from data_pipeline.prepare.encode_images import UNREADABLE
from data_pipeline.prepare.image_source import ImageSource
from data_pipeline.prepare.images.fit_palette import check_colors, fit_palette
from data_pipeline.prepare.images.image_rule import ImageRule
from data_pipeline.prepare.readers.idx_files import IMAGE
from data_pipeline.prepare.source_items import Document, FileContentError, Skip
from data_pipeline.prepare.source_reader import SourceReader
from longctx.errors import DataError
from longctx.images.image_format import CHANNELS, MOST_SIDE, ImageFormat, to_units
from longctx.integer_hash import mix64_array
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from longctx.tokenizer.tokenizer_base import Tokenizer

_SAMPLED_IMAGES, _SAMPLED_PIXELS = 1024, 1 << 16
"""Images and pixels in the sample from which a palette is made."""
_PIXELS_OF_IMAGE = 1 << 10
"""Maximum sampled pixels per image, if there are few images."""

Say = Callable[[str], None]
_Sampled = tuple[int, str, np.ndarray]
"""Negative hash, name and sampled pixels of an image."""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The user's choices about a new folder's format."""

    size: tuple[int, int] | None = None
    """Height and width to which every image is scaled and cut; None: as the first image."""
    channels: int | None = None
    """Channels to which every image is converted; None: as the first image."""
    colors: int = 0
    """Palette size; 0: no palette."""

    def __post_init__(self) -> None:
        """Raise DataError for a value out of range."""
        if self.size is not None and not all(1 <= side <= MOST_SIDE for side in self.size):
            height, width = self.size
            raise DataError(f"--image-size {height}x{width}: both sides must be from 1 to {MOST_SIDE} pixels.")
        if self.channels is not None and self.channels not in CHANNELS:
            raise DataError(f"--channels {self.channels} must be 1 (grey) or 3 (color).")
        if self.colors:
            check_colors(self.colors)


_NO_OPTIONS = ImageOptions()


def choose_format(
    source: ImageSource,
    options: ImageOptions = _NO_OPTIONS,
    *,
    reused: Tokenizer | None = None,
    say: Say = lambda message: None,
    reading: Callable[[int], object] = lambda bytes_read: None,
) -> tuple[ImageTokenizer, ImageRule]:
    """Return the format for a source's images in a tokenizer's place, and the rule by which images get their shape.

    The first readable image sets height, width and channels, unless ``options`` do. ``reused`` is another folder's
    format: its shape, classes and palette apply. A palette is fitted to a sample of all images; ``reading`` then
    receives the bytes passed, and ``say`` its error. The result does not depend on workers.

    Raises DataError if options contradict the reused format, or if the source has classes that it lacks.
    """
    if reused is not None:
        return _reused_format(source, options, reused, say)
    rule = ImageRule(size=options.size, channels=options.channels)
    name, pixels = _first_image(source, rule)
    rule = replace(rule, shape_from=name)
    height, width, channels = pixels.shape
    found = ImageFormat(height=height, width=width, channels=channels, classes=source.classes)
    if options.colors:
        sample = _sample_pixels(source, rule, found, reading)
        palette = fit_palette(sample, options.colors)
        say(
            f"palette: {options.colors} colors from {len(sample):,} pixels, with a mean squared error of "
            f"{palette.error:.1f} per value (0 to 255)"
        )
        found = replace(found, palette=tuple(map(tuple, to_units(palette.colors).tolist())))
    return ImageTokenizer.of(found, Path(source.spec)), rule


def _reused_format(
    source: ImageSource, options: ImageOptions, reused: Tokenizer, say: Say
) -> tuple[ImageTokenizer, ImageRule]:
    """Return another folder's format, with the source's classes if it has none."""
    if not isinstance(reused, ImageTokenizer):
        raise DataError(f"--tokenizer {reused.path} is a text tokenizer. Name a folder built with --kind images.")
    found = reused.format
    size = (found.height, found.width)
    if options.size not in (None, size):
        raise DataError(
            f"--image-size {options.size[0]}x{options.size[1]} differs from the format in {reused.path}, which has "
            f"{size[0]}x{size[1]}. Leave out --tokenizer, or set --image-size {size[0]}x{size[1]}."
        )
    if options.channels not in (None, found.channels):
        raise DataError(
            f"--channels {options.channels} differs from the format in {reused.path}. Leave out --tokenizer, or set "
            f"--channels {found.channels}."
        )
    if options.colors not in (0, found.num_colors):
        has = f"{found.num_colors} colors" if found.palette else "no palette"
        raise DataError(
            f"--palette {options.colors} differs from the format in {reused.path}, which has {has}. Leave out "
            "--palette or --tokenizer."
        )
    rule = ImageRule(size=options.size, channels=options.channels, shape_from=str(reused.path))
    if not found.classes and source.classes:
        say(f"{reused.path} has no classes: taking the {len(source.classes)} classes of {source.spec}")
        return ImageTokenizer.of(replace(found, classes=source.classes), reused.path), rule
    _check_classes(source, found, reused.path)
    return reused, rule


def _check_classes(source: ImageSource, found: ImageFormat, path: Path) -> None:
    """Raise DataError if a source's classes are not those of a reused format."""
    if found.classes and not source.classes:
        raise DataError(
            f"{source.spec} has no labels, but the format in {path} has {len(found.classes)} classes. Leave out "
            "--tokenizer, or use the format of images without classes."
        )
    # Numbers are indices in any list of classes, so only their range counts.
    are_indices = source.classes == tuple(map(str, range(len(source.classes))))
    unknown = [name for name in source.classes if name not in found.classes]
    if are_indices:
        unknown = list(source.classes[len(found.classes) :])
    if unknown:
        shown = ", ".join(unknown[:6]) + (", …" if len(unknown) > 6 else "")
        raise DataError(
            f"{source.spec} has {len(unknown)} classes beyond the {len(found.classes)} of the format in {path}: "
            f"{shown}.\nLeave them out with --exclude, or build without --tokenizer."
        )


def _first_image(source: ImageSource, rule: ImageRule) -> tuple[str, np.ndarray]:
    """Return the name and pixels of the first readable image after conversion; raise DataError if there is none."""
    reader = SourceReader(source.read_as)
    for document in reader.documents(source.pieces()):
        assert document.image is not None
        try:
            return document.name, rule.pixels(document.image.content)
        except FileContentError as error:
            reader.leave_out(Skip(document.name, UNREADABLE, str(error), is_fault=True))
    for skip in source.listing_skipped:
        reader.note(skip)
    source.left_out = reader.left_out
    raise DataError(source.no_documents())


def _sample_pixels(
    source: ImageSource, rule: ImageRule, image_format: ImageFormat, reading: Callable[[int], object]
) -> np.ndarray:
    """Return pixels from images all over the source, uint8 [N, C].

    The images are those whose names have the smallest hashes, and so are an image's pixels: the sample depends neither
    on the order of reading nor on a generator. Only candidates are decoded.
    """
    # A heap of the images so far, the largest hash on top: it leaves when a smaller one comes.
    heap: list[_Sampled] = []
    for hash, document in _candidates(source, heap, reading):
        assert document.image is not None
        try:
            pixels = rule.pixels(document.image.content)
        except FileContentError:
            # The build reports it.
            continue
        rule.check_shape(document.name, pixels, image_format)
        entry = (-hash, document.name, _some_pixels(pixels, hash))
        if len(heap) < _SAMPLED_IMAGES:
            heapq.heappush(heap, entry)
        else:
            heapq.heapreplace(heap, entry)
    per_image = max(1, _SAMPLED_PIXELS // len(heap))
    return np.concatenate([pixels[:per_image] for _, _, pixels in sorted(heap, reverse=True)])


def _candidates(
    source: ImageSource, heap: list[_Sampled], reading: Callable[[int], object]
) -> Iterator[tuple[int, Document]]:
    """Yield the images that belong into a sample, so far in ``heap``, each with the hash of its name."""

    def belongs(name: str) -> bool:
        return len(heap) < _SAMPLED_IMAGES or _hash(name) < -heap[0][0]

    passed = 0
    reader = SourceReader(source.read_as)
    for piece in source.pieces():
        # The name of an image file is known before it is read.
        if piece.file.format.kind != IMAGE or belongs(piece.file.name):
            for document in reader.documents([piece]):
                reading(passed + reader.bytes_read)
                if belongs(document.name):
                    yield _hash(document.name), document
        passed += piece.size
        reading(passed)


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode())


def _some_pixels(pixels: np.ndarray, hash: int) -> np.ndarray:
    """Return an image's pixels in an order of their own, at most ``_PIXELS_OF_IMAGE``, uint8 [n, C]."""
    flat = pixels.reshape(-1, pixels.shape[2])
    order = np.argsort(mix64_array(np.arange(len(flat), dtype=np.uint64) ^ np.uint64(hash)), kind="stable")
    return flat[order[:_PIXELS_OF_IMAGE]].copy()
