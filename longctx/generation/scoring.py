"""Log-likelihoods of continuations: short ones in one packed row, long ones after one reading of their context.

Axes: B = 1 row, t tokens on this process, T all tokens, N scored tokens, M model width, V vocabulary; 2 is
(log-likelihood, 1 if the token is the most probable).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.generation.prefill import (
    CHUNK_TOKENS,
    can_share,
    check_outputs,
    given_tokens,
    last_logits,
    prefill,
    read_chunks,
)
from longctx.model.attention.kv_cache import KVCache
from longctx.model.decoder import Decoder

HEAD_TOKENS = 256
"""Maximum tokens with logits in memory at once."""


class Pair(NamedTuple):
    """Context and continuation, as ids; neither is empty."""

    context: Sequence[int]
    continuation: Sequence[int]

    @property
    def ids(self) -> list[int]:
        """All ids. A model reads all but the last, because no token after that is scored."""
        return list(self.context) + list(self.continuation)

    @property
    def num_read(self) -> int:
        """Number of ids that a model reads."""
        return len(self.context) + len(self.continuation) - 1


class Score(NamedTuple):
    """Score for a continuation."""

    log_likelihood: float
    is_greedy: bool
    """True if greedy decoding would produce it: each token is the most probable after those before it."""


@torch.no_grad()
def score_packed(model: Decoder, pairs: Sequence[Pair]) -> list[Score]:
    """Score pairs in one forward pass, packed as documents in one row. For a single process."""
    for pair in pairs:
        _check(model, pair)
    device = next(model.parameters()).device
    bounds = list(accumulate((pair.num_read for pair in pairs), initial=0))
    tokens_T = torch.tensor([token for pair in pairs for token in pair.ids[:-1]], device=device)
    positions_T = torch.cat([torch.arange(pair.num_read) for pair in pairs]).to(device)
    hidden_BTM = model(tokens_T[None], positions_T[None], bounds)
    targets_T = torch.cat([torch.tensor(pair.ids[1:]) for pair in pairs])
    # Position i predicts token i + 1, so scoring starts at the context's last token.
    is_scored_T = torch.cat([torch.arange(pair.num_read) >= len(pair.context) - 1 for pair in pairs])
    found_2T = _token_scores(model, hidden_BTM, targets_T, is_scored_T)
    parts = found_2T[:, is_scored_T.to(device)].split([len(pair.continuation) for pair in pairs], dim=1)
    return [_score(part_2N) for part_2N in parts]


@torch.no_grad()
def score_after_context(
    model: Decoder, context: Sequence[int], continuations: Sequence[Sequence[int]], *, chunk_tokens: int = CHUNK_TOKENS
) -> list[Score]:
    """Score each continuation of one context, which is read once, about ``chunk_tokens`` at a time.

    All processes that share the model's sequences must make the same call, and get the same result.
    """
    pairs = [Pair(context, continuation) for continuation in continuations]
    for pair in pairs:
        _check(model, pair)
    if len(pairs) == 1 or not can_share(model):
        first, ids = len(context) - 1, [pair.ids for pair in pairs]
        return [_score(_read_and_score(model, x[:-1], x[1:], first, model.new_cache(), chunk_tokens)) for x in ids]
    cache = model.new_cache()
    # Reserve space in the context's buffers, which are copied: otherwise each copy would be copied once more.
    cache.reserve(max(map(len, continuations)) - 1)
    logits_V = last_logits(model, prefill(model, context, cache, chunk_tokens))[0]
    scores = []
    for continuation in continuations:
        found = [_of_logits(logits_V[None], torch.tensor(continuation[:1], device=logits_V.device))]
        if len(continuation) > 1:
            found.append(_read_and_score(model, continuation[:-1], continuation[1:], 0, cache.copy(), chunk_tokens))
        scores.append(_score(torch.cat(found, dim=1)))
    return scores


def _check(model: Decoder, pair: Pair) -> None:
    """Raise ConfigError for an empty part or an id outside the vocabulary."""
    if not len(pair.context) or not len(pair.continuation):
        raise ConfigError(
            f"the context has {len(pair.context)} tokens and the continuation {len(pair.continuation)}: each needs "
            "one. Use the begin id for an empty context."
        )
    vocab_size = model.config.vocab_size
    for ids in pair:
        invalid_ids = [i for i in ids if not 0 <= i < vocab_size]
        if invalid_ids:
            raise ConfigError(f"id {invalid_ids[0]} is not in the model's vocabulary, 0 to {vocab_size - 1}.")
    check_outputs(model, pair.continuation)


def _read_and_score(
    model: Decoder, ids: Sequence[int], targets: Sequence[int], first: int, cache: KVCache, chunk_tokens: int
) -> Tensor:
    """Read ids after the cached ones; return [2, N] for the targets from ``first`` on, on every process."""
    start, found = cache.num_tokens, []
    for chunk, hidden_BtM in read_chunks(model, ids, cache, chunk_tokens):
        at_t = chunk.indices - start
        # Every process skips the same chunks, because collecting is collective.
        if chunk.start - start + chunk.num_tokens > first:
            targets_t = given_tokens(chunk, targets, start)
            found_2t = _token_scores(model, hidden_BtM, targets_t, at_t >= first)
            found.append(cache.collect(found_2t, chunk))
    return torch.cat(found, dim=1)[:, first - len(ids) :]


def _token_scores(model: Decoder, hidden_BtM: Tensor, targets_t: Tensor, is_scored_t: Tensor) -> Tensor:
    """Return [2, t] for these tokens' targets, fp32; zeros for unscored tokens."""
    device = hidden_BtM.device
    found_2t = torch.zeros(2, len(targets_t), device=device)
    for at_N in is_scored_t.nonzero()[:, 0].split(HEAD_TOKENS):
        # A process may have no scored tokens.
        if len(at_N):
            on_device_N = at_N.to(device)
            # Logits for a full context would be the largest tensor of all.
            logits_NV = model.logits(hidden_BtM[:, on_device_N])[0].float()
            found_2t[:, on_device_N] = _of_logits(logits_NV, targets_t[at_N].to(device))
    return found_2t


def _of_logits(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return [2, N] for the targets, fp32."""
    log_probs_N = logits_NV.log_softmax(-1).gather(1, targets_N[:, None])[:, 0]
    is_greedy_N = logits_NV.argmax(-1) == targets_N
    return torch.stack((log_probs_N, is_greedy_N.float()))


def _score(found_2N: Tensor) -> Score:
    """Combine token scores into a continuation's score."""
    # Sum in float64: a text with a million tokens would lose precision otherwise.
    return Score(float(found_2N[0].double().sum()), bool(found_2N[1].bool().all()))
