"""Shard folders of preferences, written record by record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data_pipeline.shards.manifest import PREFERENCES
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
from longctx.tokenizer import Tokenizer

Sizes = tuple[int, int, int]
"""Tokens of a record's prompt, first and second reply."""


def ids_of(number: int, sizes: Sizes, vocab_size: int) -> list[np.ndarray]:
    """Prompt and replies of a record, with ids that tell them from those of other records."""
    generator = np.random.default_rng((number, *sizes))
    # Above the special ids.
    return [generator.integers(10, vocab_size, size) for size in sizes]


def write_preferences(
    folder: Path, tokenizer: Tokenizer, sizes: Sequence[Sizes], *, labels: Sequence[int] = (), shard_tokens: int = 200
) -> ShardSet:
    """A folder of records with these sizes: pairs, or with ``labels`` single replies."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size, shard_tokens=shard_tokens, preferences=True)
    for number, size in enumerate(sizes):
        prompt, first, second = ids_of(number, size, tokenizer.vocab_size)
        document = EncodedDocument(
            tokens=np.concatenate([first, second]),
            hash=number,
            name=f"r{number}",
            text_bytes=sum(size[1:]),
            source_tokens=prompt,
            second=len(first),
            label=labels[number] if labels else 1,
        )
        writer.add(document)
    options = {PREFERENCES: "labelled" if labels else "pairs"}
    writer.finish(split="training", tokenizer=tokenizer, sources=[], options=options, skipped={})
    tokenizer.save(folder)
    return ShardSet.open(folder)
