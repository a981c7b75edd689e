"""Options for training on conversations."""

from __future__ import annotations

import json
import keyword
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from launcher.cli.shared_options import RepeatedValues, flatten_values
from longctx.errors import ConfigError
from longctx.untrusted.strict_json import read_bounded

if TYPE_CHECKING:
    from longctx.chat.chat_rule import ChatRule

_PYTHONS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How conversations become tokens, and which tokens count in the loss."""

    chat_template: Annotated[Path | None, arg(metavar="FILE")] = None
    """Jinja file that renders conversations, instead of the tokenizer's chat template."""
    chat_option: Annotated[RepeatedValues, arg(metavar="NAME=VALUE [NAME=VALUE ...]")] = field(default_factory=list)
    """Variables for the chat template, e.g. enable_thinking=false."""
    chat_date: str = ""
    """Date that a template prints, such as 2026-11-27; default: today."""
    train_on: Literal["replies", "last", "all", "each"] = "replies"
    """Tokens that count: all replies, the last reply, or all tokens; each: one document per reply, with the text before
    it."""
    max_tokens: int | None = None
    """Maximum tokens per conversation; default: no limit."""
    too_long: Literal["drop", "keep-begin", "split-turns"] = "drop"
    """Treatment of longer conversations: left out, cut after --max-tokens, or split between replies and questions."""
    most_left_out: float = 0.1
    """Share of conversations that may be left out as unusable for training; a higher share ends the build."""

    def rule(self) -> ChatRule | None:
        """Build the rule from the options; None if all have their defaults. Raise ConfigError for an invalid value."""
        from longctx.chat.chat_rule import ChatRule
        from longctx.chat.template import MAX_TEMPLATE_CHARACTERS

        if self == ChatOptions():
            return None
        if self.max_tokens is None and self.too_long != "drop":
            raise ConfigError(f"--too-long {self.too_long} needs a token limit: --max-tokens N.")
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"--max-tokens {self.max_tokens} must be at least 2.")
        if not 0 <= self.most_left_out <= 1:
            raise ConfigError(f"--most-left-out {self.most_left_out} must be from 0 to 1.")
        # The rule stores the template's text, so the built data does not depend on the file.
        template = None
        if self.chat_template is not None:
            try:
                template = read_bounded(self.chat_template, 4 * MAX_TEMPLATE_CHARACTERS).decode()
            except (OSError, ValueError) as error:
                raise ConfigError(f"--chat-template {self.chat_template} cannot be read: {error}.") from error
        return ChatRule(
            template=template,
            train_on=self.train_on,
            max_tokens=self.max_tokens,
            too_long=self.too_long,
            most_left_out=self.most_left_out,
            now=_parse_day(self.chat_date),
            options=_variables(flatten_values(self.chat_option)),
        )


def _parse_day(given: str) -> str:
    import datetime

    if not given:
        return ""
    try:
        return datetime.date.fromisoformat(given).isoformat()
    except ValueError as error:
        raise ConfigError(f"--chat-date {given} is not a date such as 2026-11-27.") from error


def _variables(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE pairs; a value is parsed as JSON, or kept as text if it is not JSON."""
    from longctx.chat.template import OWN_VARIABLES

    found: dict[str, Any] = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        # The capitalized form rejects true, false and none, which Jinja reads as constants.
        if not mark or not name.isidentifier() or keyword.iskeyword(name.capitalize()) or keyword.iskeyword(name):
            raise ConfigError(f"--chat-option {pair} is not NAME=VALUE, such as enable_thinking=false.")
        if name in OWN_VARIABLES:
            raise ConfigError(f"--chat-option {pair}: each conversation sets {name}. Leave it out.")
        if name in found:
            raise ConfigError(f"--chat-option {pair}: {name} is given twice.")
        # Python's True and None are no JSON: kept as text, they would be true in a template.
        if value in _PYTHONS:
            raise ConfigError(f"--chat-option {pair}: values are JSON. Write {name}={_PYTHONS[value]}.")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    """Parse a JSON text, or return the text itself if it is not JSON."""

    def no_number(token_text: str) -> float:
        raise ConfigError(f"--chat-option: JSON has no {token_text}. Write a number, or a text in quotes.")

    try:
        return json.loads(text, parse_constant=no_number)
    except ValueError:
        return text
