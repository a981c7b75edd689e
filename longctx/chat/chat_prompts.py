"""``with_chat_prompts``: a tokenizer that encodes prompts as user turns for a chat model, in tasks that end with a
question.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import replace

from longctx.chat.chat_encoder import ChatEncoder
from longctx.chat.conversation import Conversation
from longctx.chat.turn_ends import turn_ends
from longctx.tokenizer.tokenizer_base import Tokenizer


def with_chat_prompts(tokenizer: Tokenizer, cues: Iterable[str]) -> Tokenizer:
    """Return the tokenizer with chat-template encoding in ``encode_prompt``, and with the ids that end a reply.

    A prompt's text before its last cue becomes the user turn; the cue begins the model's reply. Tasks score the text
    after it, as NVIDIA's RULER does with its templates. Raise DataError if the tokenizer has no template.
    """
    encoder = ChatEncoder(tokenizer)
    cue = re.compile("|".join(re.escape(one) for one in sorted(set(cues))))

    def encode(text: str) -> list[int]:
        cue_start = max((match.start() for match in cue.finditer(text)), default=len(text))
        turn = Conversation(({"role": "user", "content": text[:cue_start].rstrip()},))
        return encoder.encode_prompt(turn).tolist() + tokenizer.encode(text[cue_start:]).tolist()

    chat_tokenizer = copy.copy(tokenizer)
    chat_tokenizer.as_prompt = encode
    ends = dict.fromkeys(list(tokenizer.special.stop_ids) + sorted(turn_ends(encoder)))
    chat_tokenizer.special = replace(tokenizer.special, stop_ids=tuple(ends))
    return chat_tokenizer
