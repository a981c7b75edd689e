"""Every format that a corpus lies in on disks gives the same documents, the same tokens, the same counts."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.readers import records
from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError
from tests.bounded import within_bounds
from tests.data_pipeline.growth import run_measured

TEXTS = [
    "one\n",
    "two\r\n\ttabs and \"quotes\", 'commas'\r",
    "\ufeffthree \u2581 \U0001f600 é",
    "NUL \0 inside",
    " \n leading and trailing \n\n",
    '"begins with a quote',
    'last: {"text": [1, 2]} \\ \\n <|document_end|>',
]


LONG_TEXTS = ["é" + "x" * 2_500_000 + '\n"\\', "short", "y, " * 700_000]
"""Longer than the pieces in which files are read."""


def rows(texts: Sequence[str] = TEXTS) -> list[dict]:
    more = {"url": "http://example.org", "tags": ["a", None]}
    return [{"id": number, "text": text, "more": more} for number, text in enumerate(texts)]


def lines(texts: Sequence[str] = TEXTS) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows(texts))


def array(texts: Sequence[str] = TEXTS) -> bytes:
    return json.dumps(rows(texts), ensure_ascii=False, indent=2).encode()


def separated(texts: Sequence[str] = TEXTS) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(["id", "text"])
    writer.writerows((row["id"], row["text"]) for row in rows(texts))
    return out.getvalue().encode()


def table(kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"id": list(range(len(TEXTS))), "text": pa.array(TEXTS, kind or pa.string())})


def parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(table(), out, row_group_size=3)
    return out.getvalue()


def arrow(new: Callable, kind: pa.DataType | None = None) -> bytes:
    out, content = io.BytesIO(), table(kind)
    with new(out, content.schema) as writer:
        writer.write_table(content, max_chunksize=3)
    return out.getvalue()


FORMATS: dict[str, Callable[[], bytes]] = {
    "jsonl": lines,
    "jsonlines": lines,
    "ndjson": lines,
    "json": lines,
    "jsonl.gz": lambda: gzip.compress(lines()[:700]) + gzip.compress(lines()[700:]),
    "jsonl.bz2": lambda: bz2.compress(lines()),
    "jsonl.xz": lambda: lzma.compress(lines()),
    "jsonl.zst": lambda: zstandard.compress(lines()[:700]) + zstandard.compress(lines()[700:]),
    "jsonlines.gz": lambda: gzip.compress(lines()),
    "jsonl.gzip": lambda: gzip.compress(lines()),
    "jsonlines.zstd": lambda: zstandard.compress(lines()),
    "csv.gzip": lambda: gzip.compress(separated()),
    "json.gz": lambda: gzip.compress(lines()),
    "json.zst": lambda: zstandard.compress(array()),
    "array.json": array,
    "flat.json": lambda: json.dumps(rows()).encode(),
    "values.json": lambda: "\n".join(json.dumps(row, indent=1) for row in rows()).encode(),
    "csv": lambda: separated(),
    "bom.CSV": lambda: b"\xef\xbb\xbf" + separated(),
    "csv.gz": lambda: gzip.compress(separated()),
    "parquet": parquet,
    "pq": parquet,
    "arrow": lambda: arrow(pa.ipc.new_file),
    "feather": lambda: arrow(pa.ipc.new_file, pa.large_string()),
    "stream.arrow": lambda: arrow(pa.ipc.new_stream, pa.large_binary()),
    "views.arrow": lambda: arrow(pa.ipc.new_stream, pa.string_view()),
    "dictionary.arrow": lambda: arrow(pa.ipc.new_file, pa.dictionary(pa.int32(), pa.string())),
    "arrow.zst": lambda: zstandard.compress(arrow(pa.ipc.new_stream)),
}


@pytest.fixture(scope="module")
def expected(tokenizer) -> list[list[int]]:
    return [tokenizer.encode_document(text).tolist() for text in TEXTS]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_tokens(name: str, tokenizer, expected: list[list[int]], tmp_path: Path):
    path = tmp_path / f"corpus.{name}"
    path.write_bytes(FORMATS[name]())
    report = build_shards(open_source(path, strict=True), tokenizer, tmp_path / "out", validation_fraction=0)
    shards = ShardSet.open(tmp_path / "out")
    assert [shards.document(i).tolist() for i in range(shards.num_documents)] == expected
    noted = {"used, with rows of several lines": 1} if "csv" in name.lower() else {}
    assert (report.training.documents, report.skipped) == (len(TEXTS), noted)
    assert report.training.text_bytes == sum(len(text.encode()) for text in TEXTS)


def test_nulls_are_left_out_everywhere(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": "x"}\n')
    (tmp_path / "b.json").write_text('[{"text": null}, {"text": "x"}]')
    pq.write_table(pa.table({"text": [None, "x"]}), tmp_path / "c.parquet")
    source = open_source(tmp_path, strict=True)
    assert [document.name for document in source] == ["a.jsonl:2", "b.json:1", "c.parquet:1"]
    assert source.skipped == {"null": 3}


# A fault, and the documents that are read all the same.
FAULTS = {
    "line.jsonl": (b'{"text": "1"}\n{broken\n{"text": "2"}\n', "not JSON", 2),
    "type.jsonl": (b'{"text": "1"}\n["text"]\n', "not a JSON object", 1),
    "number.jsonl": (b'{"text": "1"}\n{"text": 3}\n', "no text in field 'text'", 1),
    "field.jsonl": (b'{"text": "1"}\n{"body": "x"}\n', "no field 'text'", 1),
    "bytes.jsonl": (b'{"text": "1"}\n{"text": "\xff"}\n', "not UTF-8", 1),
    "deep.jsonl": (b'{"text": "1"}\n' + b"[" * 200_000 + b"\n", "not JSON", 1),
    "bytes.json": (b'[{"text": "1"},\n{"text": "\xff"},\n{"text": "2"}]', "not UTF-8", 2),
    "cut.json": (b'[{"text": "1"}, {"text": "2', "damaged", 1),
    "comma.json": (b'[{"text": "1"} {"text": "2"}]', "damaged", 1),
    "more.json": (b'[{"text": "1"}] x', "damaged", 1),
    "quotes.csv": (b'text\n"a"b\nc\n', "not CSV", 1),
    "cells.csv": (b"id,text\n1,a\n2,b,c\n", "not CSV", 1),
    "bytes.csv": (b"text\na\n\xff\n", "not UTF-8", 1),
    "end.csv": (b'text\na\n"never closed\n', "not CSV", 1),
    "cells.tsv": (b"id\ttext\n1\ta\n2\tb\tc\n", "not TSV", 1),
    "bytes.tsv": (b"text\na\n\xff\n", "not UTF-8", 1),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "1"}\n' * 50)[:-12], "damaged", None),
    "cut.jsonl.zst": (zstandard.compress(b'{"text": "1"}\n' * 50)[:-2], "damaged", None),
    "rubbish.jsonl.gz": (b'{"text": "1"}\n', "damaged", None),
    "rubbish.parquet": (b"PAR1 not really", "damaged", 0),
    "rubbish.arrow": (b"ARROW1 not really", "damaged", 0),
    "packed.parquet.gz": (gzip.compress(b"PAR1"), "damaged", 0),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_stray_file_or_record_is_counted_and_strict_ends_there(name: str, tmp_path: Path):
    content, reason, documents = FAULTS[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("good")
    source = open_source(tmp_path)
    texts = [document.text for document in source]
    assert texts[-1 if name < "good" else 0] == "good"
    assert source.skipped == {reason: 1}
    if documents is not None:
        assert len(texts) == documents + 1
    assert name in source.left_out.examples[reason][0]
    with pytest.raises(DataError, match=r"--exclude") as caught:
        list(open_source(tmp_path, strict=True))
    assert name in str(caught.value)
    assert reason in str(caught.value)


class TestFieldsAreCheckedFirst:
    """Before the first token, and so before the tokenizer's training and before shards."""

    @pytest.mark.parametrize("name", ["jsonl", "array.json", "csv", "parquet", "arrow", "stream.arrow"])
    def test_a_wrong_field_is_an_error_that_names_those_there_are(self, name: str, tmp_path: Path):
        (tmp_path / "README").write_text("what this is")
        (tmp_path / f"a.{name}").write_bytes(FORMATS[name]())
        with pytest.raises(DataError, match=r"has no text in field 'body'.*\n.*'id'.*'text'") as caught:
            open_source(tmp_path, text_field="body")
        assert "--text-field" in str(caught.value)

    def test_a_table_among_the_files_of_a_program_is_left_out(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        (tmp_path / "main.py").write_text("print('a program')\n" * 20)
        (tmp_path / "package.json").write_text('{\n "name": "x",\n "text": 3}')
        (tmp_path / "data.csv").write_text("a,b\n1,2\n")
        source = open_source(tmp_path)
        assert [document.name for document in source] == ["main.py"]
        assert source.skipped == {"no field 'text'": 1, "no text in field 'text'": 1}
        assert "data.csv (fields: 'a', 'b'; with text: 'a', 'b')" in caplog.text
        source = open_source(tmp_path, as_text=["*.json", "*.csv"])
        assert [document.name for document in source] == ["data.csv", "main.py", "package.json"]

    def test_a_column_of_numbers_is_no_text(self, tmp_path: Path):
        (tmp_path / "a.arrow").write_bytes(FORMATS["arrow"]())
        with pytest.raises(DataError, match="fields: 'id', 'text'; with text: 'text'"):
            open_source(tmp_path, text_field="id")


def test_a_folder_of_hugging_face_datasets_gives_its_data_files_alone(tmp_path: Path):
    for split in ("train", "test"):
        folder = tmp_path / split
        folder.mkdir()
        for number in range(2):
            content = arrow(pa.ipc.new_stream)
            (folder / f"data-0000{number}-of-00002.arrow").write_bytes(content)
        (folder / "cache-0123456789abcdef.arrow").write_bytes(arrow(pa.ipc.new_stream))
        files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
        (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": split}))
        (folder / "dataset_info.json").write_text('{"description": ""}')
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    source = open_source(tmp_path, strict=True)
    assert sum(1 for _ in source) == 4 * len(TEXTS)
    assert source.skipped == {"description of a data set": 5, "not listed in state.json": 2}
    (tmp_path / "train" / "data-00001-of-00002.arrow").unlink()
    assert open_source(tmp_path).skipped["missing"] == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines),
        ("a.json", lines),
        ("a.json", array),
        ("a.json", lambda texts: json.dumps(rows(texts)).encode()),
        ("a.json", lambda texts: b" ".join(json.dumps(row, indent=1).encode() for row in rows(texts))),
        ("a.csv", lambda texts: separated(texts)),
        ("a.jsonl.zst", lambda texts: zstandard.compress(lines(texts))),
    ],
)
def test_records_may_be_longer_than_what_is_read_at_once(name: str, content: Callable, tmp_path: Path):
    (tmp_path / name).write_bytes(content(LONG_TEXTS))
    assert [document.text for document in open_source(tmp_path, strict=True)] == LONG_TEXTS


