"""``InteractiveChat``: an interactive chat for ``generate --chat`` without a prompt."""

from __future__ import annotations

from array import array

from launcher.evaluation.model_source import ModelSource
from launcher.generation.chat_prompt_ids import system_turn
from launcher.generation.generation_options import GenerationCommandOptions, check_space
from longctx.chat.chat_encoder import ChatEncoder, ChatEncodingError
from longctx.chat.conversation import ASSISTANT, Conversation
from longctx.errors import ConfigError


class InteractiveChat:
    """Turns in one chat. Each reply reads all turns again, because a template may change turns when others follow."""

    def __init__(self, options: GenerationCommandOptions, model_source: ModelSource) -> None:
        """Start a chat; raise DataError for a model without a chat template."""
        self._options, self._model_source = options, model_source
        self._encoder = ChatEncoder(model_source.tokenizer)
        self._turns = list(system_turn(options.prompts))

    def add_question(self, text: str) -> array[int]:
        """Add a user's turn and return the ids of all turns with the prompt for a reply.

        Raise ConfigError without adding the turn if the template refuses it or a reply does not fit.
        """
        turns = [*self._turns, {"role": "user", "content": text}]
        try:
            ids = array("i", self._encoder.encode_prompt(Conversation(tuple(turns))).tolist())
        except ChatEncodingError as error:
            raise ConfigError(f"{error}.") from error
        options = self._options
        check_space(
            options.prompts,
            [len(ids)],
            options.max_new_tokens,
            self._model_source,
            allow_longer=options.beyond_positions,
        )
        # Only now: a refused turn must not stay in the chat.
        self._turns = turns
        return ids

    def add_reply(self, text: str) -> None:
        """Add the model's reply."""
        self._turns.append({"role": ASSISTANT, "content": text})

    def close(self) -> None:
        """End the rendering processes."""
        self._encoder.close()
