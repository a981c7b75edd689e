"""``turn_ends``: the control token that ends replies in a chat template."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np

from longctx.chat.conversation import ASSISTANT, Conversation
from longctx.chat.encode import ChatEncoder, NotCountedError

_ASKED, _SAID = "one question", "one answer"
_USUAL = Conversation(
    ({"role": "user", "content": _ASKED}, {"role": ASSISTANT, "content": _SAID}), weights=(True, True)
)


def turn_ends(encoder: ChatEncoder) -> set[int]:
    """Return the control token that ends a reply, or an empty set if the template writes none.

    It is the reply's last control token; if the reply's tokens cannot be derived, the first one after its text.
    """
    # A shallow copy shares the rendering process; only its rule changes.
    reader = copy.copy(encoder)
    try:
        reader.rule = replace(encoder.rule, train_on="replies")
        encoded = reader.encode(_USUAL)
        reply, which = encoded.ids[encoded.counted], -1
    except NotCountedError:
        try:
            reader.rule = replace(encoder.rule, train_on="all")
            encoded = reader.encode(_USUAL)
        except NotCountedError:
            return set()
        behind = encoded.text.rfind(_SAID) + len(_SAID)
        reply, which = encoded.ids[encoded.stops > behind], 0
    controls = np.flatnonzero(encoder.tokenizer.is_control[reply])
    if not len(controls):
        return set()
    end = controls[which]
    # Only white space may come between: templates that mark replies also count the line break after the token.
    between = (reply[:end], reply[end + 1 :])[which]
    if encoder.tokenizer.decode(between).strip():
        return set()
    return {int(reply[end])}
