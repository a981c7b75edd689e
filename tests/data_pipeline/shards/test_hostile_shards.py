"""Shard folders that somebody made up, every hash consistent: refused on one screen, found by ``data "
"find_problems``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from data_pipeline.inspect import find_problems
from data_pipeline.shards.block_checksum import checksum_blocks
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
from longctx.tokenizer import Tokenizer
from tests.bounded import HOSTILE_JSON, ODD_FILES, check_screen, put_odd_file, refusal
from tests.data_pipeline.lengths import read_all, write_lengths


def forge(folder: Path, tokenizer: Tokenizer, columns: dict[str, Any] | None = None, **fields: Any) -> Path:
    """A shard folder of one document with these columns, and these fields in its manifest; all hashes fit."""
    folder.mkdir()
    ids = pa.array([[5, 6, 7]], pa.large_list(pa.uint16()))
    others = {"source": pa.array([0], pa.int16()), "hash": pa.array([1], pa.uint64()), "name": pa.array(["a"])}
    batch = pa.record_batch({"tokens": ids} | others | (columns or {}))
    values = batch.column("tokens").flatten()
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size)
    writer.add(EncodedDocument(tokens=np.full(max(len(values), 1), 5), hash=1, name="a", text_bytes=1))
    manifest = writer.finish(split="training", tokenizer=tokenizer, sources=[{"kind": "x"}], options={}, skipped={})
    tokenizer.save(folder)
    with pa.OSFile(str(folder / "00000.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as arrow:
        arrow.write_batch(batch)
    seal(folder, manifest, **fields)
    return folder


def seal(folder: Path, manifest: Manifest, **fields: Any) -> None:
    """Write sums and manifest anew for what is in the shard now."""
    path = folder / "00000.arrow"
    whole, sums = checksum_blocks(path)
    (folder / "00000.sums").write_bytes(sums.tobytes())
    found = xxhash.xxh3_128_hexdigest(sums.tobytes())
    entry = manifest.shards[0]
    # What the ids of another shard were says nothing of this one.
    entry = dataclasses.replace(entry, bytes=path.stat().st_size, xxh3_128=whole, sums=found, num_ids=0)
    dataclasses.replace(manifest, shards=[entry], **fields).save(folder)


def tokens(*ids: int, kind: pa.DataType | None = None) -> dict[str, Any]:
    return {"tokens": pa.array([list(ids)], pa.large_list(kind or pa.uint16()))}


class TestIds:
    """What no document may hold is found, whatever the manifest says of the vocabulary."""

    def test_one_beside_the_others_is_fine(self, tokenizer: Tokenizer, tmp_path: Path):
        assert find_problems(forge(tmp_path / "fine", tokenizer, tokens(5, 699, 6))) == []

    def test_padding_that_the_manifest_calls_another(self, tokenizer: Tokenizer, tmp_path: Path):
        padding = tokenizer.special.padding
        assert padding is not None
        problems = find_problems(forge(tmp_path / "f", tokenizer, tokens(5, padding, 6), padding=9))
        assert "has vocab_size=700 and padding=9, but its tokenizer has 700 and 3" in problems[0]
        assert f"contains the padding id {padding} in document" in problems[1]

    @pytest.mark.parametrize(("ids", "said"), [((5, 700), "contains id 700"), ((65_535,), "contains id 65535")])
    def test_beyond_the_vocabulary(self, tokenizer: Tokenizer, tmp_path: Path, ids, said: str):
        (problem,) = find_problems(forge(tmp_path / "f", tokenizer, tokens(*ids)))
        assert f"{said}, outside the vocabulary of 700" in problem

    @pytest.mark.parametrize(("kind", "vocab_size"), [(pa.uint16(), 65_536), (pa.uint32(), 1 << 32)])
    def test_below_zero_under_a_vocabulary_that_has_them(self, tokenizer: Tokenizer, tmp_path: Path, kind, vocab_size):
        """−1 without its sign is the last id of a vocabulary as large as the type."""
        last = vocab_size - 1
        (problem,) = find_problems(forge(tmp_path / "f", tokenizer, tokens(5, last, kind=kind), vocab_size=vocab_size))
        assert f"has vocab_size={vocab_size} and padding=3, but its tokenizer has 700 and 3" in problem

    def test_wider_than_the_vocabulary(self, tokenizer: Tokenizer, tmp_path: Path):
        folder = forge(tmp_path / "f", tokenizer, tokens(5, 6, kind=pa.uint32()))
        assert "has ids of type uint32" in find_problems(folder)[0]

    @pytest.mark.parametrize("kind", [pa.int16(), pa.int64()])
    def test_below_zero_with_a_sign(self, tokenizer: Tokenizer, tmp_path: Path, kind):
        folder = forge(tmp_path / "f", tokenizer, tokens(5, -1, kind=kind))
        (problem,) = find_problems(folder)
        assert "is not a shard: its tokens are large_list<item: int" in problem
        assert "is not a shard" in refusal(lambda: read_all(ShardSet.open(folder)))


COLUMNS: dict[str, dict[str, Any]] = {
    "sources that are text": {"source": pa.array(["x"])},
    "sources that are missing": {"source": pa.array([None], pa.int16())},
    "names that are missing": {"name": pa.array([None], pa.string())},
    "tokens in a dictionary": {"tokens": pa.array([["a"]]).cast(pa.large_list(pa.string()))},
    "a document that is missing": {"tokens": pa.array([None], pa.large_list(pa.uint16()))},
    "a document without tokens": {"tokens": pa.array([[]], pa.large_list(pa.uint16()))},
    "names of another width": {"name": pa.array(["a"], pa.large_string())},
    "tokens in a short list": {"tokens": pa.array([[5, 6]], pa.list_(pa.uint16()))},
    "names in bytes": {"name": pa.array([b"a"])},
    "tokens as fractions": {"tokens": pa.array([[0.5]], pa.large_list(pa.float32()))},
}


@pytest.mark.parametrize("forgery", COLUMNS)
def test_columns_that_are_none_are_refused(tokenizer: Tokenizer, tmp_path: Path, forgery: str):
    folder = forge(tmp_path / "f", tokenizer, COLUMNS[forgery])
    problems = find_problems(folder)
    assert problems
    for problem in problems:
        check_screen(problem)
        assert "00000.arrow" in problem or "manifest.json" in problem
    refusal(lambda: read_all(ShardSet.open(folder)))


def test_a_buffer_that_is_too_short(tokenizer: Tokenizer, tmp_path: Path):
    """The file says how long its columns are, and how long their buffers: numpy would read on behind them."""
    columns = {
        "tokens": pa.array([[5] * 10_000], pa.large_list(pa.uint16())),
        "name": pa.array(["a" * 1000]),
    }
    folder = forge(tmp_path / "f", tokenizer, columns)
    manifest, path = Manifest.load(folder), folder / "00000.arrow"
    content = path.read_bytes()
    lengths = [20_000, 1000]
    tried = 0
    for length in lengths:
        wanted = length.to_bytes(8, "little")
        for at in [m.start() for m in re.finditer(re.escape(wanted), content)]:
            path.write_bytes(content[:at] + (8).to_bytes(8, "little") + content[at + 8 :])
            seal(folder, manifest)
            assert find_problems(folder)
            refusal(lambda: read_all(ShardSet.open(folder)))
            tried += 1
    assert tried


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    return write_lengths(tmp_path / "shards", tokenizer, [500, 500], shard_tokens=500).folder


@pytest.mark.parametrize("content", HOSTILE_JSON)
def test_what_is_no_strict_json_is_refused(folder: Path, content: str):
    (folder / "manifest.json").write_bytes(HOSTILE_JSON[content][0])
    assert "manifest.json" in refusal(lambda: ShardSet.open(folder))
    (problem,) = find_problems(folder)
    assert "manifest.json" in problem


@pytest.mark.parametrize("name", ["manifest.json", "00000.sums", "00000.arrow", "tokenizer.model"])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_small_file_is_not_read(folder: Path, name: str, kind: str):
    put_odd_file(folder / name, kind)

    def read() -> None:
        shards = ShardSet.open(folder)
        shards.tokenizer()
        read_all(shards)

    refusal(read)
    problems = find_problems(folder)
    assert problems
    for problem in problems:
        check_screen(problem)
