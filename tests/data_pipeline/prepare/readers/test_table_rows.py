"""Arrow tables that were cut off or joined: every whole batch before is used, and what is lost is said."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard

from data_pipeline.prepare.sources import open_source

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def arrow(new: Callable, first: int, stop: int) -> bytes:
    """Rows of numbers, three to a batch."""
    out, table = io.BytesIO(), pa.table({"text": [str(number) for number in range(first, stop)]})
    with new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return out.getvalue()


def read(path: Path, content: bytes) -> tuple[list[int], str]:
    """Numbers of a table, and what is said of its damage."""
    path.write_bytes(content)
    (path.parent / "z.txt").write_text("good")
    source = open_source(path.parent)
    numbers = [int(document.text) for document in source if document.name != "z.txt"]
    return numbers, "".join(source.left_out.examples.get("damaged", ()))


@pytest.mark.parametrize("ending", PACK)
def test_what_follows_a_stream_is_said(ending: str, tmp_path: Path):
    pack, stream = PACK[ending], arrow(pa.ipc.new_stream, 0, 8)
    # Frames need not end where batches do.
    assert read(tmp_path / f"a.arrow{ending}", pack(stream[:200]) + pack(stream[200:])) == (list(range(8)), "")
    numbers, damage = read(tmp_path / f"a.arrow{ending}", pack(stream) + pack(stream))
    assert numbers == list(range(8))
    assert "more behind the end of the stream; 8 documents before it are used" in damage


@pytest.mark.parametrize("stop", [101, 108, 120])
def test_what_follows_a_file_is_said(stop: int, tmp_path: Path):
    content = arrow(pa.ipc.new_file, 0, 8)
    assert read(tmp_path / "a.arrow", content) == (list(range(8)), "")
    # The index at its end is the second one's, whose rows would be looked for in the first.
    numbers, damage = read(tmp_path / "a.arrow", content + arrow(pa.ipc.new_file, 100, stop))
    assert numbers == list(range(8))
    assert "more behind its last batch; 8 documents before it are used" in damage


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream], ids=["file", "stream"])
def test_batches_before_a_cut_are_used(new: Callable, tmp_path: Path):
    content = arrow(new, 0, 30)
    counts = []
    for length in range(len(content) // 4, len(content), len(content) // 9):
        numbers, damage = read(tmp_path / "a.arrow", content[:length])
        assert numbers == list(range(len(numbers)))
        assert len(numbers) % 3 == 0
        assert f"{len(numbers)} documents before it are used" in damage
        counts.append(len(numbers))
    assert counts == sorted(counts)
    assert counts[-1] >= 24


def test_a_file_whose_index_alone_is_cut_has_all_its_rows(tmp_path: Path):
    numbers, damage = read(tmp_path / "a.arrow", arrow(pa.ipc.new_file, 0, 8)[:-1])
    assert numbers == list(range(8))
    assert "8 documents before it are used" in damage


def test_older_writers_leave_out_the_end_of_the_stream(tmp_path: Path):
    content = arrow(pa.ipc.new_file, 0, 8)
    index = int.from_bytes(content[-10:-6], "little") + 10
    assert content[-index - 8 : -index] == b"\xff\xff\xff\xff\0\0\0\0"
    assert read(tmp_path / "a.arrow", content[: -index - 8] + content[-index:]) == (list(range(8)), "")
