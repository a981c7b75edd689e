"""``shard_problems``: finds all problems in a folder's shards, even if its checksums match."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_pipeline.shards.block_checksum import (
    RECOVERY_HINT,
    checksum_blocks,
    checksum_error,
    mismatched_ranges,
    read_checksum_file,
)
from data_pipeline.shards.local_copies import LocalCopy, extra_files
from data_pipeline.shards.manifest import MANIFEST_FILE, Manifest, ShardEntry, length_histogram
from data_pipeline.shards.mapped import MappedShard, check_shard_size
from data_pipeline.shards.shard_writer import token_dtype
from longctx.errors import DataError
from longctx.images.image_format import ImageFormat

_TOKENS = 1 << 22
"""Tokens examined together: comparisons allocate memory in addition to the mapped file."""
_SHOWN = 8
"""Maximum damaged ranges reported individually per file."""


def shard_problems(
    folder: Path,
    manifest: Manifest,
    *,
    padding: int | None,
    image_format: ImageFormat | None = None,
    copy: LocalCopy | None = None,
) -> Iterator[str]:
    """Yield each problem in the shards as a sentence. Reads every byte, one file after the other.

    ``padding`` is an id that documents must not contain; None if they may contain any id. Images are also compared with
    ``image_format``; None for texts, or if it is unknown. If ``folder`` is a ``copy``, each shard is fetched for the
    check and removed again, so that only one takes space at a time.
    """
    if copy is None:
        extra_paths = [folder / name for name in extra_files(folder, manifest)]
    else:
        extra_paths = [copy.origin / name for name in copy.extra_files()]
    for path in extra_paths:
        yield f"{path} is not listed in the manifest."
    documents = tokens = 0
    lengths: list[np.ndarray] = []
    for entry in manifest.shards:
        documents += entry.documents
        tokens += entry.tokens
        # Report every damaged file, not only the first.
        checksum_problems = list(_checksum_problems(folder, entry, copy))
        yield from checksum_problems
        # Damaged offsets would give misleading content errors.
        if not checksum_problems:
            yield from _content_problems(folder, manifest, entry, padding, lengths, image_format)
        # Keep only one shard on disk at a time.
        if copy is not None:
            copy.drop(entry)
    # Entries may match their files while the totals do not: an entry is missing or duplicated.
    if (documents, tokens) != (manifest.documents, manifest.tokens):
        yield f"{folder}: the shards' documents and tokens do not add up to the manifest's totals."
    elif len(lengths) == len(manifest.shards):
        actual_lengths = length_histogram(np.concatenate([np.empty(0, np.int64), *lengths]))
        if actual_lengths != manifest.length_histogram:
            yield f"{folder}: the document lengths do not match the histogram in {MANIFEST_FILE}."


def _checksum_problems(folder: Path, entry: ShardEntry, copy: LocalCopy | None) -> Iterator[str]:
    """Yield the damaged ranges in a file or in its block checksums."""
    path = folder / entry.file
    try:
        if copy is not None:
            copy.fetch(entry)
        check_shard_size(folder, entry)
        whole, sums = checksum_blocks(path)
    except DataError as error:
        yield str(error)
        return
    except OSError as error:
        yield f"{path} cannot be read ({error.strerror or error}). {RECOVERY_HINT}"
        return
    ranges: list[tuple[int, int]] = []
    if entry.sums:
        try:
            expected = read_checksum_file(folder, entry)
        except DataError as error:
            yield str(error)
        else:
            if len(expected) == len(sums):
                ranges = mismatched_ranges(sums, expected, entry.bytes)
    for begin, end in ranges[:_SHOWN]:
        yield str(checksum_error(path, begin, end))
    if len(ranges) > _SHOWN:
        yield f"{path} is damaged in {len(ranges) - _SHOWN} more places."
    if not ranges and whole != entry.xxh3_128:
        yield f"{path} is damaged: its checksum does not match {MANIFEST_FILE}. {RECOVERY_HINT}"


def _content_problems(
    folder: Path,
    manifest: Manifest,
    entry: ShardEntry,
    padding: int | None,
    lengths: list[np.ndarray],
    image_format: ImageFormat | None,
) -> Iterator[str]:
    """Yield problems in a file with a matching checksum; append its documents' lengths to ``lengths``."""
    path = folder / entry.file
    # A checksum proves that the file is as written, not that the written content is valid.
    try:
        shard = MappedShard.open(folder, entry, verify=True)
        shard.check_kind(manifest.kind)
        found = shard.target.lengths_of(np.arange(entry.documents))
        lengths.append(found)
        if shard.source is not None:
            shard.source.lengths_of(np.arange(entry.documents))
        if manifest.is_preferences:
            shard.second_starts(np.arange(entry.documents))
        num_targets = 0
        for row in range(entry.documents):
            shard.name(row)
            if manifest.has_paragraphs:
                shard.paragraphs(row)
            bounds = shard.target_runs(row)
            if bounds is not None:
                num_targets += int(bounds[1::2].sum() - bounds[::2].sum())
    except DataError as error:
        yield str(error)
        return
    if num_targets != entry.counted:
        yield f"{path} has {num_targets} counted tokens, but {MANIFEST_FILE} lists {entry.counted}."
    largest = 0
    for column in (shard.target, shard.source):
        if column is None:
            continue
        values = column.all_tokens()
        if values.dtype != token_dtype(manifest.vocab_size, images=manifest.is_images):
            yield f"{path} has ids of type {values.dtype}, which does not fit a vocabulary of {manifest.vocab_size}."
        padded = None
        for start in range(0, len(values), _TOKENS):
            part = values[start : start + _TOKENS]
            largest = max(largest, int(part.max()))
            if padding is not None and padded is None and (part == padding).any():
                padded = start + int((part == padding).argmax())
        if padded is not None:
            document = int(np.searchsorted(column.offsets, padded, side="right")) - 1
            yield f"{path} contains the padding id {padding} in document {document} ({shard.name(document)})."
    if largest >= manifest.vocab_size:
        yield f"{path} contains id {largest}, outside the vocabulary of {manifest.vocab_size}."
    elif entry.num_ids and entry.num_ids != largest + 1:
        yield f"{path} contains ids up to {largest}, but {MANIFEST_FILE} has num_ids={entry.num_ids}."
    if manifest.is_images and image_format is not None:
        yield from _image_problems(shard, image_format, found, largest)
    if manifest.is_preferences:
        yield from _label_problems(shard)
    invalid_source = shard.find_invalid_source(len(manifest.sources))
    if invalid_source is not None:
        yield f"{path} has documents from source {invalid_source}, but {MANIFEST_FILE} lists {len(manifest.sources)}."


