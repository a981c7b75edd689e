"""Texts that contain control tokens as characters, such as conversations already rendered with a chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import xxhash

from data_pipeline.prepare.encode_texts import TextMismatch
from data_pipeline.prepare.source_items import Document
from data_pipeline.shards.shard_writer import EncodedDocument, token_dtype
from longctx.tokenizer.control import AddedToken, ControlFinder
from longctx.tokenizer.rendered import encode_rendered
from longctx.tokenizer.tokenizer_base import Tokenizer


class ControlTokenCounter:
    """Counts documents with control tokens in their text, in total and per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = {tokenizer.piece(token): token for token in np.flatnonzero(tokenizer.is_control).tolist()}
        # Ids without a text form have an empty vocabulary piece.
        self._finder = ControlFinder({text: AddedToken(token) for text, token in pieces.items() if len(text) > 2})
        self._tokenizer = tokenizer
        self.documents = 0
        self.by_token: Counter[str] = Counter()

    def noting(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents unchanged while counting them."""
        for document in documents:
            found = {self._tokenizer.piece(token) for _, _, token in self._finder.find(document.text)}
            self.documents += bool(found)
            self.by_token.update(found)
            yield document


def encode_parsed(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterator[tuple[EncodedDocument, TextMismatch | None]]:
    """Yield each document's tokens, in order; control tokens in the text become their ids.

    The ids equal transformers' ``tokenizer(text, add_special_tokens=False)``, wrapped in document begin and end tokens
    unless the text already has them. Raises DataError if the tokenizer's file does not specify how to find control
    tokens.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    for document in documents:
        raw = document.text.encode()
        ids = encode_rendered(tokenizer, document.text).ids
        # Rendered conversations usually contain begin and end tokens already.
        before, after = tokenizer.prefix_ids, tokenizer.suffix_ids
        if len(ids) and np.array_equal(ids[: len(before)], before):
            before = before[:0]
        if len(ids) and np.array_equal(ids[len(ids) - len(after) :], after):
            after = after[:0]
        encoded = EncodedDocument(
            tokens=np.concatenate([before, ids, after]).astype(dtype),
            hash=xxhash.xxh3_64_intdigest(raw),
            name=document.name,
            text_bytes=len(raw),
        )
        yield encoded, None
