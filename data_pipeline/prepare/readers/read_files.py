"""Reads one file, or checks it before reading; the file name's suffix selects the reader."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator

import pyarrow as pa

from data_pipeline.prepare.joining import begin_of
from data_pipeline.prepare.readers.csv_rows import read_csv, read_tsv
from data_pipeline.prepare.readers.idx_files import IDX, IMAGE, check_idx, read_idx, read_image_file
from data_pipeline.prepare.readers.image_tables import check_image_table, read_image_table
from data_pipeline.prepare.readers.json_values import read_json_records, read_lines
from data_pipeline.prepare.readers.open_file import OpenFile, open_piece
from data_pipeline.prepare.readers.parallel_text import CATALOGUE, LINES, check_lines, read_catalogue, read_lines_of_two
from data_pipeline.prepare.readers.plain_text import check_text, read_text
from data_pipeline.prepare.readers.records import ITEM_CHARACTERS, allowance, check_expansion, no_json
from data_pipeline.prepare.readers.table_rows import check_arrow, check_parquet, read_arrow, read_parquet
from data_pipeline.prepare.source_items import (
    IMAGES,
    Document,
    Fields,
    File,
    FileContentError,
    FilePiece,
    Item,
    Joined,
    Skip,
    full_piece,
)
from data_pipeline.stores.urls import ObjectPath
from longctx.errors import DataError
from longctx.untrusted import git_lfs

READ_ERRORS = (FileContentError, OSError, pa.ArrowException, UnicodeDecodeError)
"""Errors that end a file. In a damaged file even Arrow's column names may be invalid UTF-8."""
NUM_CHECK_RECORDS = 64
ACCESS_ERROR = "cannot be read"
"""Reason for a file that the system refuses to open."""
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


def read_documents(piece: FilePiece, fields: Fields) -> Iterator[tuple[Item, int]]:
    """Yield a file piece's documents, each with the number of bytes on disk read so far.

    A damaged file ends with a Skip that reports it, after the documents before the damage. Raises DataError if the
    system fails to read a file that could be opened: another attempt could give other documents.
    """
    if piece.joined is not None:
        yield from _read_joined(piece.joined, fields)
        return
    file = piece.file
    reader = _reader_of(file, fields)
    documents = items = characters = 0
    try:
        with open_piece(piece) as source:
            if git_lfs.is_pointer(source.head()):
                yield _pointer(file), piece.size
                return
            for item in reader(source, fields):
                valid, size = _check(item, file.format.kind)
                if isinstance(valid, Document):
                    documents += 1
                    characters += size
                items += 1
                check_expansion(characters + items * ITEM_CHARACTERS, piece.size)
                yield valid, source.bytes_read
    except READ_ERRORS as error:
        if isinstance(error, OSError) and error.errno:
            raise DataError(
                f"{file.path} cannot be read ({error.strerror}).\nRepair the file or exclude {file.name!r}."
            ) from error
        yield _invalid_file_skip(file, error, documents), piece.size
        return
    # A file piece may contain only blank lines, which does not make its file empty.
    if not items and piece.stop is None:
        yield Skip(file.name, "empty"), piece.size


def _read_joined(joined: Joined, fields: Fields) -> Iterator[tuple[Item, int]]:
    """Yield a joined directory's skips, file by file, and then its document if there is any text."""
    # Join once at the end: otherwise a document with many files would be copied for each file.
    texts: list[str] = []
    passed = characters = 0
    # Limits per file add up to more than one document's limit, so check the total as well.
    most = allowance(sum(file.size for file in joined.files))
    for file in joined.files:
        for item, bytes_read in read_documents(full_piece(file), fields):
            if isinstance(item, Skip):
                yield item, passed + bytes_read
            elif (characters := characters + len(item.text)) > most:
                yield Skip(file.name, "damaged", f"the files before it become {most:,}", is_fault=True), passed
            else:
                before = ""
                if texts:
                    before = texts[-1]
                texts += [begin_of(joined, file, before), item.text]
        passed += file.size
    if texts:
        yield Document(joined.name, "".join(texts)), passed