def _label_problems(shard: MappedShard) -> Iterator[str]:
    """Yield the first label of a record with preferences that is neither 0 nor 1."""
    labels = shard.labels()
    invalid = np.flatnonzero((labels < 0) | (labels > 1))
    if len(invalid):
        row = int(invalid[0])
        yield f"{shard.path} has label {labels[row]} in {shard.name(row)}, which is neither 0 nor 1."


def _image_problems(
    shard: MappedShard, image_format: ImageFormat, lengths: np.ndarray, largest_id: int
) -> Iterator[str]:
    """Yield contradictions between a file's images, with these lengths and largest id, and their format."""
    other = np.flatnonzero(lengths != image_format.num_tokens)
    if len(other):
        name = shard.name(int(other[0]))
        yield (
            f"{shard.path} has {len(other)} images of another size than {image_format.num_tokens} tokens: {name} has "
            f"{lengths[other[0]]}."
        )
    # The palette's last id is the begin token, which the run adds.
    if largest_id >= image_format.num_ids:
        yield f"{shard.path} contains id {largest_id}, outside the palette of {image_format.num_ids} colors."
    # Without classes every label is -1.
    lowest, highest = 0, len(image_format.classes) - 1
    if not image_format.classes:
        lowest = highest = -1
    labels = shard.labels()
    invalid = np.flatnonzero((labels < lowest) | (labels > highest))
    if len(invalid):
        row = int(invalid[0])
        yield (
            f"{shard.path} has label {labels[row]} in {shard.name(row)}, but its {len(image_format.classes)} classes "
            f"allow {lowest} to {highest}."
        )
