"""Conversation encoding to token ids with a chat template, including the token spans in the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import xxhash

from data_pipeline.prepare.encode_texts import TextMismatch
from data_pipeline.prepare.source_items import Document, Skip
from data_pipeline.shards.shard_writer import EncodedDocument, runs_of, token_dtype
from longctx.chat.chat_documents import chat_documents
from longctx.chat.chat_encoder import ChatEncoder, ChatEncodingError


def encode_conversations(
    documents: Iterable[Document], encoder: ChatEncoder, leave_out: Callable[[Skip], None]
) -> Iterator[tuple[EncodedDocument, TextMismatch | None]]:
    """Yield each conversation's documents, in order; call ``leave_out`` with the reason for each unusable one.

    A conversation becomes one or several documents, all with the hash of its message text. Raises DataError if the
    template is rejected entirely.
    """
    dtype = token_dtype(encoder.tokenizer.vocab_size)
    try:
        for document in documents:
            assert document.conversation is not None, "a source cannot mix conversations with other documents"
            # One hash for all documents from a conversation, so that they are in the same split.
            text_hash = xxhash.xxh3_64_intdigest(document.text.encode())
            for found in chat_documents(document.conversation, encoder):
                if isinstance(found, ChatEncodingError):
                    leave_out(Skip(document.name, found.reason, found.detail))
                    continue
                yield (
                    EncodedDocument(
                        tokens=found.ids.astype(dtype),
                        hash=text_hash,
                        name=document.name,
                        text_bytes=len(found.text.encode()),
                        target_runs=runs_of(found.loss_mask),
                    ),
                    None,
                )
    finally:
        encoder.close()
