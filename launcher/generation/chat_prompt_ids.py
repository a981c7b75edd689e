"""Chat prompts for ``generate --chat``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from launcher.evaluation.model_source import ModelSource
from launcher.generation.generation_options import PromptLine, PromptSource, prompt_place
from longctx.chat.chat_encoder import ChatEncoder, ChatEncodingError
from longctx.chat.conversation import Conversation, Message, NoConversationError, conversation_of
from longctx.chat.turn_ends import turn_ends
from longctx.errors import ConfigError


def encode_chat_prompts(
    source: PromptSource, prompts: Sequence[PromptLine], model_source: ModelSource
) -> tuple[list[array[int]], set[int]]:
    """Return each conversation's ids with the prompt for a reply, and the ids that end a reply.

    Raise ConfigError for an invalid conversation or one that the chat template refuses, DataError for a model without a
    chat template.
    """
    encoder = ChatEncoder(model_source.tokenizer)
    found = []
    try:
        for index, prompt in enumerate(prompts):
            try:
                if "messages" in prompt.fields:
                    conversation = conversation_of(prompt.fields, "messages")
                    # A chat has at most one system turn.
                    if source.system and conversation.messages[0]["role"] == "system":
                        raise NoConversationError("it starts with a system turn, and --system adds another")
                else:
                    conversation = Conversation(({"role": "user", "content": prompt.text},))
                conversation = replace(conversation, messages=system_turn(source) + conversation.messages)
                found.append(array("i", encoder.encode_prompt(conversation).tolist()))
            except (NoConversationError, ChatEncodingError) as error:
                raise ConfigError(f"{prompt_place(source, index)}: {error}.") from error
        return found, turn_ends(encoder)
    finally:
        # Templates render in separate processes: end them even after an error.
        encoder.close()


def system_turn(source: PromptSource) -> tuple[Message, ...]:
    """Return the turn given by ``--system``, if any."""
    if not source.system:
        return ()
    return ({"role": "system", "content": source.system},)
