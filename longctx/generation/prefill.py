"""Prefill: read tokens into a cache, chunk by chunk, so that memory outside the cache does not grow with the prompt.

The cache determines this process's tokens within a chunk, so reading is the same for one process and for many.

Axes: B rows, t chunk tokens on this process, T all tokens, M model width, N sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from longctx.batch import IGNORED_TARGET, PackedDocuments, Stream
from longctx.errors import ConfigError
from longctx.kernels.dtypes import int64_tensor
from longctx.model.attention.core import tokens_of
from longctx.model.attention.kv_cache import KVCache, TokenChunk
from longctx.model.attention.sequences import SequencesCache, join
from longctx.model.decoder import Decoder
from longctx.model.experts.replay import RoutingReplay
from longctx.model.training_pass import TrainingPass

CHUNK_TOKENS = 4096
"""Prompt tokens per forward pass, summed over processes."""


def check_chunk_tokens(chunk_tokens: int) -> None:
    """Raise ConfigError unless ``chunk_tokens`` is at least 1."""
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens={chunk_tokens} must be at least 1. The default is {CHUNK_TOKENS}.")


def starts_over(model: Decoder, cache: KVCache, num_new: int) -> bool:
    """Return True if ``num_new`` tokens after the cached ones change the rotation of the cached keys."""
    config = model.config
    # LongRoPE has one table for sequences up to ``original_max_positions`` tokens and another for longer ones: at the
    # switch all tokens must be read again, as in transformers' Phi-3. Frequencies in a dynamic rope change with every
    # token, but its keys keep their original rotation, as in transformers.
    if config.position != "rope" or config.rope.kind != "longrope":
        return False
    return 0 < cache.num_tokens <= config.rope.original_max_positions < cache.num_tokens + num_new


def can_share(model: Decoder) -> bool:
    """Return True if texts may be read together, or after one reading of their common prefix.

    That is not possible if frequencies depend on the text's length.
    """
    return model.config.position != "rope" or not model.config.rope.depends_on_length


@torch.no_grad()
def read_sources(
    model: Decoder, sources: Sequence[Sequence[int]], caches: Sequence[KVCache], chunk_tokens: int = CHUNK_TOKENS
) -> None:
    """Read a source into each cache's sequence with the model's encoder, batched up to a chunk of tokens."""
    first, tokens = 0, 0
    for number, ids in enumerate(sources):
        if number > first and tokens + len(ids) > chunk_tokens:
            _read_together(model, sources[first:number], caches[first:number])
            first, tokens = number, 0
        tokens += len(ids)
    if first < len(sources):
        _read_together(model, sources[first:], caches[first:])


def _read_together(model: Decoder, sources: Sequence[Sequence[int]], caches: Sequence[KVCache]) -> None:
    """Encode sources in one row, and give each cache its own part."""
    documents = PackedDocuments.of_lengths([len(ids) for ids in sources])
    row = Stream(
        tokens=torch.cat([torch.as_tensor(ids) for ids in sources])[None],
        positions=torch.cat([torch.arange(count) for count in documents.lengths])[None],
        document_ids=torch.arange(len(sources)).repeat_interleave(torch.tensor(documents.lengths))[None],
        documents=documents,
    )
    device = _device_of(model)
    whole = caches[0].encoded(row, lambda shard: model.encode(shard.to(device), keeps_keys=True))
    for cache, (start, stop) in zip(caches, pairwise(documents.bounds), strict=True):
        own = PackedDocuments.of_lengths([stop - start])
        cache.source = replace(whole, hidden_BsM=whole.hidden_BsM[:, start:stop], documents=own, keys={})


@torch.no_grad()
def prefill(model: Decoder, ids: Sequence[int], cache: KVCache, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Read tokens after the cached ones; return hidden states [1, t, M] for the last few, the last at the end."""
    last_BtM = None
    for _, hidden_BtM in read_chunks(model, ids, cache, chunk_tokens):
        last_BtM = hidden_BtM
    assert last_BtM is not None, "no token to read"
    return last_BtM


