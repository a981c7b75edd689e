"""lm-eval's requests as token ids, by the rules of its own class for Hugging Face models (``--model hf``).

Texts start as in that class, so that log-likelihoods are comparable. No text is ever truncated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.penalties import Penalties
from longctx.generation.sampling import Greedy, Sampling
from longctx.generation.scoring import Pair
from longctx.tokenizer import Tokenizer
from longctx.tokenizer.embedding_rows import check_rows
from longctx.tokenizer.rendered import encode_rendered

MAX_NEW_TOKENS = 256
"""Default for tasks without a number, as in lm-eval."""
_MAX_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names for one option; the first one present counts."""
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_SEARCHED = ("length_penalty", "early_stopping")
_PENALTIES = {"repetition_penalty": "repetition", "presence_penalty": "presence", "frequency_penalty": "frequency"}


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Options for continuing prompts."""

    max_new_tokens: int
    until: tuple[str, ...]
    """The text ends before the first occurrence of any of these."""
    strategy: Greedy | Sampling | Beams
    penalties: Penalties


class Encoder:
    """Encoder from texts to token ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Choose the prefix token; raise ConfigError for a tokenizer with neither a begin nor an end token."""
        self._tokenizer = tokenizer
        special = tokenizer.special
        # As in lm-eval: the begin token or, without one, the end token.
        prefix = special.bos
        if prefix is None:
            prefix = special.end
        if prefix is None:
            raise ConfigError(
                f"{tokenizer.path} has neither a begin nor an end token, and lm-eval starts texts with one."
            )
        self.prefix: int = prefix
        """Prefix for a text without a context, and the first token for a perplexity."""
        self._prefix_text = tokenizer.piece(prefix)
        self.reads_control = False
        """True if texts come from a chat template: control tokens spelled in them are encoded as control tokens."""

    def begin(self) -> list[int]:
        """Return the prefix for a text without a context; raise DataError if the model has no row for it."""
        return check_rows(self._tokenizer, np.array([self.prefix]), "the beginning of a text").tolist()

    def text(self, text: str) -> list[int]:
        """Return a text's ids, including the begin id if the tokenizer adds one."""
        if self._has_prefix(text):
            return self._without_begin(text)
        if self.reads_control:
            return self._tokenizer.encode_prompt("") + self._without_begin(text)
        return self._tokenizer.encode_prompt(text)

    def pair(self, context: str, continuation: str) -> Pair:
        """Encode context and continuation; spaces at the end of the context move to the continuation.

        Raise ConfigError if the continuation has no token of its own.
        """
        if not context:
            ids = self._without_begin(continuation)
            if ids[:1] == [self.prefix]:
                return self._create_pair(ids[:1], ids[1:], context, continuation)
            return self._create_pair(self.begin(), ids, context, continuation)
        # Encode both as one text: a token may span the spaces between them.
        stripped = context.rstrip()
        whole = self.text(context + continuation)
        start = self.text(stripped)
        # ``start`` is empty for a context with only spaces and a tokenizer without a begin token.
        return self._create_pair(start or self.begin(), whole[len(start) :], context, continuation)

    def windows(self, text: str, max_length: int) -> list[Pair]:
        """Split a text into windows for its perplexity: each id is in the continuation of exactly one window.

        As in lm-eval, windows have ``max_length`` ids, and the last window gets as much context as fits.
        """
        ids = self.text(text)
        pairs = []
        for start in range(0, len(ids), max_length):
            stop = min(start + max_length, len(ids))
            # One id more than the model reads: the last id is only predicted.
            context = ids[max(0, stop - max_length - 1) : start]
            pairs.append(Pair(context or self.begin(), ids[start:stop]))
        return pairs

    def _has_prefix(self, text: str) -> bool:
        """Return True if the text itself spells its begin token."""
        return bool(self._prefix_text) and text.startswith(self._prefix_text)

    def _without_begin(self, text: str) -> list[int]:
        """Encode a text alone; a spelled begin token becomes the token itself, because a prompt may contain it."""
        if self.reads_control:
            return encode_rendered(self._tokenizer, text).ids.tolist()
        if not self._has_prefix(text):
            return self._tokenizer.encode(text).tolist()
        return [*self.begin(), *self._tokenizer.encode(text.removeprefix(self._prefix_text)).tolist()]

    def _create_pair(
        self, context_ids: list[int], continuation_ids: list[int], context: str, continuation: str
    ) -> Pair:
        if not continuation_ids:
            raise ConfigError(
                f"the continuation {continuation[:80]!r} after {context[-80:]!r} has no separate token with tokenizer "
                f"{self._tokenizer.path}, so it has no likelihood: it is empty, or merges with the context's last "
                "token. Let the task's continuations begin with a space and a letter."
            )
        return Pair(context_ids, continuation_ids)


