"""``encode_rendered``: encode a conversation rendered by a chat template, with each id's characters.

In all other functions text stays text. Here the control tokens written by the template become their ids, and the text
between them is encoded as text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longctx.tokenizer.control import Span, TokenSpans
from longctx.tokenizer.embedding_rows import check_rows
from longctx.tokenizer.tokenizer_base import GROUP_CHARACTERS, Chunk, Tokenizer, groups


def encode_rendered(
    tokenizer: Tokenizer, text: str, plain: Sequence[Span] = (), *, is_start: bool = True
) -> TokenSpans:
    """Encode a rendered conversation, without begin and end.

    In the ascending ``plain`` spans, control tokens are text. Without such spans, the ids equal those from
    transformers' ``tokenizer(text, add_special_tokens=False)``. If ``is_start`` is false, a control token precedes
    the text.
    """
    parts: list[TokenSpans] = []
    at = 0
    # Sections between control tokens are encoded independently, as ``tokenizers`` does around added tokens.
    for start, stop, token in tokenizer.control_finder.find(text, plain):
        parts.append(_section(tokenizer, text, at, start, is_start_of_text=is_start))
        place = np.array([token], np.int32), np.array([start], np.int64), np.array([stop], np.int64)
        parts.append(TokenSpans(*place))
        at = stop
    parts.append(_section(tokenizer, text, at, len(text), is_start_of_text=is_start))
    spans = TokenSpans.joined(parts)
    check_rows(tokenizer, spans.ids, "the conversation")
    return spans


def _section(tokenizer: Tokenizer, text: str, start: int, stop: int, *, is_start_of_text: bool) -> TokenSpans:
    """Encode the text between two control tokens."""
    if start == stop:
        return TokenSpans.joined([])
    # Some tokenizers put a space before a document only, others after every control token too.
    is_start = (start == 0 and is_start_of_text) or tokenizer.restarts_after_control
    chunks = (Chunk(part, is_first and is_start) for part, is_first in tokenizer.cut(text[start:stop]))
    spans: list[TokenSpans] = []
    at = start
    for group in groups(chunks, GROUP_CHARACTERS):
        for chunk, found in zip(group, tokenizer.locate_chunks(group), strict=True):
            spans.append(found.moved(at))
            at += len(chunk.text)
    return TokenSpans.joined(spans)
