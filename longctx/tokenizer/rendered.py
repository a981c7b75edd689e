"""``encode_rendered``: encode a conversation rendered by a chat template, with each id's characters.

In all other functions text stays text. Here the control tokens written by the template become their ids, and the text
between them is encoded as text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longctx.tokenizer.contract import GROUP_CHARACTERS, Chunk, Tokenizer, groups
from longctx.tokenizer.control import Located, Span
from longctx.tokenizer.rows import check_rows


def encode_rendered(
    tokenizer: Tokenizer, text: str, plain: Sequence[Span] = (), *, is_beginning: bool = True
) -> Located:
    """Encode a rendered conversation, without begin and end.

    In the ascending ``plain`` spans, control tokens are text. Without such spans, the ids equal those from
    transformers' ``tokenizer(text, add_special_tokens=False)``. If ``is_beginning`` is false, a control token precedes
    the text.
    """
    parts: list[Located] = []
    at = 0
    # Sections between control tokens are encoded independently, as ``tokenizers`` does around added tokens.
    for start, stop, token in tokenizer.controls.find(text, plain):
        parts.append(_section(tokenizer, text, at, start, is_beginning=is_beginning))
        place = np.array([token], np.int32), np.array([start], np.int64), np.array([stop], np.int64)
        parts.append(Located(*place))
        at = stop
    parts.append(_section(tokenizer, text, at, len(text), is_beginning=is_beginning))
    located = Located.joined(parts)
    check_rows(tokenizer, located.ids, "the conversation")
    return located


def _section(tokenizer: Tokenizer, text: str, start: int, stop: int, *, is_beginning: bool) -> Located:
    """Encode the text between two control tokens."""
    if start == stop:
        return Located.joined([])
    # Some tokenizers put a space before a document only, others after every control token too.
    begins = (start == 0 and is_beginning) or tokenizer.sections_begin_anew
    chunks = (Chunk(part, is_first and begins) for part, is_first in tokenizer.cut(text[start:stop]))
    located: list[Located] = []
    at = start
    for group in groups(chunks, GROUP_CHARACTERS):
        for chunk, found in zip(group, tokenizer.locate_chunks(group), strict=True):
            located.append(found.moved(at))
            at += len(chunk.text)
    return Located.joined(located)
