from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.inspect import describe, find_problems, show_row
from data_pipeline.loader import build_loader
from data_pipeline.rows import epoch_blocks
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
from longctx.errors import ConfigError, DataError
from longctx.tokenizer import Tokenizer
from tests.data_pipeline.lengths import lengths_of
from tests.data_pipeline.shards.test_shards import edit, flip_byte


def test_describe_counts_what_is_there(built: Path):
    shards = ShardSet.open(built)
    found = describe(built, seq_len=512)
    assert found.documents == shards.num_documents
    assert found.tokens == shards.num_tokens == sum(lengths_of(shards))
    assert found.longest_tokens == max(lengths_of(shards))
    assert sum(found.length_histogram.values()) == found.documents
    assert found.bytes_per_token == found.text_bytes / found.tokens
    assert found.packing is not None
    assert found.packing.truncated_tokens == 0
    assert describe(built).packing is None
    json.dumps(dataclasses.asdict(found))


def test_show_row_is_the_row_that_the_loader_gives(built: Path, tokenizer: Tokenizer):
    loader = build_loader(built, seq_len=512, rows_per_step=1, seed=3)
    for row in range(6):
        view = show_row(built, seq_len=512, row=row, seed=3, preview_tokens=10**6)
        tokens = next(loader).tokens[0, : view.tokens]
        assert "".join(piece.head for piece in view.pieces) == tokenizer.decode(tokens.numpy())
        assert view.tokens + view.padding_tokens == 512
        assert all(piece.tail == "" for piece in view.pieces)
    assert view.num_rows == loader.pack_report().rows


def test_show_row_counts_from_the_epoch_or_from_a_block(built: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(epoch_blocks, "MIN_DOCUMENTS", 4)
    monkeypatch.setattr(epoch_blocks, "MIN_ROWS", 5)
    loader = build_loader(built, seq_len=512, rows_per_step=1, seed=3)
    for row in range(80):
        state = loader.state_dict()
        view = show_row(built, seq_len=512, row=row, seed=3)
        assert (view.block, view.row) == (state["block"], state["block_row"])
        assert show_row(built, seq_len=512, block=state["block"], row=state["block_row"], seed=3) == view
        assert view.num_blocks == state["num_blocks"] > 3
        next(loader)
    assert state["block"] > 1
    with pytest.raises(ConfigError, match=r"row=600 is out of range: block 1 has rows 0 to \d+"):
        show_row(built, seq_len=512, row=600, block=1)
    with pytest.raises(ConfigError, match=r"row=-1 is out of range: this epoch has rows 0 to \d+"):
        show_row(built, seq_len=512, row=-1)


def test_show_row_shows_both_ends(built: Path, corpus: Path):
    pieces = show_row(built, seq_len=8192, row=0, preview_tokens=8).pieces
    assert pieces
    for piece in pieces:
        text = (corpus / piece.name).read_text()
        assert text.startswith(piece.head)
        assert text.endswith(piece.tail)
        assert 0 < len(piece.tail) < 100


def test_show_row_outside_the_epoch(built: Path):
    with pytest.raises(ConfigError, match=r"row=99999 is out of range: this epoch has rows 0 to \d+"):
        show_row(built, seq_len=512, row=99_999)
    with pytest.raises(ConfigError, match="seq_len=0"):
        describe(built, seq_len=0)


def test_verify_finds_several_problems_at_once(damaged: Path):
    flip_byte(damaged / "00000.arrow", 4000)
    (damaged / "00001.arrow").unlink()
    (damaged / "extra.arrow").touch()
    (damaged / "tokenizer.model").unlink()
    flip_byte(damaged / "validation" / "tokenizer.model", 3000)
    problems = find_problems(damaged)
    parts = (
        "extra.arrow is not listed",
        "00000.arrow is damaged",
        "00001.arrow is missing",
        "tokenizer is missing",
        "tokenizer",
    )
    assert len(problems) == len(parts)
    assert all(part in problem for part, problem in zip(parts, problems, strict=True))


def test_verify_finds_ids_outside_the_vocabulary(tokenizer: Tokenizer, tmp_path: Path):
    writer = ShardWriter(tmp_path, vocab_size=tokenizer.vocab_size)
    writer.add(EncodedDocument(tokens=np.array([1, 699, 2]), hash=1, name="a", text_bytes=1))
    writer.finish(split="training", tokenizer=tokenizer, sources=[], options={}, skipped={})
    tokenizer.save(tmp_path)
    assert find_problems(tmp_path) == []
    edit(tmp_path / "manifest.json", lambda m: m.update(vocab_size=699), seal=True)
    assert "num_ids=700 is above vocab_size=699" in find_problems(tmp_path)[0]
    # Of a folder without the largest id the file itself is asked.
    edit(tmp_path / "manifest.json", lambda m: m["shards"][0].pop("num_ids"), seal=True)
    problems = find_problems(tmp_path)
    assert "has vocab_size=699 and padding=3, but its tokenizer has 700 and 3" in problems[0]
    assert problems[1:] == [f"{tmp_path / '00000.arrow'} contains id 699, outside the vocabulary of 699."]


def test_a_folder_that_is_none(tmp_path: Path):
    assert "is not a shard folder" in find_problems(tmp_path)[0]
    with pytest.raises(DataError, match="longctx data build"):
        describe(tmp_path)
