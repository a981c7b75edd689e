"""Which documents a folder gives: in which order, of which lengths, and what tells it from another one."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.joining import Join
from data_pipeline.prepare.source_items import Document
from data_pipeline.prepare.source_reader import Lengths
from data_pipeline.prepare.sources import open_source
from longctx.errors import DataError

TEXTS = ["one\n", "two\r\n\ttabs", "\ufeffthree \u2581 \U0001f600", "NUL \0 inside"]


def read(source) -> list[tuple[str, str]]:
    return [(document.name, document.text) for document in source]


def jsonl(field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, field: text}).encode() + b"\n" for i, text in enumerate(TEXTS))


def write_parquet(path: Path, **columns) -> None:
    pq.write_table(pa.table(columns), path)


class TestFolders:
    def test_reads_recursively_in_order_of_relative_path(self, tmp_path: Path):
        for name in ("b/2.txt", "b/1.md", "a.txt", "c.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        assert read(open_source(tmp_path)) == [(n, n) for n in ("a.txt", "b/1.md", "b/2.txt", "c.py")]

    def test_keeps_bytes_as_they_are(self, tmp_path: Path):
        content = "\ufeffa\r\nb\rc\n\n".encode()
        (tmp_path / "a.txt").write_bytes(content)
        assert next(iter(open_source(tmp_path))).text.encode() == content

    def test_counts_what_is_left_out_by_reason(self, tmp_path: Path):
        (tmp_path / "good.txt").write_text("good")
        (tmp_path / "empty.txt").touch()
        (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
        (tmp_path / "picture.bin").write_bytes(b"\x00\x01")
        (tmp_path / ".hidden").write_text("secret")
        (tmp_path / ".git").mkdir()
        (tmp_path / ".git" / "config").write_text("secret")
        (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
        source = open_source(tmp_path)
        assert read(source) == [("good.txt", "good")]
        expected = {"binary": 1, "empty": 1, "hidden": 2, "not UTF-8": 1, "broken link": 1}
        assert source.skipped == expected
        assert read(source) == [("good.txt", "good")]
        assert source.skipped == expected  # a second reading counts the same, not twice

    def test_exclude_crosses_folders_and_takes_whole_folders(self, tmp_path: Path):
        for name in ("test/a/x.py", "lib/tests/y.py", "lib/z.py", "test_keep.py"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("pass")
        source = open_source(tmp_path, exclude=["test/*", "lib/tests"])
        assert [name for name, _ in read(source)] == ["lib/z.py", "test_keep.py"]
        assert source.skipped == {"excluded": 2}

    @pytest.mark.parametrize("content", [None, b"", b"\x00binary"])
    def test_a_folder_without_text_is_an_error(self, tmp_path: Path, content: bytes | None):
        if content is not None:
            (tmp_path / "file").write_bytes(content)
        with pytest.raises(DataError, match=r"no usable text:\n(.*\n)+.*stdlib"):
            read(open_source(tmp_path))

    def test_a_missing_path_names_what_is_there(self, tmp_path: Path):
        (tmp_path / "corpus").mkdir()
        with pytest.raises(DataError, match=r"does not exist.\n.*contains corpus"):
            open_source(tmp_path / "korpus")


class TestStructuredFiles:
    def test_jsonl_lines_longer_than_a_read_and_without_final_newline(self, tmp_path: Path):
        texts = ["x" * 3_000_000, "\u2028 is no end of line", "last"]
        path = tmp_path / "a.jsonl"
        path.write_text("\n\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts))
        assert read(open_source(path)) == [("a.jsonl:1", texts[0]), ("a.jsonl:3", texts[1]), ("a.jsonl:5", texts[2])]

    def test_text_field_is_used(self, tmp_path: Path):
        (tmp_path / "a.jsonl").write_bytes(jsonl("body"))
        write_parquet(tmp_path / "b.parquet", body=TEXTS)
        assert [text for _, text in read(open_source(tmp_path, text_field="body"))] == TEXTS * 2


class TestStdlib:
    def test_holds_python_files_and_no_packages_of_others(self):
        source = open_source("stdlib", exclude=["test", "idlelib", "*/tests", "*/test"])
        names = [document.name for document in source]
        assert names == sorted(names)
        assert "argparse.py" in names
        assert "json/decoder.py" in names
        assert all(name.endswith(".py") for name in names)
        assert not any("site-packages" in n or "__pycache__" in n or n.startswith("test/") for n in names)
        assert source.fingerprint()["interpreter"].startswith("CPython 3.")


class TestFingerprint:
    def test_depends_on_content_and_names_but_not_on_the_place(self, tmp_path: Path):
        def fingerprint(folder: str, name: str, text: str):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / name).write_text(text)
            return open_source(tmp_path / folder).fingerprint()

        first = fingerprint("a", "x.txt", "hello")
        assert first == fingerprint("b", "x.txt", "hello")
        assert (first["files"], first["bytes"], first["kind"]) == (1, 5, "folder")
        assert first != fingerprint("c", "y.txt", "hello")
        assert first != fingerprint("d", "x.txt", "jello")  # same size
        json.dumps(first)


@given(st.text("a\u00e9\u20ac\U0001f600", max_size=12), st.integers(0, 20), st.integers(1, 40) | st.none())
def test_bytes_are_counted_and_not_characters(text: str, least: int, most: int | None):
    if most is not None and most < least:
        most = least
    problem = Lengths(min_bytes=least, max_bytes=most).problem(Document("x", text))
    size = len(text.encode())
    expected = None
    if size < least:
        expected = "too short"
    elif most is not None and size > most:
        expected = "too long"
    assert (problem and problem.reason) == expected


def test_they_are_listed_and_are_another_source(tmp_path: Path):
    for name, text in (("a", "x"), ("b", "xx\u20ac"), ("c", "x" * 9), ("d", "x" * 10)):
        (tmp_path / name).write_text(text)
    source = open_source(tmp_path, lengths=Lengths(min_bytes=5, max_bytes=9))
    noted = []
    assert [document.name for document in source.read(noted.append)] == ["b", "c"]
    assert [(skip.name, skip.reason, skip.detail) for skip in noted] == [
        ("a", "too short", "1 bytes"),
        ("d", "too long", "10 bytes"),
    ]
    fingerprint = source.fingerprint()
    assert (fingerprint["min_bytes"], fingerprint["max_bytes"]) == (5, 9)
    # Folders of earlier releases are up to date still.
    assert not {"min_bytes", "max_bytes"} & open_source(tmp_path).fingerprint().keys()


def test_of_joined_files_the_whole_counts(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / name).write_text("xxxx")
    assert len(list(open_source(tmp_path, join=Join(), lengths=Lengths(min_bytes=8)))) == 1
    with pytest.raises(DataError, match="2 too short"):
        list(open_source(tmp_path, lengths=Lengths(min_bytes=8)))


@pytest.mark.parametrize("bounds", [{"min_bytes": -1}, {"max_bytes": 0}, {"min_bytes": 5, "max_bytes": 4}])
def test_bounds_that_leave_nothing_are_refused(bounds: dict):
    with pytest.raises(DataError, match="must be at least"):
        Lengths(**bounds)