@pytest.mark.parametrize("at", range(1 << 20, (1 << 20) + 60, 7))
def test_a_value_may_be_cut_anywhere_by_what_is_read_at_once(at: int, tmp_path: Path):
    """The file is read in pieces of 1 MiB: their end falls into numbers, literals, escapes, characters and keys."""
    tail = r'","n":-1.5e-7,"b":[true,null,{}],"c":"\ud83d\ude00\\"}'
    values = ['{"text":"' + "x" * (at - 40 - shift) + tail for shift in range(4)]
    (tmp_path / "a.json").write_text("[" + " , ".join(values) + "]")
    assert [len(document.text) for document in open_source(tmp_path, strict=True)] == [at - 40 - i for i in range(4)]


READ = """
import sys
from data_pipeline.prepare.sources import open_source
begin()
count = sum(1 for _ in open_source(sys.argv[1]))
print(count, growth())
"""


@pytest.mark.slow
def test_a_table_that_names_one_text_in_every_row(tmp_path: Path):
    """Kilobytes of a dictionary and of numbers, and gigabytes of rows: one row is in memory, and some are used."""
    numbers = pa.array([0, None, *[0] * 998], pa.int32())
    column = pa.DictionaryArray.from_arrays(numbers, pa.array(["a" * (10 << 20)]))
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    size = (tmp_path / "a.parquet").stat().st_size
    assert size < 10_000
    (tmp_path / "b.txt").write_text("good")
    with within_bounds():
        source = open_source(tmp_path)
        names = [document.name for document in source]
    most = records.allowance(size) // (10 << 20)
    assert names == ["a.parquet:0", *[f"a.parquet:{row}" for row in range(2, most + 1)], "b.txt"]
    assert source.skipped == {"damaged": 1, "null": 1}
    with pytest.raises(DataError, match=rf"{size:,} bytes of it become more than"):
        list(open_source(tmp_path, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures with Linux's /proc")
def test_memory_stays_bounded(tmp_path: Path):
    """40 MB of text in small documents of each format, each read in a process that may not grow by as much."""
    text, count = "word " * 1_000, 8_000
    row = json.dumps({"text": text})
    (tmp_path / "a.json").write_text("[" + ",".join([row] * count) + "]")
    # Hardly compressible: of equal lines a few bytes hold them all, and one reading brings them.
    noise = random.Random(0)
    lines_of_noise = (json.dumps({"text": noise.randbytes(len(text) // 2).hex()}) + "\n" for _ in range(count))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress("".join(lines_of_noise).encode()))
    (tmp_path / "a.csv").write_text("text\n" + f"{text}\n" * count)
    pq.write_table(
        pa.table({"text": [f"{i}{text}" for i in range(count)]}), tmp_path / "a.parquet", use_dictionary=False
    )
    batch = pa.record_batch({"text": [text] * 100})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as out, pa.ipc.new_file(out, batch.schema) as writer:
        for _ in range(count // 100):
            writer.write_batch(batch)
    for path in sorted(tmp_path.iterdir()):
        documents, grown = map(int, run_measured(READ, path).split())
        assert documents == count
        assert grown < 36 << 20, path.name


def test_commas_in_quotes_are_no_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A document of more commas than a record may have cells, over several lines."""
    monkeypatch.setattr(records, "MOST_VALUES", 10)
    text = '1, 2, 3, 4, 5, 6,\n7, 8, 9, 10, 11, "12", 13\n' * 3
    quoted = text.replace('"', '""')
    (tmp_path / "numbers.csv").write_text(f'id,text\n1,"{quoted}"\n2,short\n')
    (tmp_path / "cells.csv").write_text(f"id,text\n1,{'a,' * 20}\n")
    source = open_source(tmp_path)
    assert [document.text for document in source] == [text, "short"]
    assert source.skipped["damaged"] == 1