def check_file(file: File, fields: Fields) -> Skip | None:
    """Check a file's schema or first records; return a Skip if the file is unusable."""
    # Opening an object costs a request and reveals nothing about a text.
    if file.format.kind == "text" and isinstance(file.path, ObjectPath):
        return None
    try:
        with open_piece(full_piece(file)) as source:
            if git_lfs.is_pointer(source.head()):
                return _pointer(file)
            checks = _IMAGE_CHECKS if fields.kind == IMAGES else _CHECKS
            return checks.get(file.format.kind, _check_records)(source, fields)
    except READ_ERRORS as error:
        if isinstance(error, OSError) and error.errno:
            return Skip(file.name, ACCESS_ERROR, error.strerror or str(error), is_fault=True)
        return _invalid_file_skip(file, error, documents=0)


def _pointer(file: File) -> Skip:
    """Return the skip for a file that Git LFS has not fetched."""
    return Skip(file.name, "Git LFS pointer", git_lfs.FETCH_HINT, is_fault=True)


def _invalid_file_skip(file: File, error: BaseException, documents: int) -> Skip:
    """Return the skip for the rest of a damaged file."""
    # Arrow's messages may continue with hints for programmers.
    detail = (str(error) or type(error).__name__).splitlines()[0]
    return Skip(file.name, "damaged", f"{detail}; {documents} documents before it are used", is_fault=True)


def _check(item: Item, kind: str) -> tuple[Item, int]:
    """Return the item, or a Skip if no tokenizer can reproduce its text, with its length in characters."""
    if isinstance(item, Skip):
        return item, 0
    if item.image is not None:
        size = len(item.image.content)
        if not size:
            return Skip(item.name, "empty", is_fault=True), 0
        return item, size
    if not item.text:
        return Skip(item.name, "empty"), 0
    text = item.text
    try:
        # Check all strings, not only the messages' text: a template may render any of them.
        conversations = [item.conversation]
        if item.preference is not None:
            conversations = [item.preference.first, item.preference.second]
        parts = [[one.messages, one.tools] for one in conversations if one is not None]
        if parts:
            text = json.dumps(parts, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        # These formats' readers replace bytes that are not UTF-8 by surrogates in this range.
        if kind in ("csv", "tsv", "json") and _ESCAPED_BYTE.search(text):
            return Skip(item.name, "not UTF-8", is_fault=True), 0
        # JSON can contain half a surrogate pair, which is not a character.
        return Skip(item.name, "lone surrogate"), 0
    except (TypeError, ValueError, RecursionError) as error:
        return no_json(item.name, error), 0
    return item, len(text)


def _reader_of(file: File, fields: Fields) -> Callable[[OpenFile, Fields], Iterator[Item]]:
    """Return the reader for a file's format; tables with images have another one than tables with texts."""
    if fields.kind == IMAGES:
        return _IMAGE_READERS[file.format.kind]
    return _READERS[file.format.kind]


def _check_records(source: OpenFile, fields: Fields) -> Skip | None:
    """Return the first record's fault if all first records are unusable."""
    first_fault = None
    for item in itertools.islice(_reader_of(source.file, fields)(source, fields), NUM_CHECK_RECORDS):
        if not isinstance(item, Skip) or not item.is_fault:
            return None
        first_fault = first_fault or item
    if first_fault is None:
        return None
    return Skip(source.name, first_fault.reason, first_fault.detail, is_fault=True)


_READERS: dict[str, Callable[[OpenFile, Fields], Iterator[Item]]] = {
    "text": read_text,
    "lines": read_lines,
    "json": read_json_records,
    "csv": read_csv,
    "tsv": read_tsv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    LINES: read_lines_of_two,
    CATALOGUE: read_catalogue,
}
_CHECKS: dict[str, Callable[[OpenFile, Fields], Skip | None]] = {
    "text": check_text,
    "parquet": check_parquet,
    "arrow": check_arrow,
    LINES: check_lines,
}
_IMAGE_READERS: dict[str, Callable[[OpenFile, Fields], Iterator[Item]]] = {
    IMAGE: read_image_file,
    IDX: read_idx,
    "parquet": read_image_table,
}
_IMAGE_CHECKS: dict[str, Callable[[OpenFile, Fields], Skip | None]] = {
    IDX: check_idx,
    "parquet": check_image_table,
}
