"""Shards that are cut short, removed, replaced or written to while they are read: an error that names the file.

Without it these tests would end the process: a read of mapped memory that its file no longer has is signal 7.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.loader import build_loader
from data_pipeline.rows.pack import Row
from data_pipeline.rows.row_batches import build_batch
from data_pipeline.shards import file_states
from data_pipeline.shards.reader import ShardSet, shard_tokens
from data_pipeline.texts import read_texts
from longctx.errors import DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import read_all, strip_sums, write_lengths

LENGTHS = [70_000, 3, 40_000, 1, 9, 30_000, 20]


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    write_lengths(tmp_path / "shards", tokenizer, LENGTHS, shard_tokens=75_000)
    return tmp_path / "shards"


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1000)


def replace(path: Path) -> None:
    """By a file of the same size, as a copy program does it."""
    shutil.copy(path, path.with_name("new"))
    path.with_name("new").replace(path)


def write_into(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(70_001)
        file.write(b"\xff\xff\xff")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (cut, r"00000\.arrow changed while it was being read: it has 1000 bytes and had \d+"),
    "emptied": (lambda path: os.truncate(path, 0), r"00000\.arrow changed while it was being read: it has 0 bytes"),
    "grown": (lambda path: os.truncate(path, 10**6), r"00000\.arrow changed while it was being read: it has 1000000"),
    "removed": (Path.unlink, r"00000\.arrow is missing, though manifest\.json lists it"),
    "replaced": (replace, r"00000\.arrow was replaced by another file while it was being read"),
    "written to": (write_into, r"00000\.arrow is damaged: bytes 65,536 to 131,072"),
}


@pytest.mark.parametrize("is_local", [True, False])
@pytest.mark.parametrize("has_sums", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_every_way_to_read_it_names_the_file(
    folder: Path, change: str, has_sums: bool, is_local: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(file_states, "_mount_of", lambda device: ("ext4" if is_local else "nfs", ""))
    if not has_sums:
        if change == "written to":
            pytest.skip("nothing vouches for what is written there")
        strip_sums(folder)
    act, message = CHANGES[change]
    shards = ShardSet.open(folder)
    before = read_all(shards)
    for number in range(2):
        shard_tokens(shards, number)
    act(folder / "00000.arrow")
    rows = [Row.of([(0, 0, 60_000), (2, 5, 9)])]
    readings: list[Callable[[], object]] = [lambda: build_batch(shards, rows, 65_536)]
    if change != "written to":
        # These would not touch what was written.
        readings += [lambda: shards.lengths_of(np.array([2, 0])), shards.longest_document]
    readings.append(lambda: shard_tokens(shards, 0))
    for read in readings:
        with pytest.raises(DataError, match=message):
            read()
    # The other shard is read as ever.
    assert build_batch(shards, [Row.of([(3, 0, 1), (6, 0, 20)])], 64).documents.lengths == (1, 20, 43)
    assert shards.document(6).tolist() == before[2 + 6][1]  # type: ignore[index]


def test_a_file_that_is_put_back_is_read_on(folder: Path):
    """Its times are others; what it holds is checked anew, and is right."""
    shards = ShardSet.open(folder)
    before = read_all(shards)
    path = folder / "00000.arrow"
    content = path.read_bytes()
    cut(path)
    with pytest.raises(DataError, match="changed while it was being read"):
        shards.check_files([0])
    path.write_bytes(content)
    shards.check_files(range(len(LENGTHS)))
    assert read_all(shards) == before


def test_a_loader_names_it_at_the_next_batch(folder: Path):
    loader = build_loader(folder, seq_len=8192, rows_per_step=2)
    next(loader)
    cut(folder / "00000.arrow")
    cut(folder / "00001.arrow")
    with pytest.raises(DataError, match=r"0000\d\.arrow changed while it was being read"):
        next(loader)


def test_texts_name_it_at_the_next_document(folder: Path):
    texts = read_texts(folder)
    next(texts)
    (folder / "00000.arrow").unlink()
    with pytest.raises(DataError, match=r"00000\.arrow is missing"):
        list(texts)


def test_a_file_that_was_not_mapped_yet_is_looked_at_when_it_is(folder: Path):
    shards = ShardSet.open(folder)
    shards.document(6)
    cut(folder / "00000.arrow")
    with pytest.raises(DataError, match=r"00000\.arrow has 1000 bytes, but manifest\.json lists"):
        shards.document(0)