def check_request_lengths(needed: Sequence[int], limit: int, subject: str, hint: str) -> None:
    """Raise ConfigError if a text needs more than ``limit`` tokens, because it would have to be truncated."""
    too_long = [tokens for tokens in needed if tokens > limit]
    if too_long:
        raise ConfigError(
            f"{len(too_long)} of {len(needed)} requests do not fit: {subject} {max(too_long):,} tokens, and the limit "
            f"is {limit:,} (the model's positions, or max_length). Requests are not truncated, because that would "
            f"score another text.\n{hint}"
        )


def generation_of(options: Mapping[str, Any], *, end: str | None = None) -> GenerationRequest:
    """Parse a task's ``generation_kwargs``; raise ConfigError for an option that is unknown or has no effect.

    ``end`` is the end token's spelling; a text ends before it too.
    """
    # lm-eval passes null for options that a task leaves unset.
    given = {name: value for name, value in options.items() if value is not None}
    until = given.pop("until", ())
    if isinstance(until, str):
        until = (until,)
    until = tuple(until)
    if end:
        until += (end,)
    counts = [given.pop(name) for name in _MAX_NAMES if name in given]
    penalties = {ours: float(given.pop(name)) for name, ours in _PENALTIES.items() if name in given}
    return GenerationRequest(
        max_new_tokens=int(next(iter(counts), MAX_NEW_TOKENS)),
        until=tuple(dict.fromkeys(until)),
        strategy=_strategy(given),
        penalties=Penalties(**penalties),
    )


def _strategy(given: dict[str, Any]) -> Greedy | Sampling | Beams:
    """Return greedy decoding unless a temperature or beams are requested; ``given`` holds the remaining options."""
    num_beams = int(given.pop("num_beams", 1))
    temperature = float(given.pop("temperature", 0.0))
    samples = given.pop("do_sample", temperature > 0)
    # lm-eval's tasks set temperature: 0 and do_sample: false, either or both.
    if samples and not temperature:
        raise ConfigError("do_sample=true needs a temperature above 0: --gen_kwargs do_sample=true,temperature=1")
    sampled = {name: given.pop(name) for name in _SAMPLED if name in given}
    searched = {name: given.pop(name) for name in _SEARCHED if name in given}
    if given:
        raise ConfigError(f"generation option {', '.join(given)} is unknown to longctx. Available: {_known()}.")
    if num_beams > 1:
        if samples:
            raise ConfigError(
                f"num_beams={num_beams} is a beam search and does not sample. Leave out do_sample and temperature."
            )
        return Beams(num_beams=num_beams, **searched)
    # Greedy decoding ignores sampling options: tasks set them nevertheless, and transformers only warns.
    if not samples:
        return Greedy()
    return Sampling(temperature=temperature, **sampled)


def _known() -> str:
    return ", ".join(chain(("until", "do_sample", "num_beams"), _MAX_NAMES, _SAMPLED, _SEARCHED, _PENALTIES))
