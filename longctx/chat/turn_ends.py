"""``turn_ends``: the control token that ends replies in a chat template."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np

from longctx.chat.chat_encoder import ChatEncoder, ChatEncodingError
from longctx.chat.conversation import ASSISTANT, Conversation

_QUESTION, _ANSWER = "one question", "one answer"
_SAMPLE = Conversation(
    ({"role": "user", "content": _QUESTION}, {"role": ASSISTANT, "content": _ANSWER}), weights=(True, True)
)


def turn_ends(encoder: ChatEncoder) -> set[int]:
    """Return the control token that ends a reply, or an empty set if the template writes none.

    It is the reply's last control token; if the reply's tokens cannot be derived, the first one after its text.
    """
    # A shallow copy shares the rendering process; only its rule changes.
    reader = copy.copy(encoder)
    try:
        reader.rule = replace(encoder.rule, train_on="replies")
        encoded = reader.encode(_SAMPLE)
        reply, which = encoded.ids[encoded.loss_mask], -1
    except ChatEncodingError:
        try:
            reader.rule = replace(encoder.rule, train_on="all")
            encoded = reader.encode(_SAMPLE)
        except ChatEncodingError:
            return set()
        answer_end = encoded.text.rfind(_ANSWER) + len(_ANSWER)
        reply, which = encoded.ids[encoded.end_offsets > answer_end], 0
    control_indices = np.flatnonzero(encoder.tokenizer.is_control[reply])
    if not len(control_indices):
        return set()
    end = control_indices[which]
    # Only white space may come between: templates that mark replies also count the line break after the token.
    between = (reply[:end], reply[end + 1 :])[which]
    if encoder.tokenizer.decode(between).strip():
        return set()
    return {int(reply[end])}
