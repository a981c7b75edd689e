"""``ChatRule``: how conversations become token ids, and its entry in a shard folder's manifest."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from longctx.chat.template_files import find_chat_templates, hash_templates
from longctx.tokenizer.tokenizer_base import Tokenizer

_TIME_FUNCTION = "strftime_now"

TrainOn = Literal["replies", "last", "all", "each"]
TooLong = Literal["drop", "keep-begin", "split-turns"]


@dataclass(frozen=True, kw_only=True)
class ChatRule:
    """Options for encoding conversations."""

    template: str | None = None
    """Chat template; None selects the tokenizer's own."""
    train_on: TrainOn = "replies"
    """Tokens that count in the loss: all replies, the last reply, or all tokens. ``each`` makes one document per reply,
    with the messages before it."""
    max_tokens: int | None = None
    """Token limit per document; None for no limit."""
    too_long: TooLong = "drop"
    """Handling of a longer document: drop it, keep its beginning, or split it between a reply and the next message,
    repeating the system turn in each part."""
    now: str = ""
    """Time for a template's ``strftime_now``, in ISO 8601; empty for the time of rendering."""
    most_left_out: float = 0.1
    """Largest fraction of conversations that may be left out as untrainable; a build with more fails."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Template variables, such as ``enable_thinking``."""


def resolve_time(rule: ChatRule, tokenizer: Tokenizer, recorded: Mapping[str, Any]) -> ChatRule:
    """Return the rule with a date if the template prints one and the rule has none: the recorded date, or today's.

    ``recorded`` is the manifest entry from a folder to rebuild.
    """
    texts = [rule.template or ""]
    if rule.template is None:
        texts = list(find_chat_templates(tokenizer.files, tokenizer.path).values())
    # A template without this name cannot print a date.
    if rule.now or not any(_TIME_FUNCTION in text for text in texts):
        return rule
    return replace(rule, now=recorded.get("now") or datetime.date.today().isoformat())


def chat_options(tokenizer: Tokenizer, rule: ChatRule) -> dict[str, Any]:
    """Return the rule's manifest entry for a shard folder, including a hash of the tokenizer's templates."""
    entry = {
        "train_on": rule.train_on,
        "template": hash_templates(tokenizer.files, tokenizer.path),
        "max_tokens": rule.max_tokens,
        "too_long": rule.too_long,
        "now": rule.now,
        "options": dict(rule.options),
    }
    # Record only values that differ from the original defaults, so that folders built before stay up to date.
    defaults = {"max_tokens": None, "too_long": "drop", "now": "", "options": {}}
    return {name: value for name, value in entry.items() if name not in defaults or value != defaults[name]}
