"""Continuous batching: when a sequence ends, the next prompt enters.

Entering prompts are read together, chunk by chunk. Then the active sequences advance together by one token per step,
regardless of their lengths, so no sequence waits for another to end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.continuation import Continuation, GenerationOptions
from longctx.generation.loop import stream
from longctx.generation.penalties import Penalties
from longctx.generation.prefill import CHUNK_TOKENS, read_each, read_sources, starts_over
from longctx.generation.sampling import Greedy, Sampling
from longctx.generation.stop_strings import StopStrings
from longctx.model.attention.kv_cache import KVCache
from longctx.model.decoder import Decoder

MAX_SEQUENCES = 8
"""Default maximum of active sequences."""


def generate_batch(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    strategy: Greedy | Sampling | Beams | None = None,
    *,
    sources: Sequence[Sequence[int]] | None = None,
    numbers: Sequence[int] | None = None,
    penalties: Penalties | None = None,
    stop_ids: Collection[int] = (),
    stop_strings: StopStrings | None = None,
    max_sequences: int = MAX_SEQUENCES,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Iterator[tuple[int, list[int]]]:
    """Yield (prompt index, new tokens) for each prompt as soon as it ends.

    The tokens equal those from ``generate`` for the prompt alone, with its number added to the strategy's seed;
    ``numbers`` default to 0, 1, …. At most ``max_sequences`` are active, each with its own cache. Beam search handles
    one prompt after another. For a model with an encoder, ``sources`` has the encoder's input for each prompt. All
    processes that share the model's sequences must make the same call. An invalid request fails at the call.
    """
    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        strategy=strategy or Greedy(),
        penalties=penalties or Penalties(),
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        chunk_tokens=chunk_tokens,
    )
    if max_sequences < 1:
        raise ConfigError(f"max_sequences={max_sequences} must be at least 1. The default is {MAX_SEQUENCES}.")
    # Check all prompts now: hours later, a bad prompt would lose the others' continuations.
    of_each = list(sources) if sources is not None else [None] * len(prompts)
    if len(of_each) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts and {len(of_each)} sources: each prompt needs one.")
    for index, prompt_ids in enumerate(prompts):
        try:
            options.check(model, prompt_ids, of_each[index])
        except ConfigError as error:
            raise ConfigError(f"prompt {index} of {len(prompts)}: {error}") from error
    if isinstance(options.strategy, Beams):
        both = enumerate(zip(prompts, of_each, strict=True))
        return ((index, list(stream(model, prompt, options, source))) for index, (prompt, source) in both)
    of_prompts = [options.of_prompt(number) for number in numbers or range(len(prompts))]
    return _release_sources_after(model, _generate_all(model, prompts, of_each, options, of_prompts, max_sequences))


def _release_sources_after(model: Decoder, found: Iterator[tuple[int, list[int]]]) -> Iterator[tuple[int, list[int]]]:
    """Yield the results, and free the last sequences' source keys at the end."""
    try:
        yield from found
    finally:
        model.joined_sources = None


@dataclass(frozen=True, eq=False)
class _Sequence:
    """Active sequence."""

    index: int
    continuation: Continuation
    cache: KVCache


@torch.inference_mode()
def _generate_all(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sources: Sequence[Sequence[int] | None],
    options: GenerationOptions,
    of_prompts: Sequence[GenerationOptions],
    max_sequences: int,
) -> Iterator[tuple[int, list[int]]]:
    new_cache = model.new_caches(min(max_sequences, len(prompts)))
    # A reversed list, because removing its last element is fastest.
    waiting = list(reversed(range(len(prompts))))
    under_way: list[_Sequence] = []
    while waiting or under_way:
        accepted = []
        while waiting and len(under_way) + len(accepted) < max_sequences:
            index, cache = waiting.pop(), new_cache()
            cache.reserve(options.reserved_tokens)
            accepted.append(_Sequence(index, Continuation(of_prompts[index], prompts[index]), cache))
        accepted_sources = [source for s in accepted if (source := sources[s.index]) is not None]
        if accepted_sources:
            read_sources(model, accepted_sources, [s.cache for s in accepted], options.chunk_tokens)
        _enter(model, options, accepted, prompts)
        under_way += accepted
        finished = _pop_finished(under_way)
        yield from finished
        # A first token may also be the last: then the next prompt enters before the others continue.
        if under_way and not finished:
            new_ids = [_pending_ids(model, sequence, prompts) for sequence in under_way]
            caches = [sequence.cache for sequence in under_way]
            _add_tokens(options, under_way, read_each(model, new_ids, caches, options.chunk_tokens))
            yield from _pop_finished(under_way)


def _pending_ids(model: Decoder, sequence: _Sequence, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the ids missing from the sequence's cache: its newest token, or all if it must be read again."""
    ids = sequence.continuation.ids
    if not starts_over(model, sequence.cache, 1):
        return ids[-1:]
    sequence.cache.free()
    return list(prompts[sequence.index]) + ids


def _enter(
    model: Decoder, options: GenerationOptions, sequences: list[_Sequence], prompts: Sequence[Sequence[int]]
) -> None:
    """Read these sequences' prompts together, and choose their first tokens."""
    active = [sequence for sequence in sequences if not sequence.continuation.is_finished]
    if active:
        ids, caches = [prompts[sequence.index] for sequence in active], [sequence.cache for sequence in active]
        _add_tokens(options, active, read_each(model, ids, caches, options.chunk_tokens))


def _add_tokens(options: GenerationOptions, sequences: list[_Sequence], logits_NV: Tensor) -> None:
    """Choose each sequence's next token."""
    continuations = [sequence.continuation for sequence in sequences]

    def choose() -> list[int]:
        if options.is_greedy:
            return logits_NV.argmax(-1).tolist()
        return [of_one.choose(logits_V) for of_one, logits_V in zip(continuations, logits_NV, strict=True)]

    # One message for all sequences, if processes share them.
    tokens = sequences[0].cache.once(choose, len(sequences))
    for of_one, token in zip(continuations, tokens, strict=True):
        of_one.add(token)


def _pop_finished(under_way: list[_Sequence]) -> list[tuple[int, list[int]]]:
    """Remove the ended sequences and return their (index, tokens)."""
    finished = [sequence for sequence in under_way if sequence.continuation.is_finished]
    under_way[:] = [sequence for sequence in under_way if not sequence.continuation.is_finished]
    for sequence in finished:
        # The next prompt to enter reuses the freed memory.
        sequence.cache.free()
    return [(sequence.index, sequence.continuation.ids) for sequence in finished]
