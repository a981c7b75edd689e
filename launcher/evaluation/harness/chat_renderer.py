"""Rendering of lm-eval's turns by the model's chat template, as in its class for Hugging Face models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from longctx.chat.chat_encoder import template_variables
from longctx.chat.template import ChatTemplate, TemplateError
from longctx.chat.template_files import DEFAULT, find_chat_templates
from longctx.errors import ConfigError
from longctx.tokenizer import Tokenizer

_TAG = "\U0010fffd "
"""End marker for a turn: a character without meaning, then a space that is lost if the template trims turns."""

log = logging.getLogger(__name__)


class ChatRenderer:
    """Renderer for turns by one of a tokenizer's chat templates."""

    def __init__(self, tokenizer: Tokenizer, name: str = DEFAULT, options: Mapping[str, Any] | None = None) -> None:
        """Find the template ``name``, with ``options`` as variables; raise ConfigError if the tokenizer lacks it."""
        templates = find_chat_templates(tokenizer.files, tokenizer.path)
        if name not in templates:
            hint = f"Available: {', '.join(templates)}."
            if not templates:
                hint = "It has no templates: it belongs to a base model. Leave out --apply_chat_template."
            raise ConfigError(f"{tokenizer.path} has no chat template {name!r}. {hint}")
        self.text = templates[name]
        self._template = ChatTemplate(self.text)
        self._variables = template_variables(tokenizer) | dict(options or {})

    def render(self, turns: Sequence[Mapping[str, str]], *, asks: bool) -> str:
        """Render turns with the prompt for a reply or, unless it ``asks``, up to the end of the last turn.

        Raise TemplateError if the template refuses them. If it only refuses system turns, render the others with a
        warning.
        """
        try:
            return self._rendered(turns, asks=asks)
        except TemplateError:
            others = [turn for turn in turns if turn["role"] != "system"]
            if len(others) == len(turns):
                raise
            text = self._rendered(others, asks=asks)
            log.warning("The chat template rejects a system turn, so the turn is left out.")
            return text

    def _rendered(self, turns: Sequence[Mapping[str, str]], *, asks: bool) -> str:
        messages = [dict(turn) for turn in turns]
        if not asks:
            # Mark the last turn's end: the text after it belongs to the template, and the reply must continue the turn.
            messages[-1]["content"] += _TAG
        text = self._template.render(messages, add_generation_prompt=asks, variables=self._variables).text
        if asks:
            return text
        before, mark, suffix = text.rpartition(_TAG[0])
        if not mark:
            raise ConfigError(
                f"the chat template drops {turns[-1]['content'][:80]!r}, which lm-eval wants to continue."
            )
        # Without the marker's space, the template trims turns: trim the last one too.
        return before if suffix.startswith(_TAG[1:]) else before.rstrip()
