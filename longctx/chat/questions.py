"""``asking``: a tokenizer whose prompts are what a user says to a chat model, for tasks that end with a question."""

from __future__ import annotations

import copy
from dataclasses import replace

from longctx.chat.conversation import Conversation
from longctx.chat.encode import ChatEncoder
from longctx.tokenizer.contract import Tokenizer

_ANSWER = "Answer:"
"""How the part of a prompt begins that is the answer's own beginning, as in RULER."""


def asking(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with ``encode_prompt`` by its chat template, and with the ids that end a reply.

    A prompt is a user's turn up to its last "Answer:", which begins the model's reply: tasks score what comes behind
    it, as NVIDIA's RULER does with its templates. DataError for a tokenizer without a template.
    """
    encoder = ChatEncoder(tokenizer)

    def encode(text: str) -> list[int]:
        question, mark, begun = text.rpartition(_ANSWER)
        if not mark:
            question, begun = text, ""
        turn = Conversation(({"role": "user", "content": question.rstrip()},))
        return encoder.encode_prompt(turn).tolist() + tokenizer.encode(mark + begun).tolist()

    changed = copy.copy(tokenizer)
    changed.as_prompt = encode
    ends = dict.fromkeys(list(tokenizer.special.stops) + sorted(encoder.turn_ends()))
    changed.special = replace(tokenizer.special, stops=tuple(ends))
    return changed
