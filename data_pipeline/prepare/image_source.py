"""Image sources: image files in folders by class, IDX files, and Parquet tables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.prepare.left_out import LeftOut
from data_pipeline.prepare.listing import Selection, list_files, list_source
from data_pipeline.prepare.readers.idx_files import IDX, IMAGE, SUFFIXES, class_of, image_formats, read_idx_labels
from data_pipeline.prepare.readers.image_tables import class_names, label_type, read_labels
from data_pipeline.prepare.readers.open_file import open_piece
from data_pipeline.prepare.readers.read_files import READ_ERRORS, check_file
from data_pipeline.prepare.readers.table_rows import schema_of_parquet
from data_pipeline.prepare.source_items import IMAGES, Fields, File, full_piece
from data_pipeline.prepare.source_reader import strict_read_error
from data_pipeline.prepare.sources import TextSource, locate_source
from data_pipeline.stores.urls import ObjectPath
from longctx.errors import DataError
from longctx.images.image_format import MOST_CLASSES

logger = logging.getLogger(__name__)

IMAGE_FIELD, LABEL_FIELD = "image", "label"
"""Default columns in tables, as in Hugging Face's data sets."""
_TITLES = {IMAGE: "image files", IDX: "IDX files", "parquet": "Parquet tables"}


class ImageSource(TextSource):
    """Images that can be read repeatedly, always in the same order; see ``open_images``."""

    def __init__(self, spec: str, *, classes: tuple[str, ...], **options: Any) -> None:
        super().__init__(spec, **options)
        self.classes = classes
        """Class names in label order; empty if the images have no labels."""

    def no_documents(self) -> str:
        """Return the error message for a source that gave no image."""
        return _no_images(self.spec, self.left_out)


def open_images(
    spec: str | Path,
    *,
    image_field: str = IMAGE_FIELD,
    label_field: str = LABEL_FIELD,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    strict: bool = False,
) -> ImageSource:
    """Open the images at ``spec``: list the files and find the classes, without decoding an image.

    ``spec`` is a folder, a file or an object store URL with one of: image files, whose class is the first folder in
    their path; IDX files; Parquet tables with the columns ``image_field`` and ``label_field``. Without a label column,
    with images directly in the source, or with an empty ``label_field``, the images have no classes. Other files are
    left out and listed, and so are unreadable ones, which raise an error with ``strict``.

    Raises ``DataError`` if there are no images, or several kinds of files, or only some with labels.
    """
    kind, root = locate_source(spec)
    if kind == "stdlib":
        raise DataError("source=stdlib contains no images. Name a folder or file with images.")
    fields = Fields(text=image_field, kind=IMAGES, label=label_field)
    selection = Selection(include=include, exclude=exclude)
    if isinstance(root, ObjectPath):
        listing = list_source(root, selection)
    else:
        listing = list_files(root, selection, python_only=False)
    unused = selection.unused()
    if unused:
        logger.warning("%s: pattern %s matches no file", spec, ", ".join(map(repr, unused)))
    candidates, others = image_formats(listing.files)
    # An image file is checked when it is decoded: a million of them are too many to open twice.
    results = [(file, None if file.format.kind == IMAGE else check_file(file, fields)) for file in candidates]
    files = [file for file, problem in results if problem is None]
    left_out = listing.left_out + others + [problem for _, problem in results if problem is not None]
    problems = [skip for skip in left_out if skip.is_fault]
    if strict and problems:
        raise DataError(strict_read_error(str(spec), problems[0]))
    if not files:
        raise DataError(_no_images(str(spec), LeftOut(left_out)))
    _check_one_kind(str(spec), files)
    if problems:
        logger.warning("%s: left out %s", spec, "; ".join(LeftOut(problems).lines()))
    return ImageSource(
        str(spec),
        classes=_find_classes(str(spec), files, fields),
        kind=kind,
        files=files,
        left_out=left_out,
        fields=fields,
        selection=selection,
        strict=strict,
    )


def _check_one_kind(spec: str, files: Sequence[File]) -> None:
    """Raise DataError for several kinds of files: their labels would not mean the same."""
    first = {file.format.kind: file.name for file in reversed(files)}
    if len(first) > 1:
        shown = " and ".join(f"{_TITLES[kind]} ({name})" for kind, name in first.items())
        raise DataError(f"source={spec} mixes {shown}. Select one kind with --include, such as --include '*.parquet'.")


