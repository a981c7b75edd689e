"""Records of JSON under an ending that does not say so are asked about, and never trained on as text."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.prepare.joining import Join
from data_pipeline.prepare.readers.plain_text import JSON_WITHOUT_SUFFIX, find_records
from data_pipeline.prepare.sources import open_source
from longctx.errors import DataError

LINES = b'{"text": "first"}\n{"text": "second"}\n'


def texts(folder: Path, **options) -> list[str]:
    return [document.text for document in open_source(folder, **options)]


@pytest.mark.parametrize(
    "name", ["a", "a.txt", "a.log", "a.jsonl.1", "a.jsonl.bak", "part-00000", "a.gz", "a.txt.zstd"]
)
def test_it_is_left_out_with_the_options_to_type(name: str, tmp_path: Path):
    pack = {".gz": gzip.compress, ".zstd": zstandard.compress}.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(LINES))
    (tmp_path / "good.txt").write_text("good " * 100)
    source = open_source(tmp_path)
    assert [document.text for document in source] == ["good " * 100]
    assert source.skipped == {JSON_WITHOUT_SUFFIX: 1}
    assert (
        f"{name} (--as-json {name} reads its records, --as-text {name}"
        in source.left_out.examples[JSON_WITHOUT_SUFFIX][0]
    )
    assert {"first", "second"} < set(texts(tmp_path, as_json=[name]))
    assert LINES.decode() in texts(tmp_path, as_text=[name])
    with pytest.raises(DataError, match=rf"{re.escape(name)}: {JSON_WITHOUT_SUFFIX} \(--as-json"):
        open_source(tmp_path, strict=True)


def test_what_the_message_says_works_for_any_name(tmp_path: Path):
    for name in ("a b's [1]*?.dat", "ü$(x).dat"):
        (tmp_path / "sub").mkdir(exist_ok=True)
        (tmp_path / "sub" / name).write_bytes(LINES)
        with pytest.raises(DataError, match="has JSON in files without a JSON suffix") as caught:
            open_source(tmp_path)
        words = shlex.split(str(caught.value).splitlines()[1].partition(": ")[2].replace(",", ""))
        assert words[0] == "--as-json"
        assert texts(tmp_path, as_json=[words[1]]) == ["first", "second"]
        assert texts(tmp_path, as_text=[words[1]]) == [LINES.decode()]
        assert texts(tmp_path, as_json=["*"]) == ["first", "second"]
        (tmp_path / "sub" / name).unlink()


def test_a_few_files_are_left_out_and_most_of_a_source_is_an_error(tmp_path: Path):
    for number in range(4):
        (tmp_path / f"part-{number}").write_bytes(LINES)
    with pytest.raises(DataError, match=r"part-0: --as-json part-0 .*\n(.*\n)*… and 1 more files\n.*--as-json '\*'"):
        open_source(tmp_path)
    assert len(texts(tmp_path, as_json=["part-*"])) == 8
    (tmp_path / "book.txt").write_text("word " * 1000)
    source = open_source(tmp_path)
    assert len(list(source)) == 1
    assert source.skipped == {JSON_WITHOUT_SUFFIX: 4}


def test_how_files_are_read_is_part_of_the_fingerprint(tmp_path: Path):
    (tmp_path / "a.dat").write_bytes(LINES)
    assert open_source(tmp_path, as_json=["*.dat"]).fingerprint()["as_json"] == ["*.dat"]


def test_files_that_are_joined_are_asked_about_too(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text " * 50)
    (tmp_path / "b.txt").write_bytes(LINES)
    source = open_source(tmp_path, join=Join())
    assert [document.text for document in source] == ["text " * 50]
    assert source.skipped == {JSON_WITHOUT_SUFFIX: 1}


@pytest.mark.parametrize(
    ("content", "is_asked"),
    [
        (b'{"text": "one record"}', True),
        (b'\xef\xbb\xbf\n  {"text": null}\n', True),
        (b'{"id": 1}\n{"id": 2}\n', True),
        (b'{"id": 1}\r\n\r\n{"id": 2}', True),
        (b'{\n "id": 1,\n "text": "x"\n}\n', True),
        (b'[{"text": "x"}, {"text": "y"}]', True),
        (b'[\n  {"id": 1, "text": "x"},', True),
        (b'{"id": 1}\n', False),
        (b'{"name": "package", "version": 3}\n', False),
        (b'[{"id": 1}, {"id": 2}]', False),
        (b'{"id": 1}\nand so on\n', False),
        (b'{"text": broken}\n', False),
        (b"{{ template }}\n{{ text }}\n", False),
        (b"[section]\ntext = 1\n", False),
        (b'"text"\n"text"\n', False),
        (b"1\n2\n3\n", False),
        (b"", False),
        (b"[" * 100_000, False),
    ],
)
def test_what_is_taken_for_records(content: bytes, is_asked: bool):
    assert (find_records(content, "text", "a") is not None) == is_asked


@pytest.mark.parametrize("size", [100, 9_000, 70_000, 1 << 20, 3 << 20])
def test_a_first_record_of_any_length_is_known(size: int, tmp_path: Path):
    (tmp_path / "a.dat").write_text(json.dumps({"id": 1, "text": "x\n" * (size // 2)}) + "\n")
    with pytest.raises(DataError, match=r"--as-json a\.dat"):
        open_source(tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(records=st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), min_size=2, max_size=5))
def test_objects_in_lines_are_always_known(records: list[dict]):
    content = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)
    assert find_records(content, "text", "a") is not None
