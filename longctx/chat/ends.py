"""``turn_ends``: the control token with which a chat template ends a reply."""

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
    """Return the control token that ends a reply, or no token if the template writes none.

    It is a reply's last, and if it cannot be said which tokens are a reply's, the first one behind its text.
    """
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
    # White space alone stands between: templates that mark replies count the line's end behind the token as well.
    between = (reply[:end], reply[end + 1 :])[which]
    if encoder.tokenizer.decode(between).strip():
        return set()
    return {int(reply[end])}
