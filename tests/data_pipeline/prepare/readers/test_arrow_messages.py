"""Every stream that Arrow writes passes as it is, and what its compressed buffers become is known before."""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_pipeline.prepare.readers import arrow_messages
from data_pipeline.prepare.readers.arrow_messages import BoundedMessages
from data_pipeline.prepare.sources import open_source
from longctx.errors import DataError

TEXTS = ["one " * 300, None, "", "é" * 100, "x"] * 20
COLUMNS: dict[str, Callable[[], pa.Array]] = {
    "string": lambda: pa.array(TEXTS),
    "large": lambda: pa.array(TEXTS, pa.large_string()),
    "view": lambda: pa.array(TEXTS, pa.string_view()),
    "dictionary": lambda: pa.array(TEXTS).dictionary_encode(),
    "dictionary of views": lambda: pa.DictionaryArray.from_arrays([0, 1], pa.array(["a", "b" * 99], pa.string_view())),
}
OPTIONS = {
    "plain": pa.ipc.IpcWriteOptions(),
    "zstd": pa.ipc.IpcWriteOptions(compression="zstd"),
    "lz4": pa.ipc.IpcWriteOptions(compression="lz4"),
    "deltas": pa.ipc.IpcWriteOptions(compression="lz4", emit_dictionary_deltas=True),
    "version 4": pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4, use_legacy_format=True),
}


def written(column: pa.Array, options: pa.ipc.IpcWriteOptions, new: Callable = pa.ipc.new_stream) -> bytes:
    out = io.BytesIO()
    nested = pa.array([[{"a": [number]}] for number in range(len(column))])
    batch = pa.record_batch({"other": nested, "text": column})
    with new(out, batch.schema, options=options) as writer:
        for _ in range(3):
            writer.write_batch(batch)
    return out.getvalue()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", COLUMNS)
def test_what_arrow_writes_passes_as_it_is(kind: str, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    column, sums = COLUMNS[kind](), []
    monkeypatch.setattr(arrow_messages, "check_block", lambda size, num_bytes: sums.append(size))
    for new in (pa.ipc.new_stream, pa.ipc.new_file):
        content = written(column, OPTIONS[options], new)
        if new is pa.ipc.new_stream:
            stream, copy = BoundedMessages(io.BytesIO(content), len(content)), b""
            while piece := stream.read(len(copy) % 13 + 1):
                copy += piece
            assert copy == content
        (tmp_path / "a.arrow").write_bytes(content)
        texts = [document.text for document in open_source(tmp_path)]
        assert texts == [text for text in column.to_pylist() if text] * 3
    # Nothing of what is not compressed is counted.
    assert bool(sum(sums)) == (options not in ("plain", "version 4"))


def test_what_the_buffers_of_a_batch_become_is_their_sum(monkeypatch: pytest.MonkeyPatch):
    sums = []
    monkeypatch.setattr(arrow_messages, "check_block", lambda size, num_bytes: sums.append(size))
    column = pa.array(["a" * 100_000] * 5)
    content = written(column, OPTIONS["zstd"])
    with pa.ipc.open_stream(BoundedMessages(io.BytesIO(content), len(content))) as stream:
        assert stream.read_all().num_rows == 15
    assert all(500_000 < size < 501_000 for size in sums if size)
    assert sum(size > 0 for size in sums) == 3


def test_no_flipped_bit_is_an_error_that_has_no_name(tmp_path: Path):
    noise, contents = random.Random(0), {}
    for kind, options in itertools.product(("string", "dictionary"), ("plain", "zstd")):
        contents[f"{kind}-{options}.arrow"] = written(COLUMNS[kind](), OPTIONS[options], pa.ipc.new_file)
    for encoding in ("PLAIN", "DELTA_BYTE_ARRAY"):
        out = io.BytesIO()
        table = pa.table({"text": TEXTS})
        pq.write_table(table, out, use_dictionary=False, column_encoding={"text": encoding}, compression="zstd")
        contents[f"{encoding}.parquet"] = out.getvalue()
    for name, content in contents.items():
        path = tmp_path / name
        for _ in range(60):
            damaged = bytearray(content)
            for _ in range(noise.choice([1, 1, 3])):
                damaged[noise.randrange(len(damaged))] ^= 1 << noise.randrange(8)
            path.write_bytes(damaged)
            try:
                list(open_source(path))
            except DataError:
                continue
        path.unlink()
