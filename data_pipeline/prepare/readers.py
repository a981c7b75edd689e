"""Readers of one file: text, JSON Lines (also gzip and zstd), Parquet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.prepare.documents import Document, File, Item, Skip
from longctx.errors import DataError

_BINARY_PROBE_BYTES = 8192


def read(file: File, text_field: str) -> Iterator[Item]:
    """Yield the documents of one file; the ending of its name chooses the reader."""
    lowered = file.name.lower()
    reader = next((reader for ending, reader in _READERS.items() if lowered.endswith(ending)), _read_text)
    try:
        for item in reader(file, text_field):
            yield _check(item)
    except (OSError, EOFError, pa.ArrowException) as error:
        raise DataError(f"{file.path} cannot be read ({error}).\nMend the file or exclude {file.name!r}.") from error


def _check(item: Item) -> Item:
    """The item, or a Skip for a text that no tokenizer can give back."""
    if isinstance(item, Skip):
        return item
    if not item.text:
        return Skip(item.name, "empty")
    try:
        item.text.encode()
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair, which is no character.
        return Skip(item.name, "lone surrogate")
    return item


def _read_text(file: File, text_field: str) -> Iterator[Item]:
    """Yield the whole file as one document, bytes unchanged: no newline or byte-order-mark is touched."""
    content = file.path.read_bytes()
    # git's test for a binary file: a zero byte near the beginning.
    if b"\0" in content[:_BINARY_PROBE_BYTES]:
        yield Skip(file.name, "binary")
        return
    try:
        yield Document(file.name, content.decode())
    except UnicodeDecodeError:
        yield Skip(file.name, "not UTF-8")


def _read_jsonl(file: File, text_field: str) -> Iterator[Item]:
    """Yield the text in ``text_field`` of each line's JSON object; blank lines are ignored."""
    compression = {".gz": "gzip", ".zst": "zstd"}.get(file.path.suffix.lower())
    # Arrow's stream notices a cut-off gzip or zstd file; zstandard's own reader ends in silence.
    with pa.input_stream(str(file.path), compression=compression) as stream:
        for number, line in enumerate(_lines(cast(BinaryIO, stream)), start=1):
            name = f"{file.name}:{number}"
            if line.strip():
                yield Document(name, _text_of(line, text_field, f"{file.path}, line {number}"))


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines without their newline; only ``\\n`` ends one, as JSON Lines has it."""
    rest = b""
    # Not the stream's own lines: they also end at \r and at Unicode's line separators.
    while piece := stream.read(1 << 20):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _text_of(line: bytes, text_field: str, where: str) -> str:
    """The text of one line; ``DataError`` names ``where`` it stands and what it holds instead."""
    # utf-8-sig: the first line may begin with a byte-order mark.
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        # UnicodeDecodeError and JSONDecodeError are both.
        raise DataError(
            f"{where}: not JSON ({error}).\nEvery line must be an object like {{{text_field!r}: …}}."
        ) from error
    if not isinstance(entry, dict):
        raise DataError(
            f"{where}: a {type(entry).__name__} where an object is wanted.\n"
            f"Every line must be like {{{text_field!r}: …}}."
        )
    if not isinstance(entry.get(text_field), str):
        strings = [key for key, value in entry.items() if isinstance(value, str)]
        raise DataError(
            f"{where}: no text in field {text_field!r}.\n"
            f"Fields with text: {', '.join(map(repr, strings)) or 'none'}. Name the right one as text_field."
        )
    return entry[text_field]


def _read_parquet(file: File, text_field: str) -> Iterator[Item]:
    """Yield one document a row, read in batches of rows: a table larger than memory is no trouble."""
    with pq.ParquetFile(file.path) as table:
        schema = table.schema_arrow
        strings = [
            field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        if text_field not in strings:
            raise DataError(
                f"{file.path}: no text column {text_field!r}. "
                f"It has the columns {', '.join(map(repr, schema.names))}.\n"
                f"Columns with text: {', '.join(map(repr, strings)) or 'none'}. Name the right one as text_field."
            )
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=[text_field]):
            for text in cast(Iterable[str | None], batch.column(0).to_pylist()):
                name = f"{file.name}:{number}"
                number += 1
                if text is None:
                    yield Skip(name, "null")
                else:
                    yield Document(name, text)


_READERS: dict[str, Callable[[File, str], Iterator[Item]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".jsonl.zst": _read_jsonl,
    ".parquet": _read_parquet,
}
