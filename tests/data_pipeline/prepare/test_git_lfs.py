"""A Git LFS pointer is no document: it is named and left out wherever data is read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import shutil
from pathlib import Path

import pytest
import zstandard

from data_pipeline.inspect import describe, find_problems
from data_pipeline.prepare.joining import Join
from data_pipeline.prepare.sources import open_source
from longctx.errors import DataError
from longctx.untrusted.git_lfs import POINTER_LINE

POINTER = POINTER_LINE + b"\noid sha256:" + b"4d7a2146" * 8 + b"\nsize 123456\n"
KINDS = ["txt", "", "md", "jsonl", "json", "csv", "tsv", "parquet", "pq", "arrow", "feather", "zip", "tar", "png"]
PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def left_out(folder: Path, **options) -> tuple[list[str], dict[str, int]]:
    source = open_source(folder, **options)
    return [document.text for document in source], source.skipped


@pytest.mark.parametrize("name", [f"a.{kind}" for kind in KINDS] + [f"a.txt{ending}" for ending in PACK] + ["a.tar.gz"])
def test_a_pointer_is_left_out_by_its_name(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(POINTER)
    (tmp_path / "good.txt").write_text("good")
    assert left_out(tmp_path) == (["good"], {"Git LFS pointer": 1})
    assert left_out(tmp_path, as_text=["a*"]) == (["good"], {"Git LFS pointer": 1})
    with pytest.raises(DataError, match=r"Git LFS pointer \(`git lfs pull` in its repository"):
        open_source(tmp_path, strict=True)
    with pytest.raises(DataError, match=r"(?s)contains no usable text.*1 Git LFS pointer: a.*git lfs pull"):
        open_source(tmp_path / name)


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv"])
def test_a_pointer_that_was_compressed_is_one(kind: str, ending: str, tmp_path: Path):
    (tmp_path / f"a.{kind}{ending}").write_bytes(PACK[ending](POINTER))
    (tmp_path / "good.txt").write_text("good")
    assert left_out(tmp_path) == (["good"], {"Git LFS pointer": 1})


def test_a_pointer_is_in_no_joined_document(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one ")
    (tmp_path / "b.txt").write_bytes(POINTER)
    (tmp_path / "c.txt").write_text("two")
    assert left_out(tmp_path, join=Join()) == (["one two"], {"Git LFS pointer": 1})


def test_a_text_about_pointers_is_a_text(tmp_path: Path):
    (tmp_path / "a.md").write_bytes(b"# Pointers\n\n" + POINTER)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": POINTER.decode()}))
    texts, skipped = left_out(tmp_path)
    assert (len(texts), skipped) == (2, {})


def test_a_saved_data_set_of_pointers_says_so(tmp_path: Path):
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        (tmp_path / name).write_bytes(POINTER)
    (tmp_path / "good.txt").write_text("good")
    assert left_out(tmp_path) == (["good"], {"Git LFS pointer": 3})


def test_shards_that_were_not_fetched_say_so(built: Path, tmp_path: Path):
    folder = tmp_path / "data"
    shutil.copytree(built, folder)
    (folder / "00000.arrow").write_bytes(POINTER)
    with pytest.raises(DataError, match=r"00000\.arrow is a Git LFS pointer: `git lfs pull`"):
        describe(folder, seq_len=128)
    assert any("00000.arrow is a Git LFS pointer" in problem for problem in find_problems(folder))
    (folder / "manifest.json").write_bytes(POINTER)
    with pytest.raises(DataError, match=r"manifest\.json is a Git LFS pointer: `git lfs pull`"):
        describe(folder)
