"""Documents by their lengths: of a shard folder, and a shard folder of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.writer import EncodedDocument, ShardWriter
from longctx.tokenizer import Tokenizer


def lengths_of(shards: ShardSet) -> np.ndarray:
    """Tokens of all documents."""
    return shards.lengths_of(np.arange(shards.num_documents))


def write_lengths(folder: Path, tokenizer: Tokenizer, lengths: list[int], *, shard_tokens: int = 1 << 26) -> ShardSet:
    """A shard folder of documents of these lengths; the ids of each tell it from its neighbours."""
    folder.mkdir()
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size, shard_tokens=shard_tokens)
    for number, length in enumerate(lengths):
        ids = (np.arange(length) * 7 + number * 13) % tokenizer.vocab_size
        writer.add(EncodedDocument(tokens=ids, hash=number, name=f"d{number}", text_bytes=length))
    writer.finish(split="training", tokenizer=tokenizer, sources=[], options={}, skipped={})
    tokenizer.save(folder)
    return ShardSet.open(folder)
