"""``asking``: a tokenizer that encodes prompts as user turns for a chat model, in tasks that end with a question."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import replace

from longctx.chat.conversation import Conversation
from longctx.chat.encode import ChatEncoder
from longctx.chat.ends import turn_ends
from longctx.tokenizer.contract import Tokenizer


def asking(tokenizer: Tokenizer, cues: Iterable[str]) -> Tokenizer:
    """Return the tokenizer with chat-template encoding in ``encode_prompt``, and with the ids that end a reply.

    A prompt's text before its last cue becomes the user turn; the cue begins the model's reply. Tasks score the text
    after it, as NVIDIA's RULER does with its templates. Raise DataError if the tokenizer has no template.
    """
    encoder = ChatEncoder(tokenizer)
    cue = re.compile("|".join(re.escape(one) for one in sorted(set(cues))))

    def encode(text: str) -> list[int]:
        begins = max((match.start() for match in cue.finditer(text)), default=len(text))
        turn = Conversation(({"role": "user", "content": text[:begins].rstrip()},))
        return encoder.encode_prompt(turn).tolist() + tokenizer.encode(text[begins:]).tolist()

    changed = copy.copy(tokenizer)
    changed.as_prompt = encode
    ends = dict.fromkeys(list(tokenizer.special.stops) + sorted(turn_ends(encoder)))
    changed.special = replace(tokenizer.special, stops=tuple(ends))
    return changed
