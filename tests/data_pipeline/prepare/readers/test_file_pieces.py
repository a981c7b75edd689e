from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.readers import file_pieces
from data_pipeline.prepare.readers.file_pieces import hash_and_cut
from data_pipeline.prepare.source_items import Fields, File, FilePiece, Skip, find_format, full_piece
from data_pipeline.prepare.source_reader import ReadAs, SourceReader
from longctx.errors import DataError
from longctx.files import hash_file


def read(pieces: list[FilePiece]) -> tuple[list[tuple[str, str]], list[Skip]]:
    """Documents and skips of pieces; and they were read to their ends."""
    left_out: list[Skip] = []
    reading = SourceReader(ReadAs(spec="s", fields=Fields(), strict=False), left_out.append)
    documents = [(document.name, document.text) for document in reading.documents(pieces)]
    assert reading.bytes_read == sum(piece.size for piece in pieces)
    return documents, left_out


def file_of(path: Path) -> File:
    return File(path, path.name, path.stat().st_size, find_format(path.name))


LINES = st.lists(
    st.one_of(
        st.text(max_size=30).map(lambda text: json.dumps({"text": text}, ensure_ascii=False).encode()),
        st.sampled_from([b"", b" ", b"\r", b"{}", b"\xff", b'{"text": null}', b"\xe2\x80\xa8"]),
    ),
    max_size=30,
)


@given(lines=LINES, cut_bytes=st.integers(1, 200), block=st.integers(1, 60), end=st.sampled_from([b"", b"\n", b"\n\n"]))
def test_the_pieces_of_lines_are_the_file(lines: list[bytes], cut_bytes: int, block: int, end: bytes):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_pieces, "_READ_BYTES", block)
        path = Path(folder) / "a.jsonl"
        path.write_bytes(b"\n".join(lines) + end)
        file = file_of(path)
        digest, pieces = hash_and_cut(file, cut_bytes)
        assert digest == hash_file(path)
        # A file without a record is empty; a piece of one is not.
        assert read(pieces) == read([full_piece(file)]) or not path.read_bytes().strip()
        if len(pieces) == 1:
            assert pieces == [full_piece(file)]
            return
        assert file.size > cut_bytes
        edges = [(piece.start, piece.stop) for piece in pieces]
        assert edges[0][0] == 0
        assert edges[-1][1] == file.size
        assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
        # Each is as large as was asked for, and ends with the first line that makes it so.
        for piece in pieces[:-1]:
            content = path.read_bytes()[piece.start : piece.stop]
            assert len(content) >= cut_bytes
            assert content.rfind(b"\n", 0, len(content) - 1) < cut_bytes - 1


@pytest.mark.parametrize("rows", [0, 1, 13, 40])
@pytest.mark.parametrize("cut_bytes", [1, 700, 1 << 20])
def test_the_pieces_of_a_table_are_the_table(tmp_path: Path, rows: int, cut_bytes: int):
    texts = [f"{number} " * (number % 7) or None for number in range(rows)]
    path = tmp_path / "a.parquet"
    table = pa.table({"other": ["x" * 50] * rows, "text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=4, compression="none", use_dictionary=False)
    file = file_of(path)
    digest, pieces = hash_and_cut(file, cut_bytes)
    assert digest == hash_file(path)
    assert read(pieces) == read([full_piece(file)])
    expected = 1
    if cut_bytes == 1:
        expected = max(1, -(-rows // 4))
    if cut_bytes != 700:
        assert len(pieces) == expected


def test_other_formats_are_not_cut(tmp_path: Path):
    for name in ("a.txt", "a.jsonl.gz", "a.json", "a.csv"):
        (tmp_path / name).write_bytes(b'{"text": "a"}\n' * 100)
        assert len(hash_and_cut(file_of(tmp_path / name), 100)[1]) == 1


@pytest.mark.slow
def test_rows_of_megabytes_are_not_read_by_the_hundred(tmp_path: Path):
    from data_pipeline.prepare.readers.table_rows import _batch_rows

    texts = {"long": ["x" * 4_000_000 + str(n) for n in range(5)], "short": [str(n) for n in range(500)]}
    texts["one of them is long"] = ["x" * 4_000_000, *texts["short"]]
    rows = {}
    for dictionary in (True, False):
        # As a dictionary they are one value, as a page all are written out.
        for name, column in {**texts, "one that all are": ["x" * 4_000_000] * (500 if dictionary else 20)}.items():
            path = tmp_path / f"{name} {dictionary}.parquet"
            pq.write_table(pa.table({"text": column}), path, use_dictionary=dictionary)
            with path.open("rb") as raw:
                rows[name, dictionary] = _batch_rows(raw, pq.ParquetFile(path), 0, ["text"])
    assert rows.pop(("short", True)) == rows.pop(("short", False)) == 256
    # Of a page that is no dictionary the mean counts alone: what is written out stands in the file itself.
    assert rows.pop(("one of them is long", False)) == 256
    assert set(rows.values()) <= set(range(1, 9)), rows


def test_a_file_that_has_changed_since_it_was_listed_is_refused(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    file = file_of(path)
    path.write_text("another")
    with pytest.raises(DataError, match=r"a\.txt has changed since it was listed: it had 3 bytes and has 7"):
        read([full_piece(file)])
