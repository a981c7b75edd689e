"""Generate tokens with a decoder, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.generation.sampling import Greedy, Sample
from longctx.model.attention.cache import LocalKVCache
from longctx.model.attention.core import KVCache
from longctx.model.decoder import Decoder


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    strategy: Greedy | Sample | None = None,
    *,
    stop_ids: Collection[int] = (),
    cache: KVCache | None = None,
    use_cache: bool = True,
) -> list[int]:
    """Continue the prompt by at most ``max_new_tokens`` tokens; one of ``stop_ids`` is the last token where it comes.

    The prompt is read once, then one token a step against the cached keys (``cache`` must be empty; default: a
    ``LocalKVCache``). ``use_cache=False`` reads everything again at each step, which is slow and gives the same tokens.
    """
    return list(
        stream(model, prompt_ids, max_new_tokens, strategy, stop_ids=stop_ids, cache=cache, use_cache=use_cache)
    )


def stream(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    strategy: Greedy | Sample | None = None,
    *,
    stop_ids: Collection[int] = (),
    cache: KVCache | None = None,
    use_cache: bool = True,
) -> Iterator[int]:
    """The tokens of ``generate``, each as soon as it is chosen. A request that cannot be served fails at the call."""
    check_request(model, prompt_ids, max_new_tokens)
    choose = (strategy or Greedy()).start()
    if use_cache and cache is None:
        cache = LocalKVCache()
    if not use_cache:
        cache = None
    return _tokens(model, list(prompt_ids), max_new_tokens, choose, stop_ids, cache)


@torch.no_grad()
def _tokens(
    model: Decoder,
    ids: list[int],
    max_new_tokens: int,
    choose: Callable[[Tensor], int],
    stop_ids: Collection[int],
    cache: KVCache | None,
) -> Iterator[int]:
    """Yield token after token; ``ids`` grows by each."""
    start = 0
    for _ in range(max_new_tokens):
        ids.append(choose(_next_logits(model, ids[start:], start, cache)))
        if cache is not None:
            # Only the newest token is not in the cache.
            start = len(ids) - 1
        yield ids[-1]
        if ids[-1] in stop_ids:
            break


def check_request(model: Decoder, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """ConfigError for an empty prompt, an id outside the vocabulary, or a negative number of tokens."""
    if len(prompt_ids) == 0:
        raise ConfigError("the prompt is empty: a model continues at least one token. Start with the begin id.")
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must not be negative.")
    vocab_size = model.config.vocab_size
    outside = [i for i in prompt_ids if not 0 <= i < vocab_size]
    if outside:
        raise ConfigError(f"prompt id {outside[0]} is not in the model's vocabulary, 0 to {vocab_size - 1}.")


def _next_logits(model: Decoder, ids: Sequence[int], start: int, cache: KVCache | None) -> Tensor:
    """Logits [V], fp32, after ``ids``, the first of which has the position ``start``."""
    device = next(model.parameters()).device
    tokens_BT = torch.tensor([ids], device=device)
    positions_BT = torch.arange(start, start + len(ids), device=device)[None]
    hidden_BTM = model(tokens_BT, positions_BT, cache=cache)
    # The head of the last token alone: logits of a long prompt would be the largest tensor of all.
    return model.logits(hidden_BTM[:, -1:])[0, 0].float()