def _find_classes(spec: str, files: Sequence[File], fields: Fields) -> tuple[str, ...]:
    """Return the class names in label order; raise DataError if only some of the files have labels."""
    if not fields.label:
        return ()
    find = {IMAGE: _folder_classes, IDX: _idx_classes, "parquet": _table_classes}[files[0].format.kind]
    try:
        return find(spec, files, fields)
    except READ_ERRORS as error:
        raise DataError(
            f"source={spec}: the labels cannot be read ({error}). Repair the files, or read the images without "
            "labels: --label-field ''."
        ) from error


def _folder_classes(spec: str, files: Sequence[File], fields: Fields) -> tuple[str, ...]:
    """Return the first folders in the files' paths, sorted."""
    by_class = {class_of(file, fields): file.name for file in files}
    if None not in by_class:
        return tuple(sorted(name for name in by_class if name is not None))
    bare = by_class.pop(None)
    if by_class:
        raise DataError(
            f"source={spec} has images in folders by class, such as {next(iter(by_class.values()))}, and others "
            f"outside, such as {bare}.\nMove those into a class's folder, leave them out with --exclude, or read all "
            "images without labels: --label-field ''."
        )
    return ()


def _idx_classes(spec: str, files: Sequence[File], fields: Fields) -> tuple[str, ...]:
    """Return the numbers up to the largest label."""
    labelled = [file for file in files if file.other is not None]
    if not labelled:
        return ()
    _check_all_labelled(spec, files, labelled)
    return _class_numbers(max(int(read_idx_labels(file.other).max(initial=0)) for file in labelled if file.other), spec)


def _table_classes(spec: str, files: Sequence[File], fields: Fields) -> tuple[str, ...]:
    """Return the names in the tables' schemas, otherwise the distinct texts or the numbers up to the largest label."""
    schemas = []
    for file in files:
        with open_piece(full_piece(file)) as source:
            schemas.append(schema_of_parquet(source))
    types = {label_type(schema, fields): file for schema, file in zip(schemas, files, strict=True)}
    if list(types) == [""]:
        if fields.label != LABEL_FIELD:
            columns = ", ".join(schemas[0].names)
            raise DataError(f"source={spec} has no column {fields.label!r} with labels; its columns: {columns}.")
        return ()
    _check_all_labelled(
        spec, files, [file for schema, file in zip(schemas, files, strict=True) if label_type(schema, fields)]
    )
    named = {class_names(schema, fields.label): file for schema, file in zip(schemas, files, strict=True)}
    for found in (types, named):
        if len(found) > 1:
            one, other = list(found.values())[:2]
            raise DataError(
                f"source={spec}: {one.name} and {other.name} label their images differently (column "
                f"{fields.label!r}). Build them separately."
            )
    (names,) = named
    if names:
        return names
    labels: set[Any] = set()
    for file in files:
        labels |= read_labels(file, fields)
    if "texts" in types:
        return tuple(sorted(labels))
    return _class_numbers(max(labels, default=0), spec)


def _check_all_labelled(spec: str, files: Sequence[File], labelled: Sequence[File]) -> None:
    """Raise DataError unless all files have labels."""
    without = next((file for file in files if file not in labelled), None)
    if without is not None:
        raise DataError(
            f"source={spec}: {labelled[0].name} has labels, and {without.name} has none. Leave it out with --exclude, "
            "or read all images without labels: --label-field ''."
        )


def _class_numbers(largest: int, spec: str) -> tuple[str, ...]:
    """Return numbers as class names."""
    if largest >= MOST_CLASSES:
        raise DataError(
            f"source={spec} has label {largest}, but numbers are class indices below {MOST_CLASSES}. Number the "
            "classes from 0, or name them by texts."
        )
    return tuple(map(str, range(largest + 1)))


def _no_images(spec: str, left_out: LeftOut) -> str:
    """Return the error message for a source without images."""
    reasons = "\n".join(f"  {line}" for line in left_out.lines()) or "  it is empty"
    return (
        f"source={spec} contains no usable image:\n{reasons}\nUse {' '.join(SUFFIXES)} files in a folder per class, "
        "IDX files (…-images-idx3-ubyte.gz), or .parquet with an image column (--image-field)."
    )
