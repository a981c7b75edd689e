"""Generation options, and ``Continuation``: one prompt's new tokens, the choice of the next one, and the stopping rule.

Axes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.penalties import Penalties
from longctx.generation.prefill import CHUNK_TOKENS, check_chunk_tokens
from longctx.generation.sampling import Greedy, Sampling
from longctx.generation.stop_strings import StopStrings
from longctx.model.decoder import Decoder

_MAX_RESERVED_TOKENS = 256
"""Maximum new tokens to reserve cache memory for together with the prompt's.

Most continuations end before ``max_new_tokens``, so reserving for all of them would waste memory. Longer ones grow the
cache, which copies its keys and values each time.
"""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options for continuing prompts, the same for every prompt in a batch."""

    max_new_tokens: int
    """Maximum tokens to add."""
    strategy: Greedy | Sampling | Beams = field(default_factory=Greedy)
    penalties: Penalties = field(default_factory=Penalties)
    """Applied before the strategy sees the logits."""
    num_choices: int | None = None
    """Only ids below this number are chosen; None means all that the head predicts."""
    stop_ids: Collection[int] = ()
    """Token ids that end a continuation, usually EOS; the id itself is included."""
    stop_strings: StopStrings | None = None
    """Texts that end a continuation with the token that completes them."""
    chunk_tokens: int = CHUNK_TOKENS
    """Approximate prompt tokens per forward pass (chunked prefill), over all processes."""

    @property
    def num_caches(self) -> int:
        """KV caches needed per prompt: one per beam."""
        if isinstance(self.strategy, Beams):
            return self.strategy.num_beams
        return 1

    @property
    def reserved_tokens(self) -> int:
        """New tokens to reserve cache memory for; the last one is never fed back, so it stores no keys."""
        return min(max(self.max_new_tokens - 1, 0), _MAX_RESERVED_TOKENS)

    @property
    def is_greedy(self) -> bool:
        """True if every token is the plain argmax, so that one argmax serves a batch: greedy without penalties."""
        return isinstance(self.strategy, Greedy) and self.penalties == Penalties() and self.num_choices is None

    def of_prompt(self, number: int) -> GenerationOptions:
        """Return the options for one of several prompts: its samples do not depend on the others'."""
        # With one seed for all, a random number that prefers some token would prefer it in every prompt.
        if not isinstance(self.strategy, Sampling):
            return self
        return replace(self, strategy=replace(self.strategy, seed=self.strategy.seed + number))

    def check(self, model: Decoder, prompt_ids: Sequence[int], source_ids: Sequence[int] | None = None) -> None:
        """Raise ConfigError if the model cannot continue text, or if the options, prompt or source are invalid.

        ``source_ids`` is the encoder's input; None for a model without an encoder.
        """
        check_chunk_tokens(self.chunk_tokens)
        if self.num_choices is not None and isinstance(self.strategy, Beams):
            raise ConfigError(f"num_choices={self.num_choices} has no effect on beams. Choose greedily, or sample.")
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
            _check_side(model, source_ids, "source", "The encoder needs at least one token.")
        _check_side(model, prompt_ids, "prompt", "Start with the begin id.")
        if self.max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens} must not be negative.")

    def stopping_criterion(self, prompt_ids: Sequence[int]) -> Callable[[int], bool]:
        """Return a function that takes a continuation's tokens in turn and returns True for one that ends it.

        It checks stop ids and stop strings; the caller counts tokens against ``max_new_tokens``.
        """
        # The function keeps the text so far, so each continuation needs its own.
        completes_stop_string = None
        if self.stop_strings is not None:
            completes_stop_string = self.stop_strings.start(prompt_ids)

        def is_last(token: int) -> bool:
            if token in self.stop_ids:
                return True
            return completes_stop_string is not None and completes_stop_string(token)

        return is_last


class Continuation:
    """One prompt's continuation, extended token by token.

    Choosing and adding are separate calls: if processes share the sequence, one of them chooses and all add its token.
    """

    def __init__(self, options: GenerationOptions, prompt_ids: Sequence[int]) -> None:
        assert not isinstance(options.strategy, Beams), "beam search chooses several tokens per step"
        self.ids: list[int] = []
        """New tokens so far."""
        self._choose = options.strategy.start()
        self._apply_penalties = options.penalties.start(prompt_ids)
        self._is_last = options.stopping_criterion(prompt_ids)
        self._num_choices, self._max_new_tokens = options.num_choices, options.max_new_tokens
        self._is_stopped = False

    @property
    def is_finished(self) -> bool:
        """True after a stop id, a stop string, or ``max_new_tokens`` tokens."""
        return self._is_stopped or len(self.ids) >= self._max_new_tokens

    def choose(self, logits_V: Tensor) -> int:
        """Return the next token's id, given its logits [V] in fp32.

        Call it once per token, because sampling advances a random generator.
        """
        return self._choose(self._apply_penalties(logits_V, self.ids)[: self._num_choices])

    def add(self, token: int) -> None:
        """Append the chosen token, and check if it ends the continuation."""
        self.ids.append(token)
        self._is_stopped = self._is_last(token)


def _check_side(model: Decoder, ids: Sequence[int], side: str, hint: str) -> None:
    """Raise ConfigError for a ``side``, "prompt" or "source", that its stack cannot read; ``hint`` if it is empty."""
    if len(ids) == 0:
        raise ConfigError(f"the {side} is empty. {hint}")
    # Checked before a stack runs: the model's own check (``plans.check_learned``) advises on training documents.
    max_positions = model.config.max_positions
    if model.config.position == "learned" and len(ids) > max_positions:
        raise ConfigError(
            f"a {side} of {len(ids)} tokens exceeds the model's position table (model.max_positions={max_positions}). "
            f"Shorten it to {max_positions}."
        )
    # An embedding lookup on a GPU would fail later, with a device-side assertion that names no id.
    vocab_size = model.config.vocab_size
    invalid_ids = [token for token in ids if not 0 <= token < vocab_size]
    if invalid_ids:
        raise ConfigError(f"{side} id {invalid_ids[0]} is not in the model's vocabulary, 0 to {vocab_size - 1}.")
