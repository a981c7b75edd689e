"""Preference encoding to token ids: a prompt and two replies, by a chat template or as plain texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import xxhash

from data_pipeline.prepare.encode_texts import TextMismatch
from data_pipeline.prepare.source_items import Document, Skip
from data_pipeline.shards.shard_writer import EncodedDocument, token_dtype
from longctx.chat.chat_encoder import (
    EMPTY_LOSS_MASK,
    INTERRUPTED_REPLY,
    PROMPT_DEPENDS_ON_REPLY,
    ChatEncoder,
    ChatEncodingError,
)
from longctx.chat.chat_rule import ChatRule
from longctx.chat.conversation import Conversation
from longctx.chat.preference import EMPTY_PROMPT, EMPTY_REPLY, NO_OTHER_PROMPT, Preference
from longctx.chat.template_files import find_chat_templates
from longctx.errors import DataError
from longctx.tokenizer.control import Chunk
from longctx.tokenizer.tokenizer_base import Tokenizer

_MOST_WAITING = 256
"""Records with one prompt that wait for a record with another: bounds the memory."""


class _Sequence(NamedTuple):
    """Token ids of a prompt and one reply."""

    prompt: np.ndarray
    reply: np.ndarray


def with_mismatched_replies(documents: Iterable[Document]) -> Iterator[Document]:
    """Give each single reply's record a second reply: that of the next record with another prompt.

    The last records take the previous one with another prompt. In the order of the documents, so the result is the
    same for any workers. A record without a second reply stays without: ``encode_preferences`` leaves it out.
    """
    # All waiting records have the same prompt. KTO's datasets often list several replies to one prompt in a row; any of
    # these would answer it.
    waiting: list[Document] = []
    previous: Preference | None = None
    for document in documents:
        assert document.preference is not None, "a source cannot mix preferences with other documents"
        if waiting and document.preference.prompt != _preference(waiting[0]).prompt:
            previous = _preference(waiting[-1])
            yield from (_with_second(one, document.preference) for one in waiting)
            waiting = []
        waiting.append(document)
        if len(waiting) > _MOST_WAITING:
            yield _with_second(waiting.pop(0), previous)
    yield from (_with_second(one, previous) for one in waiting)


def _preference(document: Document) -> Preference:
    assert document.preference is not None, "a source cannot mix preferences with other documents"
    return document.preference


def _with_second(document: Document, other: Preference | None) -> Document:
    if other is None:
        return document
    return replace(document, preference=_preference(document).with_second(other))


def has_chat_template(tokenizer: Tokenizer, rule: ChatRule) -> bool:
    """Return whether the rule or the tokenizer has a chat template."""
    return rule.template is not None or bool(find_chat_templates(tokenizer.files, tokenizer.path))


def encode_preferences(
    documents: Iterable[Document], tokenizer: Tokenizer, rule: ChatRule, leave_out: Callable[[Skip], None]
) -> Iterator[tuple[EncodedDocument, TextMismatch | None]]:
    """Yield each record's prompt and replies, in order; call ``leave_out`` with the reason for each unusable one.

    Raises DataError for messages without a chat template.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    chat = None
    if has_chat_template(tokenizer, rule):
        chat = ChatEncoder(tokenizer, replace(rule, train_on="last"))
    try:
        for document in documents:
            try:
                prompt, first, second = _encode(_preference(document), tokenizer, chat, rule.max_tokens)
            except ChatEncodingError as error:
                leave_out(Skip(document.name, error.reason, error.detail))
                continue
            encoded = EncodedDocument(
                tokens=np.concatenate([first, second]).astype(dtype),
                # Equal records are in one split; a mismatched reply is not a part of its record.
                hash=xxhash.xxh3_64_intdigest(document.text.encode()),
                name=document.name,
                # Of the replies only, as the tokens.
                text_bytes=_preference(document).reply_bytes,
                source_tokens=prompt.astype(dtype),
                second=len(first),
                label=_preference(document).label,
            )
            yield encoded, None
    finally:
        if chat is not None:
            chat.close()


def _encode(
    preference: Preference, tokenizer: Tokenizer, chat: ChatEncoder | None, max_tokens: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the ids of the prompt and both replies; raise ChatEncodingError for an unusable record."""
    if preference.second is None:
        raise ChatEncodingError(NO_OTHER_PROMPT, "no other record near it has another prompt")
    both: list[_Sequence] = []
    for conversation in (preference.first, preference.second):
        if chat is not None:
            sequence = _by_template(conversation, chat)
        elif preference.is_text:
            sequence = _plain(conversation, tokenizer)
        else:
            raise DataError(
                f"tokenizer={tokenizer.path} has no chat template, which the records' messages need.\nSet one with "
                "`data build --chat-template FILE`, for example the chat_template.jinja from the family's chat model."
            )
        num_tokens = len(sequence.prompt) + len(sequence.reply)
        if max_tokens is not None and num_tokens > max_tokens:
            raise ChatEncodingError(f"more than {max_tokens:,} tokens", f"it has {num_tokens:,}")
        both.append(sequence)
    first, second = both
    # Both replies continue the same tokens, so that a prompt is stored and computed once.
    if not np.array_equal(first.prompt, second.prompt):
        raise ChatEncodingError(PROMPT_DEPENDS_ON_REPLY)
    return first.prompt, first.reply, second.reply


def _by_template(conversation: Conversation, chat: ChatEncoder) -> _Sequence:
    """Encode a conversation; tokens before its last reply are the prompt, and those after it are dropped."""
    encoded = chat.encode(conversation)
    counted = np.flatnonzero(encoded.loss_mask)
    if not len(counted):
        raise ChatEncodingError(EMPTY_LOSS_MASK)
    start, stop = int(counted[0]), int(counted[-1]) + 1
    if not start:
        raise ChatEncodingError(EMPTY_PROMPT)
    if stop - start > len(counted):
        raise ChatEncodingError(INTERRUPTED_REPLY)
    return _Sequence(encoded.ids[:start], encoded.ids[start:stop])


def _plain(conversation: Conversation, tokenizer: Tokenizer) -> _Sequence:
    """Encode texts without a template: the prompt begins as every document, and the reply ends so."""
    prompt, reply = (message["content"] for message in conversation.messages)
    # The reply continues a text: it gets no begin id, and no space before it.
    chunks = [Chunk(part, is_first=False) for part, _ in tokenizer.cut(reply)]
    parts = tokenizer.encode_chunks(chunks)
    sequence = _Sequence(
        np.concatenate([tokenizer.prefix_ids, tokenizer.encode(prompt)]), np.concatenate([*parts, tokenizer.suffix_ids])
    )
    for ids, reason in zip(sequence, (EMPTY_PROMPT, EMPTY_REPLY), strict=True):
        if not len(ids):
            raise ChatEncodingError(reason)
    return sequence
