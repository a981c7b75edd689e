"""Token-by-token generation with a decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from longctx.generation.beams import Beams
from longctx.generation.continuation import Continuation, GenerationOptions
from longctx.generation.decoder_beam_search import search_beams
from longctx.generation.penalties import Penalties
from longctx.generation.prefill import CHUNK_TOKENS, last_logits, prefill, read_sources, starts_over
from longctx.generation.sampling import Greedy, Sampling
from longctx.generation.stop_strings import StopStrings
from longctx.model.attention.kv_cache import KVCache
from longctx.model.decoder import Decoder


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    strategy: Greedy | Sampling | Beams | None = None,
    *,
    source_ids: Sequence[int] | None = None,
    penalties: Penalties | None = None,
    stop_ids: Collection[int] = (),
    stop_strings: StopStrings | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> list[int]:
    """Continue the prompt by at most ``max_new_tokens`` tokens, up to and including the first of ``stop_ids``.

    The token that completes one of ``stop_strings`` also ends it. ``penalties`` change logits before the strategy
    chooses. For a model with an encoder, ``source_ids`` is the encoder's input, and the prompt is the target so far:
    the start id.

    The prompt is read once, about ``chunk_tokens`` at a time, then one token per step with cached keys. All processes
    that share the model's sequences must make the same call with the full prompt, and get the same tokens.
    """
    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        strategy=strategy or Greedy(),
        penalties=penalties or Penalties(),
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        chunk_tokens=chunk_tokens,
    )
    return list(stream(model, prompt_ids, options, source_ids))


def stream(
    model: Decoder, prompt_ids: Sequence[int], options: GenerationOptions, source_ids: Sequence[int] | None = None
) -> Iterator[int]:
    """Yield the tokens of ``generate``, each as soon as it is chosen; with beams, all when the search is over.

    An invalid request fails at the call.
    """
    options.check(model, prompt_ids, source_ids)
    # The model's attention core knows which processes share the sequence.
    cache = model.new_caches(options.num_caches)()
    # Otherwise the first new token would copy the full prompt's keys.
    cache.reserve(options.reserved_tokens)
    if source_ids is not None:
        read_sources(model, [source_ids], [cache])
    if isinstance(options.strategy, Beams):
        return search_beams(model, list(prompt_ids), options, options.strategy, cache)
    return _tokens(model, list(prompt_ids), options, cache)


@torch.inference_mode()
def _tokens(model: Decoder, prompt_ids: list[int], options: GenerationOptions, cache: KVCache) -> Iterator[int]:
    """Yield tokens; each is read when the next is requested."""
    continuation, new_ids = Continuation(options, prompt_ids), prompt_ids
    while not continuation.is_finished:
        # The cached keys no longer match the rotation: read everything again.
        if starts_over(model, cache, len(new_ids)):
            cache.free()
            new_ids = prompt_ids + continuation.ids
        logits_V = last_logits(model, prefill(model, new_ids, cache, options.chunk_tokens))[0]
        # Choose once and broadcast: with different rounding, processes would otherwise continue different texts.
        new_ids = cache.once(lambda logits_V=logits_V: [continuation.choose(logits_V)], 1)
        continuation.add(new_ids[0])
        yield new_ids[0]
