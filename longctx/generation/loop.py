"""Generate tokens with a decoder, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.generation.reading import CHUNK_TOKENS, check_chunk_tokens, read
from longctx.generation.sampling import Greedy, Sample
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
    chunk_tokens: int = CHUNK_TOKENS,
) -> list[int]:
    """Continue the prompt by at most ``max_new_tokens`` tokens; one of ``stop_ids`` is the last token where it comes.

    The prompt is read once, about ``chunk_tokens`` at a time, then one token a step against the cached keys (``cache``
    must be empty; default: ``model.new_cache()``). Processes that share the model's sequences call this alike, each
    with the whole prompt, and get the same tokens. ``use_cache=False`` reads everything again at each step, which is
    slow, gives the same tokens, and wants one process.
    """
    tokens = stream(
        model,
        prompt_ids,
        max_new_tokens,
        strategy,
        stop_ids=stop_ids,
        cache=cache,
        use_cache=use_cache,
        chunk_tokens=chunk_tokens,
    )
    return list(tokens)


def stream(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    strategy: Greedy | Sample | None = None,
    *,
    stop_ids: Collection[int] = (),
    cache: KVCache | None = None,
    use_cache: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Iterator[int]:
    """The tokens of ``generate``, each as soon as it is chosen. A request that cannot be served fails at the call."""
    check_request(model, prompt_ids, max_new_tokens)
    check_chunk_tokens(chunk_tokens)
    choose = (strategy or Greedy()).start()
    if not use_cache:
        return _tokens_without_cache(model, list(prompt_ids), max_new_tokens, choose, stop_ids)
    # The model's attention core knows which processes share the sequence.
    if cache is None:
        cache = model.new_cache()
    if cache.num_tokens:
        raise ConfigError(f"the cache holds {cache.num_tokens} tokens already: generate begins with an empty one.")
    return _tokens(model, list(prompt_ids), max_new_tokens, choose, stop_ids, cache, chunk_tokens)


@torch.no_grad()
def _tokens(
    model: Decoder,
    new_ids: list[int],
    max_new_tokens: int,
    choose: Callable[[Tensor], int],
    stop_ids: Collection[int],
    cache: KVCache,
    chunk_tokens: int,
) -> Iterator[int]:
    """Yield token after token; each is read when the next is asked for."""
    for _ in range(max_new_tokens):
        logits_V = _next_logits(model, read(model, new_ids, cache, chunk_tokens))
        # Chosen once and told to all: processes that rounded otherwise would each continue another text.
        token = cache.once(lambda logits_V=logits_V: choose(logits_V))
        yield token
        if token in stop_ids:
            break
        new_ids = [token]


@torch.no_grad()
def _tokens_without_cache(
    model: Decoder, ids: list[int], max_new_tokens: int, choose: Callable[[Tensor], int], stop_ids: Collection[int]
) -> Iterator[int]:
    """Yield token after token; ``ids`` grows by each."""
    device = next(model.parameters()).device
    for _ in range(max_new_tokens):
        positions_BT = torch.arange(len(ids), device=device)[None]
        hidden_BTM = model(torch.tensor([ids], device=device), positions_BT)
        ids.append(choose(_next_logits(model, hidden_BTM)))
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


def _next_logits(model: Decoder, hidden_BtM: Tensor) -> Tensor:
    """Logits [V], fp32, after the last of these tokens."""
    # The head of the last token alone: logits of a long prompt would be the largest tensor of all.
    return model.logits(hidden_BtM[:, -1:])[0, 0].float()
