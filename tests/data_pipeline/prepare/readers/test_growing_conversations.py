"""Conversations of kilobytes that become gigabytes: each is left out by name, in bounded memory."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data_pipeline.prepare.readers.test_growing import ACTION, MIB, zst
from tests.growing import grow


def one_text(count: int, size: int, text: str = "") -> pa.DictionaryArray:
    numbers = pa.array([0], pa.int32()).take(pa.nulls(count, pa.int32()).fill_null(0))
    return pa.DictionaryArray.from_arrays(numbers, pa.array([text or "a" * size]))


def chats(contents: pa.Array, rows: int) -> pa.RecordBatch:
    """Rows of as many messages each."""
    inner = pa.StructArray.from_arrays([one_text(len(contents), 0, "user"), contents], ["role", "content"])
    ends = pa.array(range(0, len(contents) + 1, len(contents) // rows), pa.int32())
    return pa.record_batch({"messages": pa.ListArray.from_arrays(ends, inner)})


def with_tools(rows: int) -> pa.RecordBatch:
    """Each row with the same 10 MB of schemas."""
    batch = chats(one_text(rows, 0, "x"), rows)
    return batch.append_column("tools", one_text(rows, 0, json.dumps([{"name": "a" * (10 * MIB)}])))


def parquet(batch: pa.RecordBatch) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table(batch), out, compression="zstd")
    return out.getvalue()


def arrow(batch: pa.RecordBatch) -> bytes:
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(out, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return out.getvalue()


def views() -> bytes:
    """A million views of one text of 10 MB in one row."""
    text = b"a" * (10 * MIB)
    view = len(text).to_bytes(4, "little") + text[:4] + bytes(8)
    buffers = [None, pa.py_buffer(view * 1_000_000), pa.py_buffer(text)]
    return arrow(chats(pa.Array.from_buffers(pa.string_view(), 1_000_000, buffers), 1))


def deep(levels: int) -> bytes:
    kind = pa.string()
    for _ in range(levels):
        kind = pa.list_(kind)
    return parquet(pa.record_batch({"messages": pa.nulls(1, kind)}))


CASES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "parquet, 10 MB in each of a million messages": (
        "parquet",
        lambda: parquet(chats(one_text(1_000_000, 10 * MIB), 1)),
        "longer than 1 GiB",
    ),
    "parquet, 10 MB in each of 30 messages": (
        "parquet",
        lambda: parquet(chats(one_text(30, 10 * MIB), 1)),
        "become more",
    ),
    "parquet, 10 MB in each of 1,000 rows": (
        "parquet",
        lambda: parquet(chats(one_text(1000, 10 * MIB), 1000)),
        "become",
    ),
    "parquet, 10 MB of tools in each row": ("parquet", lambda: parquet(with_tools(1000)), "become more"),
    "parquet, 100 million messages in a row": (
        "parquet",
        lambda: parquet(chats(one_text(100_000_000, 1), 1)),
        "become more",
    ),
    "parquet, 6 million messages in a row": ("parquet", lambda: parquet(chats(one_text(6_000_000, 1), 1)), "more than"),
    "parquet, lists in lists": ("parquet", lambda: deep(40), "holds a list"),
    "arrow, 10 MB in each of a million messages": (
        "arrow",
        lambda: arrow(chats(one_text(1_000_000, 10 * MIB), 1)),
        "1 GiB",
    ),
    "arrow, 10 MB in each of 1,000 rows": (
        "arrow",
        lambda: arrow(chats(one_text(1000, 10 * MIB), 1000)),
        "become more",
    ),
    "arrow, 10 MB of tools in each row": ("arrow", lambda: arrow(with_tools(1000)), "become more"),
    "arrow, a million views of 10 MB": ("arrow", views, "1 GiB|become more"),
    "arrow.zst, 100 million messages in a row": (
        "arrow.zst",
        lambda: zst(iter([arrow(chats(one_text(100_000_000, 1), 1))])),
        "become more",
    ),
    "json, a text of empty arrays": (
        "jsonl",
        lambda: b'{"messages": "[' + b"[]," * 20_000_000 + b'[]]"}',
        "4,000,000 val",
    ),
    "json, tools of empty arrays": (
        "jsonl",
        lambda: b'{"messages": [{"role": "user", "content": "x"}], "tools": "[' + b"[]," * 20_000_000 + b'[]]"}',
        "4,000,000 val",
    ),
    "json, calls of empty arrays": (
        "jsonl",
        lambda: b'{"messages": [' + b'{"role": "user", "tool_calls": "[%s{}]"},' % (b"{}," * 90_000) * 100 + b"{}]}",
        "4,000,000 val",
    ),
}
QUICK = ("parquet, 10 MB in each of 30 messages", "arrow, 10 MB in each of 1,000 rows")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_what_grows_is_left_out_by_name(name: str, tmp_path: Path):
    ending, make, said = CASES[name]
    path = tmp_path / f"a.{ending}"
    path.write_bytes(make())
    outcome = grow(name, path, ACTION)
    assert any(word in outcome.said for word in said.split("|")), outcome
