"""Continuation: a prompt's new tokens so far, the choice of the next one, and the stopping rule.

Axes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.penalties import Penalties
from longctx.generation.prefill import CHUNK_TOKENS, check_chunk_tokens
from longctx.generation.sampling import Greedy, Sampling
from longctx.generation.stop_strings import StopStrings
from longctx.model.decoder import Decoder

_MOST_EXPECTED = 256
"""Maximum new tokens to reserve cache memory for with the prompt; longer answers copy the keys now and then."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options for continuing prompts."""

    max_new_tokens: int
    """Maximum tokens to add."""
    strategy: Greedy | Sampling | Beams = field(default_factory=Greedy)
    penalties: Penalties = field(default_factory=Penalties)
    """Applied before the strategy sees the logits."""
    stop_ids: Collection[int] = ()
    """Ids that end a continuation; the id itself is included."""
    stop_strings: StopStrings | None = None
    """Texts that end a continuation with the token that completes them."""
    chunk_tokens: int = CHUNK_TOKENS
    """Approximate prompt tokens per forward pass."""

    @property
    def num_caches(self) -> int:
        """Caches needed per prompt."""
        if isinstance(self.strategy, Beams):
            return self.strategy.num_beams
        return 1

    @property
    def expected_tokens(self) -> int:
        """New tokens to reserve cache space for from the start; the last one is never stored."""
        return min(max(self.max_new_tokens - 1, 0), _MOST_EXPECTED)

    @property
    def is_greedy(self) -> bool:
        """True if the most probable token is always chosen, independent of earlier tokens."""
        return isinstance(self.strategy, Greedy) and self.penalties == Penalties()

    def check(self, model: Decoder, prompt_ids: Sequence[int], source_ids: Sequence[int] | None = None) -> None:
        """Raise ConfigError for a model that cannot continue text, an empty or invalid prompt, or invalid numbers."""
        check_chunk_tokens(self.chunk_tokens)
        if not model.config.causal:
            raise ConfigError(
                "this model is bidirectional (model.causal=false), so it cannot generate text. Evaluate it "
                "on masked tokens: longctx evaluate --tasks masked."
            )
        # An encoder needs a source, and a decoder alone cannot read one.
        if (source_ids is None) == (model.config.encoder_layers > 0):
            has = "no" if source_ids is None else "a"
            raise ConfigError(
                f"got {has} source with model.encoder_layers={model.config.encoder_layers}: encoder-decoders require "
                "one, and decoder-only models cannot read it."
            )
        if source_ids is not None:
            _check_source(model, source_ids)
        if len(prompt_ids) == 0:
            raise ConfigError("the prompt is empty: it needs at least one token. Start with the begin id.")
        if self.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens} must not be negative.")
        _check_ids(model, prompt_ids, "prompt")

    def ends(self, prompt_ids: Sequence[int]) -> Callable[[int], bool]:
        """Return a function that takes a continuation's tokens in turn and returns True for the last one."""
        # The function keeps the text so far, so each continuation needs its own.
        has_stop_string = None
        if self.stop_strings is not None:
            has_stop_string = self.stop_strings.start(prompt_ids)

        def is_last(token: int) -> bool:
            if token in self.stop_ids:
                return True
            return has_stop_string is not None and has_stop_string(token)

        return is_last


def _check_source(model: Decoder, source_ids: Sequence[int]) -> None:
    """Raise ConfigError for a source that the encoder cannot read."""
    if len(source_ids) == 0:
        raise ConfigError("the source is empty: the encoder needs at least one token.")
    most = model.config.max_positions
    if model.config.position == "learned" and len(source_ids) > most:
        raise ConfigError(
            f"a source of {len(source_ids)} tokens exceeds the model's position table (model.max_positions="
            f"{most}). Shorten it to {most}."
        )
    _check_ids(model, source_ids, "source")


def _check_ids(model: Decoder, ids: Sequence[int], side: str) -> None:
    vocab_size = model.config.vocab_size
    invalid_ids = [token for token in ids if not 0 <= token < vocab_size]
    if invalid_ids:
        raise ConfigError(f"{side} id {invalid_ids[0]} is not in the model's vocabulary, 0 to {vocab_size - 1}.")


class Continuation:
    """Continuation chosen token by token."""

    def __init__(self, request: GenerationOptions, prompt_ids: Sequence[int]) -> None:
        assert not isinstance(request.strategy, Beams), "beam search chooses several tokens per step"
        self.ids: list[int] = []
        """New tokens so far."""
        self._choose = request.strategy.start()
        self._apply_penalties = request.penalties.start(prompt_ids)
        self._is_last = request.ends(prompt_ids)
        self._max_new_tokens = request.max_new_tokens
        self._is_stopped = False

    @property
    def is_finished(self) -> bool:
        """True if no token follows."""
        return self._is_stopped or len(self.ids) >= self._max_new_tokens

    def choose(self, logits_V: Tensor) -> int:
        """Return the next token, given its logits in fp32; call once per token, because it may use random numbers."""
        return self._choose(self._apply_penalties(logits_V, self.ids))

    def add(self, token: int) -> None:
        """Add the chosen token."""
        self.ids.append(token)
        self._is_stopped = self._is_last(token)