def last_logits(model: Decoder, hidden_BtM: Tensor) -> Tensor:
    """Return fp32 logits [B, V] after the last token."""
    # Apply the head to the last token only: logits for a long prompt would be the largest tensor of all.
    return model.logits(hidden_BtM[:, -1:])[:, 0].float()


@torch.no_grad()
def read_each(
    model: Decoder, ids: Sequence[Sequence[int]], caches: Sequence[KVCache], chunk_tokens: int = CHUNK_TOKENS
) -> Tensor:
    """Read tokens from N sequences into their caches, together; return fp32 logits [N, V] after the last tokens.

    A pass reads at most about ``chunk_tokens``, over all sequences.
    """
    if len(caches) == 1 or not can_share(model):
        parts = [prefill(model, of_one, cache, chunk_tokens)[:, -1] for of_one, cache in zip(ids, caches, strict=True)]
    elif all(len(of_one) == 1 for of_one in ids):
        parts = [_newest_hidden(model, [of_one[0] for of_one in ids], caches)]
    else:
        parts = _last_hidden(model, ids, caches, chunk_tokens)
    # Apply the head to the last tokens only: logits for a long prompt would be the largest tensor of all.
    return model.logits(torch.cat(parts)[None])[0].float()


def _newest_hidden(model: Decoder, ids: list[int], caches: Sequence[KVCache]) -> Tensor:
    """Read one token per sequence; return their hidden states [N, M]."""
    cache, device = SequencesCache(caches), _device_of(model)
    chunk = cache.chunk(len(ids))
    tokens_BN = int64_tensor(ids)[None].to(device, non_blocking=True)
    positions_BN = chunk.indices[None].to(device, non_blocking=True)
    return model(tokens_BN, positions_BN, cache=cache, chunk=chunk)[0]


def _last_hidden(
    model: Decoder, ids: Sequence[Sequence[int]], caches: Sequence[KVCache], chunk_tokens: int
) -> list[Tensor]:
    """Read all tokens; return the hidden state [1, M] at each sequence's last token."""
    device, first_indices = _device_of(model), [cache.num_tokens for cache in caches]
    coming = [cache.chunks(len(of_one), chunk_tokens) for of_one, cache in zip(ids, caches, strict=True)]
    waiting = {n: next(of_one) for n, of_one in enumerate(coming)}
    last: dict[int, Tensor] = {}
    # Each pass takes the next chunk from as many sequences as fit, so short prompts share passes with long ones.
    while waiting:
        sequences = _next_pass(waiting, chunk_tokens)
        chunk = join([waiting[n] for n in sequences])
        tokens_t = torch.cat([given_tokens(waiting[n], ids[n], first_indices[n]) for n in sequences])
        cache = SequencesCache([caches[n] for n in sequences])
        tokens_Bt = tokens_t[None].to(device, non_blocking=True)
        positions_Bt = chunk.indices[None].to(device, non_blocking=True)
        hidden_BtM = model(tokens_Bt, positions_Bt, cache=cache, chunk=chunk)
        for n, tokens in zip(sequences, tokens_of(chunk.sequences), strict=True):
            # Overwritten until the sequence's last chunk.
            last[n] = hidden_BtM[:, tokens.stop - 1]
            next_chunk = next(coming[n], None)
            del waiting[n]
            if next_chunk is not None:
                waiting[n] = next_chunk
    return [last[n] for n in range(len(caches))]


def _next_pass(waiting: Mapping[int, TokenChunk], chunk_tokens: int) -> list[int]:
    """Return the sequences to read in one pass, within the token limit: all split over processes, or all replicated."""
    found: list[int] = []
    num_tokens = 0
    is_replicated = next(iter(waiting.values())).is_replicated
    for number, chunk in waiting.items():
        if chunk.is_replicated != is_replicated:
            continue
        num_tokens += chunk.num_tokens
        if found and num_tokens > chunk_tokens:
            break
        found.append(number)
    return found


