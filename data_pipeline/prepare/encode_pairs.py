"""Pair encoding to token ids: a source for the encoder and a target for the decoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import xxhash

from data_pipeline.prepare.encode_texts import TextMismatch, encode_documents
from data_pipeline.prepare.source_items import Document
from data_pipeline.shards.shard_writer import EncodedDocument
from longctx.tokenizer.pair_ids import start_of_targets
from longctx.tokenizer.tokenizer_base import GROUP_CHARACTERS, Tokenizer


def encode_pairs(
    documents: Iterable[Document], tokenizer: Tokenizer, group_characters: int = GROUP_CHARACTERS
) -> Iterator[tuple[EncodedDocument, TextMismatch | None]]:
    """Yield each pair's tokens, in order, with the first round-trip difference on either side, if any.

    A target begins with ``start_of_targets``.
    """
    start = start_of_targets(tokenizer)
    encoded = encode_documents(_flatten_pairs(documents), tokenizer, group_characters)
    # Source and target follow each other, so two reads from one iterator give a pair.
    for (source, first), (target, second) in zip(encoded, encoded, strict=True):
        # Two pairs are equal if both sides are equal; duplicates are found by this hash.
        both = xxhash.xxh3_64_intdigest(source.hash.to_bytes(8, "little") + target.hash.to_bytes(8, "little"))
        tokens = target.tokens
        if tokens[0] != start or not len(tokenizer.prefix_ids):
            tokens = np.concatenate([np.array([start], tokens.dtype), tokens])
        pair = replace(target, tokens=tokens, source_tokens=source.tokens, hash=both)
        yield pair, first or second


def _flatten_pairs(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield each pair's two texts, source first."""
    for document in documents:
        assert document.pair is not None, "a source cannot mix pairs with other documents"
        for text in document.pair:
            yield Document(document.name, text)
