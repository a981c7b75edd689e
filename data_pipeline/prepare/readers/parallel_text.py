"""Pairs in text files: two line-aligned files, or gettext catalogues.

Two files in a folder are the sides of pairs if their names differ only in their suffixes, and the suffixes are the
fields: with ``--source-field en --text-field de`` line n in ``news.de`` is the target for line n in ``news.en``.
Records in a ``.po`` file have the fields ``msgid`` and ``msgstr``.
"""

from __future__ import annotations

import codecs
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import BinaryIO

from data_pipeline.prepare.readers.open_file import OpenFile, open_piece
from data_pipeline.prepare.readers.records import Record, check_length, item_of, no_field, read_record_bytes
from data_pipeline.prepare.source_items import Fields, File, FileContentError, Format, Item, Skip, full_piece
from longctx.errors import ConfigError

LINES, CATALOGUE = "parallel", "po"
"""Format kinds."""
_READ_BYTES = 1 << 20
_FIELDS = ("msgid", "msgstr")


def match_pairs(files: Sequence[File], fields: Fields) -> list[File]:
    """Return the files with text files matched into pairs by name; target files are not listed separately."""
    texts = {file.name: file for file in files if file.format.kind == "text" and not file.format.is_explicit}
    targets = set[str]()
    found = []
    for file in files:
        base_name = _without_suffix(file, fields.source)
        other = None if base_name is None else texts.get(f"{base_name}.{fields.text}{file.format.compression}")
        if file.name in texts and other is not None:
            targets.add(other.name)
            found.append(replace(file, format=replace(file.format, kind=LINES), other=other))
        elif file.name in texts and _without_suffix(file, "po") is not None:
            found.append(replace(file, format=Format(CATALOGUE, file.format.compression, ".po")))
        else:
            found.append(file)
    return [file for file in found if file.name not in targets]


def _without_suffix(file: File, ending: str) -> str | None:
    """Return a file's name without this suffix, or None if the suffix differs."""
    plain = file.name.removesuffix(file.format.compression)
    return plain.removesuffix(f".{ending}") if plain.endswith(f".{ending}") else None


def check_lines(source: OpenFile, fields: Fields) -> Skip | None:
    """Compare the two files' line counts; return a Skip if they differ, because lines cannot be matched then."""
    assert source.file.other is not None, "a line-aligned file needs its other side"
    with open_piece(full_piece(source.file.other)) as target:
        counts = [_count_lines(side.stream) for side in (source, target)]
    if counts[0] == counts[1]:
        return None
    detail = f"{source.name} has {counts[0]:,} lines, and {source.file.other.name} {counts[1]:,}"
    return Skip(source.name, "sides of other lengths", detail, is_fault=True)


def _count_lines(stream: BinaryIO) -> int:
    count, last = 0, b"\n"
    while block := stream.read(_READ_BYTES):
        count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")


def read_lines_of_two(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield one pair per line number, counted from 1."""
    assert source.file.other is not None, "a line-aligned file needs its other side"
    with open_piece(full_piece(source.file.other)) as target:
        # Line counts matched earlier (``check_lines``), so a mismatch means that a file has changed since.
        lines = zip_longest(_lines(source.stream), _lines(target.stream))
        for number, lines_pair in enumerate(lines, start=1):
            if None in lines_pair:
                raise FileContentError(f"one side ends before line {number:,}, the other does not")
            values = dict(zip((fields.source, fields.text), lines_pair, strict=True))
            yield item_of(Record(f"{source.name}:{number}", values), fields)


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield lines without their line ends; raise FileContentError if one exceeds the maximum record length."""
    rest = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
    while block := stream.read(_READ_BYTES):
        *whole_lines, rest = (rest + block).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in whole_lines)
        check_length(len(rest))
    if rest:
        yield rest


def read_catalogue(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield a catalogue's pairs; obsolete and fuzzy entries are skipped."""
    try:
        import polib
    except ImportError as error:
        raise ConfigError(
            f"{source.name} requires polib, which is not installed: pip install 'longctx-train[po]'."
        ) from error
    missing = next((field for field in fields.names if field not in _FIELDS), "")
    if missing:
        yield no_field(source.name, missing, _FIELDS, _FIELDS)
        return
    try:
        # Parse our own temporary file: polib would interpret a text that happens to be a file name as that file.
        with tempfile.NamedTemporaryFile(suffix=".po") as copy:
            copy.write(read_record_bytes(source.stream))
            copy.flush()
            entries = polib.pofile(copy.name, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileContentError(f"it is no catalogue of gettext in UTF-8: {error}") from error
    except (OSError, ValueError) as error:
        # polib names the line and our temporary file; remove the latter.
        message = re.sub(r" in po file \S+", "", str(error))
        raise FileContentError(f"it is no catalogue of gettext: {message}") from error
    # polib provides no line numbers for entries, so names count entries.
    for number, entry in enumerate(entries, start=1):
        name = f"{source.name}:{number}"
        if entry.obsolete or entry.fuzzy:
            yield Skip(name, "obsolete" if entry.obsolete else "fuzzy")
            continue
        # Languages with more than two forms have no source text for the additional ones.
        forms = [(entry.msgid, entry.msgstr)]
        if entry.msgid_plural:
            forms = [(entry.msgid, entry.msgstr_plural.get(0)), (entry.msgid_plural, entry.msgstr_plural.get(1))]
        for texts in forms:
            yield item_of(Record(name, dict(zip(_FIELDS, texts, strict=True))), fields)
