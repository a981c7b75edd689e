"""Remarks about a tokenizer that a user should read once: at a build, an import and an export.

A text's frame is defined in two places: ``tokenizer_config.json`` (``add_bos_token``, ``add_eos_token``) and the
post-processor in ``tokenizer.json``. transformers 5.24 uses the post-processor and ignores the settings if there is a
``tokenizer.json``; so do we (``special``). If the two disagree, the user may have meant the other one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from longctx.tokenizer.special import JSON_FILE, TOKENIZER_CONFIG
from longctx.tokenizer.tokenizer_base import Tokenizer

_NAMED = 6
"""Maximum tokens named in a sentence."""


def frame_warnings(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield one sentence per disagreement about begin and end: both values, and the one that is used."""
    if tokenizer.special.frame.file == JSON_FILE:
        yield from _begin_of_json(tokenizer)
        yield from _end_of_json(tokenizer)
    else:
        yield from _begin_of_model(tokenizer)


def missing_rows_warning(tokenizer: Tokenizer, rows: int) -> str | None:
    """Return a remark about ids without an embedding row in a model with ``rows`` rows; None if all have one."""
    if tokenizer.vocab_size <= rows:
        return None
    missing = np.arange(rows, tokenizer.vocab_size)
    texts = missing[~tokenizer.is_control[missing]]
    prefix = f"{tokenizer.path} has {tokenizer.vocab_size} ids, the model {rows} rows."
    # Most severe first: a missing frame id affects every document.
    frame = [token for token in (tokenizer.special.begin, tokenizer.special.end) if token is not None]
    framing = missing[np.isin(missing, frame)]
    if len(framing):
        return f"{prefix} No document can be read: each begins or ends with {_join_tokens(tokenizer, framing)}."
    if len(texts):
        return f"{prefix} Texts with these tokens are rejected: {_join_tokens(tokenizer, texts)}."
    return f"{prefix} No text is encoded to the missing ids: {_join_tokens(tokenizer, missing)}."


def _begin_of_json(tokenizer: Tokenizer) -> Iterator[str]:
    special, frame = tokenizer.special, tokenizer.special.frame
    puts = f"{JSON_FILE}'s post-processor puts {tokenizer.describe_token(frame.before, 'nothing')} before a text"
    taken = "The post-processor is used, as in transformers 5.24."
    if frame.unframed_class and frame.before is not None:
        taken = "The class is used, as in transformers 5.24."
        yield f"tokenizer_class={frame.unframed_class} adds no begin token, but {puts}. {taken}"
    elif frame.adds_bos is not None and frame.adds_bos != (frame.before is not None):
        yield f"{TOKENIZER_CONFIG} sets add_bos_token={_json(frame.adds_bos)}, but {puts}. {taken}"
    elif frame.before is not None and special.bos not in (None, frame.before):
        yield f"the begin token is named {tokenizer.describe_token(special.bos)}, but {puts}. {taken}"


def _end_of_json(tokenizer: Tokenizer) -> Iterator[str]:
    special, frame = tokenizer.special, tokenizer.special.frame
    puts = f"{JSON_FILE}'s post-processor puts {tokenizer.describe_token(frame.after, 'nothing')} after a text"
    taken = (
        f"The end token is {tokenizer.describe_token(special.end, 'nothing')}: training documents end "
        "with it, prompts do not."
    )
    if frame.adds_eos is not None and frame.adds_eos != (frame.after is not None):
        yield f"{TOKENIZER_CONFIG} sets add_eos_token={_json(frame.adds_eos)}, but {puts}. {taken}"
    elif frame.after is not None:
        yield f"the end token is named {tokenizer.describe_token(special.end, 'nowhere')}, but {puts}. {taken}"


def _begin_of_model(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield a remark if transformers would not put the model's begin token before a text unless configured.

    Applies to a SentencePiece model in a Hugging Face folder.
    """
    frame = tokenizer.special.frame
    if frame.is_only_form and frame.adds_bos is None and frame.adds_eos is None and frame.before is not None:
        yield (
            f"{frame.file} has the begin token {tokenizer.describe_token(frame.before)}, but {TOKENIZER_CONFIG} "
            "does not set "
            "add_bos_token, and transformers 5.24 then adds no begin token. The begin token is used; set "
            f'"add_bos_token": false there to omit it.'
        )


def _join_tokens(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    named = ", ".join(tokenizer.describe_token(token) for token in ids[:_NAMED].tolist())
    if len(ids) > _NAMED:
        named += f" and {len(ids) - _NAMED} more"
    return named


def _json(value: bool) -> str:
    return str(value).lower()
