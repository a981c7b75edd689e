"""``data build`` from a store: the same documents, in the same order, as from a folder of the same files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data_pipeline.prepare import sources
from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.joining import Join
from data_pipeline.prepare.parts import source_parts
from data_pipeline.prepare.sources import open_source
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from longctx.untrusted.git_lfs import POINTER_LINE
from tests.data_pipeline.prepare.parts.conftest import OPTIONS, PART_BYTES, content
from tests.data_pipeline.stores.conftest import fill
from tests.data_pipeline.stores.s3_server import Store

POINTER = POINTER_LINE + b"\noid sha256:" + b"4d7a2146" * 8 + b"\nsize 123456\n"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_build_from_a_store_has_the_bytes_of_one_from_a_folder(
    store: Store, mixed: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
):
    monkeypatch.setattr(source_parts, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(sources, "CUT_BYTES", PART_BYTES)
    fill(store, mixed, "corpora/mixed")
    report = build_shards(open_source("s3://corpora/mixed"), tokenizer, tmp_path / "a", workers=workers, **OPTIONS)
    build_shards(open_source(mixed), tokenizer, tmp_path / "b", workers=1, **OPTIONS)
    assert report.parts > 10
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_hidden_excluded_and_foreign_objects_are_left_out_as_files_are(store: Store, tmp_path: Path):
    tree = {
        "a/x.txt": b"x",
        "a/.hidden": b"h",
        ".git/config": b"c",
        "old/y.txt": b"y",
        "saved/state.json": json.dumps({"_data_files": [{"filename": "gone.arrow"}]}).encode(),
        "saved/dataset_info.json": b"{}",
        "saved/cached.arrow": b"rubbish",
        "z.bin": b"\0",
        "book.txt": POINTER,
        "train.parquet": POINTER,
        "part-0": b'{"text": "one"}\n{"text": "two"}\n',
        "cut.txt.gz": gzip.compress(b"cut" * 100)[:5],
        "cut.jsonl.gz": gzip.compress(b"cut" * 100)[:5],
        "many.txt": b"word " * 300,
    }
    for name, raw in tree.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(raw)
    fill(store, tmp_path / "tree", "corpora/tree")
    # What consoles make to show a folder.
    store.objects["corpora/tree/a/"] = b""
    found = []
    for spec in ("s3://corpora/tree", "file://" + str(tmp_path / "tree")):
        source = open_source(spec, exclude=("old",))
        texts = {document.name: document.text for document in source}
        found.append((texts, source.skipped, source.fingerprint()))
    assert found[0] == found[1]
    assert set(found[0][0]) == {"a/x.txt", "many.txt"}
    assert found[0][1].items() > {"Git LFS pointer": 2, "JSON, not named so": 1, "damaged": 2}.items()


def test_one_object_is_a_source_too(store: Store):
    store.objects["corpora/rows.jsonl"] = b'{"text": "one"}\n{"text": "two"}\n'
    assert [document.name for document in open_source("s3://corpora/rows.jsonl")] == ["rows.jsonl:1", "rows.jsonl:2"]


def test_directories_are_joined(store: Store):
    store.objects |= {"corpora/t/a/x": b"1", "corpora/t/a/y": b"2"}
    assert [document.text for document in open_source("s3://corpora/t", join=Join())] == ["12"]


def test_what_is_not_there_is_named_with_what_is(store: Store):
    store.objects["corpora/books/a.txt"] = b"a"
    with pytest.raises(DataError, match=r"s3://corpora/book does not exist.\ns3://corpora contains books"):
        open_source("s3://corpora/book")


def test_an_object_that_cannot_be_read_ends_the_build_and_is_not_left_out(
    store: Store, tokenizer: Tokenizer, tmp_path: Path
):
    store.objects |= {"corpora/t/a.txt": b"first", "corpora/t/b.jsonl": b'{"text": "x"}\n' * 100}
    source = open_source("s3://corpora/t")
    store.fault = lambda method, path: "cut" if method == "GET" and path.endswith("b.jsonl") else ""
    with pytest.raises(DataError, match=r"s3://corpora/t/b.jsonl cannot be reached"):
        build_shards(source, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_object_that_is_removed_or_replaced_meanwhile_is_named(store: Store, tokenizer: Tokenizer, tmp_path: Path):
    store.objects |= {"corpora/t/a.txt": b"first", "corpora/t/b.txt": b"second"}
    source = open_source("s3://corpora/t")
    source.fingerprint()
    store.objects["corpora/t/b.txt"] = b"another"
    with pytest.raises(DataError, match=r"s3://corpora/t/b.txt has changed since it was listed"):
        build_shards(source, tokenizer, tmp_path / "out")
    del store.objects["corpora/t/b.txt"]
    with pytest.raises(DataError, match=r"s3://corpora/t/b.txt cannot be read"):
        build_shards(source, tokenizer, tmp_path / "out")