def sequence_nll(model: Decoder, ids: Sequence[int], *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Return each token's negative log-likelihood after the first, given those before it, [T − 1], fp32.

    Every process that shares the model's sequences gets all values.
    """
    return token_scores(model, ids, chunk_tokens=chunk_tokens).nll


@dataclass(frozen=True)
class TokenScores:
    """Scores for each token in a sequence."""

    nll: Tensor
    """Negative log-likelihood per token after the first [T − 1], fp32."""
    experts: Tensor | None = None
    """Experts that read each token [T, L, k], int32 on the CPU, L expert layers; None if not requested."""


@torch.no_grad()
def token_scores(
    model: Decoder, ids: Sequence[int], *, chunk_tokens: int = CHUNK_TOKENS, with_experts: bool = False
) -> TokenScores:
    """Read a sequence and score each token given those before it, optionally with the chosen experts.

    Every process that shares the model's sequences gets all scores. Raise ConfigError for fewer than two tokens.
    """
    if len(ids) < 2:
        raise ConfigError(f"{len(ids)} tokens cannot be scored: give at least 2, because the first has no score.")
    check_chunk_tokens(chunk_tokens)
    check_outputs(model, ids[1:])
    cache, nll, experts = model.new_cache(), [], []
    # The last token has no target, but is read like the others, so that the chunks cover the full sequence.
    targets = [*ids[1:], IGNORED_TARGET]
    routing_records: list[RoutingReplay] | None = None
    if with_experts:
        routing_records = []
    for chunk, hidden_BtM in read_chunks(model, ids, cache, chunk_tokens, routing_records):
        # A chunk's full logits never exist, and each process scores the tokens that it has read.
        targets_Bt = given_tokens(chunk, targets)[None].to(hidden_BtM.device, non_blocking=True)
        nll.append(cache.collect(model.token_nll(hidden_BtM, targets_Bt), chunk)[0])
        if routing_records:
            chosen_LtK = routing_records.pop().experts_LNk.to(torch.int32)
            chosen_CT = cache.collect(chosen_LtK.transpose(1, 2).flatten(0, 1).contiguous(), chunk)
            experts.append(chosen_CT.T.unflatten(1, (len(chosen_LtK), -1)).cpu())
    return TokenScores(torch.cat(nll)[:-1], torch.cat(experts) if experts else None)


def check_outputs(model: Decoder, targets: Sequence[int]) -> None:
    """Raise ConfigError for a target that the model's head has no output for."""
    rows, largest = model.config.head_rows, max(targets)
    if model.config.output_vocab_size and largest >= rows:
        raise ConfigError(
            f"id {largest} has no likelihood: the model predicts ids 0 to {rows - 1} only "
            f"(model.output_vocab_size={model.config.output_vocab_size}). Only a sequence's first token may be another."
        )


def read_chunks(
    model: Decoder,
    ids: Sequence[int],
    cache: KVCache,
    chunk_tokens: int,
    routing_records: list[RoutingReplay] | None = None,
) -> Iterator[tuple[TokenChunk, Tensor]]:
    """Read tokens after the cached ones; yield each chunk with hidden states [1, t, M] for its tokens on this process.

    These tokens' chosen experts are appended to ``routing_records`` before each chunk is yielded.
    """
    device, first = _device_of(model), cache.num_tokens
    for chunk in cache.chunks(len(ids), chunk_tokens):
        # Copy asynchronously: the device is still busy with the previous chunk.
        tokens_Bt = given_tokens(chunk, ids, first)[None].to(device, non_blocking=True)
        # A position is an index in the sequence: the cache holds all tokens from the first on.
        positions_Bt = chunk.indices[None].to(device, non_blocking=True)
        training_pass = None
        if routing_records is not None:
            routing_records.append(RoutingReplay())
            training_pass = TrainingPass(replay=routing_records[-1])
        yield chunk, model(tokens_Bt, positions_Bt, cache=cache, chunk=chunk, training_pass=training_pass)


def given_tokens(chunk: TokenChunk, ids: Sequence[int], first: int = 0) -> Tensor:
    """Return ids [t] for this process's part of a chunk, from ids that start at the sequence's token ``first``."""
    # Convert the chunk only: a tensor for the full prompt would take eight bytes per token next to the cache.
    parts = [int64_tensor(ids[part.start - first : part.stop - first : part.step]) for part in chunk.given]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)


def _device_of(model: Decoder) -> torch.device:
    # Use the embedding: listing all parameters visits all modules.
    return model.model.embed_tokens.weight.device
