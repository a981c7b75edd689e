"""Files of kilobytes that become gigabytes: each is left out by name, or cut where it grows, in bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.bounded import zstd_bomb
from tests.growing import MOST_MIB, grow

ACTION = """
from data_pipeline.prepare.sources import open_source
from longctx.errors import LongCtxError

def action(path):
    source = open_source(path)
    count = sum(1 for document in source)
    said = [f"{reason}: {examples[0]}" for reason, examples in source.left_out.examples.items()]
    return "; ".join([f"{count} documents", *said])
"""
MIB = 1 << 20


def many_frames() -> bytes:
    return zstandard.compress(b"") * 30_000 + zstd_bomb(1 << 32)


def skippable() -> bytes:
    return struct.pack("<II", 0x184D2A53, 0xFFFFFFFF) + b"x" * 100


def with_window(num_bytes: int) -> bytes:
    """The bomb with a window of 2 GiB."""
    bomb = bytearray(zstd_bomb(num_bytes))
    bomb[5] = 21 << 3
    return bytes(bomb)


def bzip2(num_bytes: int, what: bytes = b"a") -> bytes:
    return bz2.compress(what * (32 * MIB // len(what))) * (num_bytes // (32 * MIB))


def xz(num_bytes: int, what: bytes = b"a", **more: Any) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0} | more]
    return lzma.compress(what * (32 * MIB // len(what)), filters=filters) * (num_bytes // (32 * MIB))


def gz(num_bytes: int, what: bytes = b"a") -> bytes:
    return gzip.compress(what * (32 * MIB // len(what)), 6) * (num_bytes // (32 * MIB))


def zst(parts: Iterator[bytes]) -> bytes:
    packer = zstandard.ZstdCompressor(level=3).compressobj()
    return b"".join(packer.compress(part) for part in parts) + packer.flush()


def parquet(column: pa.Array, repeated: int = 1, **options: Any) -> bytes:
    out, table = io.BytesIO(), pa.table({"text": column})
    with pq.ParquetWriter(out, table.schema, compression="zstd", **options) as writer:
        for _ in range(repeated):
            writer.write_table(table)
    return out.getvalue()


def lying(content: bytes, value: int, lie: int) -> bytes:
    """A Parquet file in whose footer a number is another one, spelt in as many bytes."""

    def spelt(number: int, length: int = 0) -> bytes:
        number, found = number << 1, bytearray()
        while number or not found or len(found) < length:
            found.append(number & 0x7F | 0x80)
            number >>= 7
        found[-1] &= 0x7F
        return bytes(found)

    size = int.from_bytes(content[-8:-4], "little") + 8
    footer, old = content[-size:], spelt(value)
    assert old in footer
    return content[:-size] + footer.replace(old, spelt(lie, len(old)))


def small_footer() -> bytes:
    """Rows of 8 MB, of which the footer says that they have a kilobyte in all."""
    column = pa.array(["a" * (8 * MIB)] * 40)
    content = parquet(column, use_dictionary=False, data_page_size=MIB, write_batch_size=1)
    size = pq.read_metadata(io.BytesIO(content)).row_group(0).column(0).total_uncompressed_size
    return lying(content, size, 1000)


def prefixes() -> bytes:
    """Rows of which each adds a letter to the one before."""
    column = pa.array(["a" * MIB + "b" * number for number in range(300)])
    return parquet(column, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})


def one_text(rows: int, size: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["a" * size]))


def arrow(column: pa.Array, new: Callable = pa.ipc.new_stream, *, repeated: int = 1, codec: str | None = None) -> bytes:
    out, batch = io.BytesIO(), pa.record_batch({"text": column})
    with new(out, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        for _ in range(repeated):
            writer.write_batch(batch)
    return out.getvalue()


def deltas() -> bytes:
    """A dictionary to which each batch adds 20 MB of one letter."""
    out, texts = io.BytesIO(), []
    schema = pa.schema([("text", pa.dictionary(pa.int32(), pa.string()))])
    options = pa.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=True)
    with pa.ipc.new_stream(out, schema, options=options) as writer:
        for number in range(20):
            texts.append(chr(97 + number) * (20 * MIB))
            column = pa.DictionaryArray.from_arrays(pa.array([number], pa.int32()), pa.array(texts))
            writer.write_batch(pa.record_batch([column], schema=schema))
    return out.getvalue()


def patched(content: bytes, old: int, new: int) -> bytes:
    assert struct.pack("<q", old) in content
    return content.replace(struct.pack("<q", old), struct.pack("<q", new))


def views() -> bytes:
    """A million views of one text of 10 MB."""
    text = b"a" * (10 * MIB)
    view = struct.pack("<i4sii", len(text), text[:4], 0, 0)
    buffers = [None, pa.py_buffer(view * 1_000_000), pa.py_buffer(text)]
    column = pa.Array.from_buffers(pa.string_view(), 1_000_000, buffers)
    return zstandard.compress(arrow(column))


CASES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "zst, 4 GiB, text": ("txt.zst", lambda: zstd_bomb(1 << 32), "of it become more than"),
    "zst, 4 GiB, one line": ("jsonl.zst", lambda: zstd_bomb(1 << 32), "of it become more than"),
    "zst, 4 GiB, csv": ("csv.zst", lambda: zstd_bomb(1 << 32), "of it become more than"),
    "zst, 4 GiB, tsv": ("tsv.zst", lambda: zstd_bomb(1 << 32), "of it become more than"),
    "zst, 4 GiB, json": ("json.zst", lambda: zstd_bomb(1 << 32), "damaged"),
    "zst, 4 GiB, arrow": ("arrow.zst", lambda: zstd_bomb(1 << 32), "damaged"),
    "bz2, 4 GiB, text": ("txt.bz2", lambda: bzip2(1 << 32), "of it become more than"),
    "bz2, 4 GiB, one line": ("jsonl.bz2", lambda: bzip2(1 << 32), "of it become more than"),
    "bz2, 4 GiB, csv": ("csv.bz2", lambda: bzip2(1 << 32), "of it become more than"),
    "bz2, blocks of 46 MB": ("txt.bz2", lambda: bz2.compress(b"a" * (1 << 28)), "of it become more than"),
    "xz, 8 GiB, text": ("txt.xz", lambda: xz(1 << 33), "of it become more than"),
    "xz, 8 GiB, json": ("json.xz", lambda: xz(1 << 33), "damaged"),
    "xz, dictionary of 1.5 GiB": ("txt.xz", lambda: xz(1 << 33, dict_size=3 << 29), "of it become more than"),
    "gz, 64 MiB that are no JSON": ("jsonl.gz", lambda: gz(64 * MIB), "not JSON"),
    "gz, 4 million nulls": ("jsonl.gz", lambda: gz(64 * MIB, b'{"text":null}\n'), "of it become more than"),
    "gz, 48 million rows of csv": ("csv.gz", lambda: gz(96 * MIB, b"a\n"), "no text in field 'text'"),
    "gz, 48 million rows of csv with text": (
        "csv.gz",
        lambda: gzip.compress(b"text\n") + gz(96 * MIB, b"a\n"),
        "of it become more than",
    ),
    "zst, blank lines": ("jsonl.zst", lambda: zstd_bomb(1 << 32).replace(b"a", b"\n"), "of it become more than"),
    "zst in zst": ("txt.zst", lambda: zstandard.compress(zstd_bomb(1 << 32)), "binary"),
    "30,000 frames, then 4 GiB": ("txt.zst", many_frames, "a record is longer than 1 GiB"),
    "skippable frame of 4 GiB": ("txt.zst", skippable, "ends before"),
    "zst, window of 2 GiB": ("txt.zst", lambda: with_window(1 << 32), "of it become more than"),
    "json, nested 50 million deep": ("jsonl", lambda: b"[" * 50_000_000, "more than 4,000,000 values"),
    "json, nested 1 million deep": ("json", lambda: b"[" * 1_000_000, "not JSON"),
    "json, a number of 20 million digits": ("jsonl", lambda: b'{"text":' + b"7" * 20_000_000 + b"}", "not JSON"),
    "json, empty arrays": ("jsonl", lambda: b"[" + b"[]," * 20_000_000 + b"[]]", "more than 4,000,000 values"),
    "json, empty arrays of an array": ("json", lambda: b"[[" + b"[]," * 20_000_000, "more than 4,000,000 values"),
    "json, empty arrays behind a long text": (
        "json",
        lambda: b'[{"a":"' + b"a" * 20_000_000 + b'","b":[' + b"[]," * 20_000_000,
        "more than 4,000,000 values",
    ),
    "json, 5 million keys": (
        "jsonl",
        lambda: b"{" + b",".join(b'"%d":0' % number for number in range(5_000_000)) + b"}",
        "more than 4,000,000 values",
    ),
    "json, a name of 20 MB": ("jsonl", lambda: b'{"' + b"k" * 20_000_000 + b'": "x"}', "no text in field 'text'"),
    "csv, 30 million cells": ("csv", lambda: b"text\n" + b"a," * 30_000_000, "more than 4,000,000 values"),
    "csv, a header of 30 million": ("csv", lambda: b"a," * 30_000_000, "more than 4,000,000 values"),
    "tsv, 30 million cells": ("tsv", lambda: b"text\n" + b"a\t" * 30_000_000, "more than 4,000,000 values"),
    "parquet, 100 million nulls": ("parquet", lambda: parquet(pa.nulls(5_000_000, pa.string()), 20), "become more"),
    "parquet, 100 million empty texts": ("parquet", lambda: parquet(pa.array([""] * 5_000_000), 20), "become more"),
    "parquet, 10 MB in each of 1,000 rows": ("parquet", lambda: parquet(one_text(1000, 10 * MIB)), "become more"),
    "parquet, a page of 256 MiB": (
        "parquet",
        lambda: parquet(pa.array(["a" * (256 * MIB)]), use_dictionary=False),
        "0 documents before it are used",
    ),
    "parquet, a dictionary of 256 MiB": (
        "parquet",
        lambda: parquet(pa.array(["a" * (256 * MIB)] * 9)),
        "0 documents before it are used",
    ),
    "parquet, a footer that lies of 320 MB": ("parquet", small_footer, "become more"),
    "parquet, prefixes of 1 MB": ("parquet", prefixes, "become more"),
    "parquet, more rows by its footer": (
        "parquet",
        lambda: lying(parquet(pa.array(["a"] * 1_000_003)), 1_000_003, (1 << 20) - 1),
        "documents|damaged",
    ),
    "arrow, a buffer of 300 MB": ("arrow", lambda: arrow(pa.array(["a" * 300 * MIB]), codec="zstd"), "become more"),
    "arrow file, a buffer of 300 MB": (
        "arrow",
        lambda: arrow(pa.array(["a" * 300 * MIB]), pa.ipc.new_file, codec="zstd"),
        "become more",
    ),
    "arrow, lz4, a text of 300 MB": ("arrow", lambda: arrow(pa.array(["a" * 300 * MIB]), codec="lz4"), "1 documents"),
    "arrow, a dictionary of 300 MB": ("arrow", lambda: arrow(one_text(9, 300 * MIB), codec="zstd"), "become more"),
    "arrow, dictionaries that add up": ("arrow", deltas, "become more"),
    "arrow, a buffer that says 2⁴⁰": (
        "arrow",
        lambda: patched(arrow(pa.array(["a" * 1_234_567]), codec="zstd"), 1_234_567, 1 << 40),
        "become more",
    ),
    "arrow, a body that says 2⁶⁰": (
        "arrow",
        lambda: patched(arrow(pa.array(["a" * 1234])), 1234 + 6 + 8, 1 << 60),
        "damaged",
    ),
    "arrow.zst, 100 million nulls": (
        "arrow.zst",
        lambda: zst(iter([arrow(pa.nulls(5_000_000, pa.string()), repeated=20)])),
        "become more",
    ),
    "arrow.zst, a million views of 10 MB": ("arrow.zst", views, "become more"),
    "arrow, 10 MB in each of 1,000 rows": (
        "arrow",
        lambda: arrow(one_text(100_000, 10 * MIB), codec="zstd"),
        "become more",
    ),
}
OWN_MIB = {
    # Below the other bound before there were any.
    "parquet, a footer that lies of 320 MB": 240.0,
    "parquet, prefixes of 1 MB": 240.0,
    # Within the rules: a file of 400 kB may hold a record of 1 GiB, and one of 1.3 MB a text of 300 MB.
    "30,000 frames, then 4 GiB": 3000.0,
    "arrow, lz4, a text of 300 MB": 1800.0,
}
QUICK = (
    "zst, 4 GiB, one line",
    "bz2, 4 GiB, text",
    "parquet, a footer that lies of 320 MB",
    "arrow, a buffer of 300 MB",
)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_what_grows_is_left_out_by_name(name: str, tmp_path: Path):
    ending, make, said = CASES[name]
    path = tmp_path / f"a.{ending}"
    path.write_bytes(make())
    outcome = grow(name, path, ACTION, most_mib=OWN_MIB.get(name, MOST_MIB))
    assert any(word in outcome.said for word in said.split("|")), outcome
