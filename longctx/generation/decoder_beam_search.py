"""Beam search with a decoder: all beams advance in one pass, each with its own cache.

Axes: N beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longctx.generation.beams import Beam, Beams, BeamSearch
from longctx.generation.continuation import GenerationOptions
from longctx.generation.prefill import last_logits, prefill, read_each, starts_over
from longctx.model.attention.kv_cache import KVCache
from longctx.model.decoder import Decoder

_NONE = -1
"""Broadcast placeholder for a missing token."""


@torch.inference_mode()
def search_beams(
    model: Decoder, prompt_ids: list[int], options: GenerationOptions, beams: Beams, cache: KVCache
) -> Iterator[int]:
    """Yield the best continuation when it is found.

    Processes that share the cache follow the first one's search; the others' search state is never read.
    """
    if options.max_new_tokens == 0:
        return
    state = BeamSearch(
        beams, options.max_new_tokens, lambda ids: _is_finished(options, prompt_ids, ids), len(options.stop_ids)
    )
    apply_penalties = options.penalties.start(prompt_ids)

    def next_beams(logits_NV: Tensor) -> list[int]:
        log_probs_NV = logits_NV.cpu().log_softmax(-1)
        # Penalties apply to log-probabilities here, as in transformers.
        penalised = [apply_penalties(row_V, ids) for row_V, ids in zip(log_probs_NV, state.running, strict=True)]
        chosen = [number for beam in state.advance(torch.stack(penalised)) for number in beam]
        return chosen or [_NONE] * (2 * beams.num_beams)

    # Every beam is the prompt, read once: its next-token logits are the same for all, and only one beam is extended.
    logits_NV = last_logits(model, prefill(model, prompt_ids, cache, options.chunk_tokens)).expand(beams.num_beams, -1)
    caches: list[KVCache] = [cache] * beams.num_beams
    # Beams as broadcast to all processes.
    running: list[list[int]] = [[]] * beams.num_beams
    while True:
        received = cache.once(lambda logits_NV=logits_NV: next_beams(logits_NV), 2 * beams.num_beams)
        if received[0] == _NONE:
            break
        chosen = [Beam(parent, token) for parent, token in zip(received[::2], received[1::2], strict=True)]
        caches = assign_caches(caches, chosen)
        running = [running[beam.parent] + [beam.token] for beam in chosen]
        pending_ids = [[beam.token] for beam in chosen]
        if starts_over(model, caches[0], 1):
            for of_one in caches:
                of_one.free()
            pending_ids = [prompt_ids + ids for ids in running]
        logits_NV = read_each(model, pending_ids, caches, options.chunk_tokens)
    # The other processes do not know the length, so broadcast a fixed number of integers.
    padding = [_NONE] * options.max_new_tokens
    best = cache.once(lambda: (state.best() + padding)[: options.max_new_tokens], options.max_new_tokens)
    yield from (token for token in best if token != _NONE)


def assign_caches(caches: Sequence[KVCache], beams: Sequence[Beam]) -> list[KVCache]:
    """Return each beam's cache: its parent's, or a copy if another beam has taken it."""
    kept_ids = {id(caches[beam.parent]) for beam in beams}
    # Free first: copies reuse the ended beams' memory.
    for cache in {id(cache): cache for cache in caches}.values():
        if id(cache) not in kept_ids:
            cache.free()
    taken: set[int] = set()
    found = []
    for beam in beams:
        cache = caches[beam.parent]
        if id(cache) in taken:
            cache = cache.copy()
        taken.add(id(cache))
        found.append(cache)
    return found


def _is_finished(options: GenerationOptions, prompt_ids: list[int], ids: Sequence[int]) -> bool:
    if options.stop_strings is None:
        return ids[-1] in options.stop_ids
    # Beams change places, so read each beam's text from its start.
    is_last = options.stopping_criterion(prompt_ids)
    return any(is_last(token) for token in ids)
