"""Every page that Arrow writes is found, and what a page becomes is known before Arrow decompresses it."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.prepare.readers.parquet_pages import DICTIONARY, max_row_bytes, read_pages
from data_pipeline.prepare.source_items import FileContentError
from data_pipeline.prepare.sources import open_source
from tests.helpers import REPOSITORY

TEXTS = [None if number % 7 == 0 else f"text {number} " * (number % 50) for number in range(3000)]
CODECS = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")
ENCODINGS = ("dictionary", "PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY")


def written(codec: str, version: str, encoding: str, *, rich: bool) -> bytes:
    out, options = io.BytesIO(), {}
    if encoding == "dictionary":
        # The first pages name its entries; the others are plain, as it is full.
        options = {"use_dictionary": True, "dictionary_pagesize_limit": 20_000}
    else:
        options = {"use_dictionary": False, "column_encoding": {"text": encoding}}
    options |= {"write_statistics": rich, "write_page_index": rich, "write_page_checksum": rich}
    table = pa.table({"other": range(len(TEXTS)), "text": TEXTS}).cast(
        pa.schema([("other", pa.int64()), ("text", pa.string())])
    )
    if encoding != "dictionary":
        table = table.select(["text"])
    pq.write_table(
        table,
        out,
        compression=codec,
        data_page_version=version,
        data_page_size=4000,
        write_batch_size=50,
        row_group_size=1100,
        **options,
    )
    return out.getvalue()


@pytest.mark.few(8)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_pages_of_a_column_are_all_of_it(codec: str, encoding: str, tmp_path: Path):
    for version, rich in itertools.product(("1.0", "2.0"), (True, False)):
        content = written(codec, version, encoding, rich=rich)
        raw, table = io.BytesIO(content), pq.ParquetFile(io.BytesIO(content))
        raw.seek(5)
        for group in range(table.num_row_groups):
            described = table.metadata.row_group(group)
            for number in range(described.num_columns):
                column = described.column(number)
                pages = list(read_pages(raw, column))
                assert sum(page.num_values for page in pages) == column.num_values
                assert sum(page.uncompressed_bytes for page in pages) <= column.total_uncompressed_size
                assert [page.kind for page in pages].count(DICTIONARY) == column.has_dictionary_page
                # The rest are headers.
                bodies = sum(page.compressed_bytes for page in pages)
                assert bodies < column.total_compressed_size <= bodies + 400 * len(pages)
                raw.seek(5)
                assert 0 < max_row_bytes(raw, column) <= column.total_uncompressed_size
                assert raw.tell() == 5
        (tmp_path / "a.parquet").write_bytes(content)
        texts = [document.text for document in open_source(tmp_path, strict=True)]
        assert texts == [text for text in TEXTS if text]


def test_a_text_that_begins_as_the_one_before_it_counts_as_its_page():
    out = io.BytesIO()
    table = pa.table({"text": ["a" * (1 << 20) + "b" * number for number in range(200)]})
    pq.write_table(table, out, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})
    column = pq.ParquetFile(out).metadata.row_group(0).column(0)
    assert 1 << 20 <= max_row_bytes(out, column) < 2 << 20


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("15 00 15 02 15 02 2c 15 02 15 00 15 06 15 06 00 00", ""),
        # A kilobyte of 2 GB; 2³⁰ lengths in it.
        ("15 00 15 fe ff ff ff 0f 15 02 2c 15 02 15 00 15 06 15 06 00 00", "1 bytes of it become more than 67,"),
        ("15 00 15 02 15 02 2c 15 fe ff ff ff 0f 15 0c 15 06 15 06 00 00", "1 bytes of it become more than 67,"),
        # Numbers of more than 32 bits, a field twice, no description, structs without end, a list, a cut.
        ("15 00 15 02 15 82 80 80 80 20 2c 15 02 15 00 15 06 15 06 00 00", "cannot be read"),
        ("15 00 15 02 15 02 06 06 02 2c 15 02 15 00 00 00", "cannot be read"),
        ("15 00 15 02 15 02 00", "cannot be read"),
        ("1c" * 40, "cannot be read"),
        ("19 f1 ff ff 7f", "cannot be read"),
        ("15 00 15", "cut off"),
        ("15 00 15 02 15 02 18 ff ff ff ff 07", "cut off"),
    ],
)
def test_a_header_that_lies_is_damage(header: str, said: str):
    class Column:
        data_page_offset, dictionary_page_offset, num_values = 4, None, 1
        total_compressed_size = len(bytes.fromhex(header)) + 1

    raw = io.BytesIO(b"PAR1" + bytes.fromhex(header) + b"x")
    if not said:
        assert max_row_bytes(raw, Column) == 1  # type: ignore[arg-type]
        return
    with pytest.raises(FileContentError, match=said):
        max_row_bytes(raw, Column)  # type: ignore[arg-type]


def test_a_header_may_hold_long_texts():
    from data_pipeline.prepare.readers.table_rows import batch_rows

    out = io.BytesIO()
    pq.write_table(pa.table({"text": ["a" * 100_000, "b" * 100_000]}), out, use_dictionary=False, compression="none")
    content = out.getvalue()
    # Statistics of 100 kB, as some writers store them whole, in front of the data.
    statistics = b"\x18" + b"\xa0\x8d\x06" + b"a" * 100_000 + b"\x00"
    page = bytes.fromhex("15 00 15 02 15 02 2c 15 02 15 00 15 06 15 06 1c") + statistics + b"\x00\x00" + b"x"

    class Column:
        data_page_offset, dictionary_page_offset, num_values, total_compressed_size = 0, None, 1, len(page)

    assert max_row_bytes(io.BytesIO(page), Column) == 1  # type: ignore[arg-type]
    assert batch_rows(io.BytesIO(content), pq.ParquetFile(out), 0, ["text"]) == 256


FLIP = """
import io, sys
from pathlib import Path
from data_pipeline.prepare.readers.file_pieces import hash_and_cut
from data_pipeline.prepare.source_items import File
from data_pipeline.prepare.source_items import find_format
from data_pipeline.prepare.sources import open_source
from tests.helpers import REPOSITORY
from longctx.errors import DataError
path = Path(sys.argv[1])
content = path.read_bytes()
end = len(content) - 8
for at in range(end - int.from_bytes(content[-8:-4], "little"), end):
    for bit in range(0, 8, 3):
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        hash_and_cut(File(path, path.name, len(damaged), find_format(path.name)), 1)
        try:
            list(open_source(path))
        except DataError:
            pass
print("done")
"""


def test_no_flipped_bit_of_a_footer_ends_the_process(tmp_path: Path):
    """Three of each byte: pyarrow itself aborts at a dozen of all."""
    table = pa.table({"text": TEXTS[:100]})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, compression="zstd")
    command = [sys.executable, "-c", FLIP, str(tmp_path / "a.parquet")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-1000:]
