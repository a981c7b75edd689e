"""``ChatRule``: how conversations become ids, and its entry in a shard folder's manifest."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from longctx.chat.template_files import find_templates, hash_templates
from longctx.tokenizer.contract import Tokenizer

_TELLS_TIME = "strftime_now"

TrainOn = Literal["replies", "last", "all", "each"]
TooLong = Literal["drop", "keep-begin", "split-turns"]


@dataclass(frozen=True, kw_only=True)
class ChatRule:
    """Options for turning conversations into ids."""

    template: str | None = None
    """The template; None for the tokenizer's own."""
    train_on: TrainOn = "replies"
    """Which tokens count: of all replies, of the last one, or all. ``each`` makes a document of each reply and what
    stands before it."""
    max_tokens: int | None = None
    """The most tokens of a document; None for any number."""
    too_long: TooLong = "drop"
    """What becomes of a longer one: it is left out, its beginning is kept, or it is split between a reply and what
    follows it, each part with the system turn."""
    now: str = ""
    """The time that a template's ``strftime_now`` knows, by ISO 8601; empty for the time at which it is rendered."""
    most_left_out: float = 0.1
    """Share of the conversations that may be left out because they cannot be trained on; more end a build."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template, such as ``enable_thinking``."""


def settled(rule: ChatRule, tokenizer: Tokenizer, recorded: Mapping[str, Any]) -> ChatRule:
    """Return the rule with a date if the template writes one and the rule has none: the recorded one, else today's.

    ``recorded`` is the entry of a folder that is to be rebuilt.
    """
    texts = [rule.template or ""]
    if rule.template is None:
        texts = list(find_templates(tokenizer.files, tokenizer.path).values())
    if rule.now or not any(_TELLS_TIME in text for text in texts):
        return rule
    return replace(rule, now=recorded.get("now") or datetime.date.today().isoformat())


def chat_options(tokenizer: Tokenizer, rule: ChatRule) -> dict[str, Any]:
    """Return the manifest entry of the rule for a shard folder; it has a hash of the tokenizer's templates."""
    said = {
        "train_on": rule.train_on,
        "template": hash_templates(tokenizer.files, tokenizer.path),
        "max_tokens": rule.max_tokens,
        "too_long": rule.too_long,
        "now": rule.now,
        "options": dict(rule.options),
    }
    # Only values that differ from the original defaults: folders built then are still up to date.
    usual = {"max_tokens": None, "too_long": "drop", "now": "", "options": {}}
    return {name: value for name, value in said.items() if name not in usual or value != usual[name]}
