"""Generate tokens with a decoder, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.continuation import Continuation, Request
from longctx.generation.penalties import Penalties
from longctx.generation.reading import CHUNK_TOKENS, check_chunk_tokens, last_logits, read, starts_over
from longctx.generation.sampling import Greedy, Sample
from longctx.generation.search import search
from longctx.generation.stop_strings import StopStrings
from longctx.model.attention.cache import KVCache
from longctx.model.decoder import Decoder


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    strategy: Greedy | Sample | Beams | None = None,
    *,
    penalties: Penalties | None = None,
    stop_ids: Collection[int] = (),
    stop_strings: StopStrings | None = None,
    cache: KVCache | None = None,
    use_cache: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
) -> list[int]:
    """Continue the prompt by at most ``max_new_tokens`` tokens; one of ``stop_ids`` is the last token where it comes.

    So is the token that completes one of ``stop_strings``. ``penalties`` change logits before the strategy chooses.

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
        penalties=penalties,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        cache=cache,
        use_cache=use_cache,
        chunk_tokens=chunk_tokens,
    )
    return list(tokens)


def stream(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    strategy: Greedy | Sample | Beams | None = None,
    *,
    penalties: Penalties | None = None,
    stop_ids: Collection[int] = (),
    stop_strings: StopStrings | None = None,
    cache: KVCache | None = None,
    use_cache: bool = True,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Iterator[int]:
    """The tokens of ``generate``, each as soon as it is chosen: by beams, all when the search is over.

    A request that cannot be served fails at the call.
    """
    request = Request(
        max_new_tokens=max_new_tokens,
        strategy=strategy or Greedy(),
        penalties=penalties or Penalties(),
        stop_ids=stop_ids,
        stop_strings=stop_strings,
    )
    request.check(model, prompt_ids)
    check_chunk_tokens(chunk_tokens)
    prompt_ids = list(prompt_ids)
    if not use_cache:
        if isinstance(request.strategy, Beams):
            raise ConfigError("beams continue cached keys. Leave use_cache=False out.")
        return _tokens_without_cache(model, prompt_ids, Continuation(request, prompt_ids))
    # The model's attention core knows which processes share the sequence.
    if cache is None:
        cache = model.new_caches(request.num_caches)()
    if cache.num_tokens:
        raise ConfigError(f"the cache holds {cache.num_tokens} tokens already: generate begins with an empty one.")
    # Else the first new token would copy the whole prompt's keys.
    cache.expect(request.expected_tokens)
    if isinstance(request.strategy, Beams):
        return search(model, prompt_ids, request, request.strategy, cache, chunk_tokens)
    return _tokens(model, prompt_ids, Continuation(request, prompt_ids), cache, chunk_tokens)


@torch.inference_mode()
def _tokens(
    model: Decoder, prompt_ids: list[int], continuation: Continuation, cache: KVCache, chunk_tokens: int
) -> Iterator[int]:
    """Yield token after token; each is read when the next is asked for."""
    new_ids = prompt_ids
    while not continuation.has_ended:
        if starts_over(model, cache, len(new_ids)):
            cache.free()
            new_ids = prompt_ids + continuation.ids
        logits_V = last_logits(model, read(model, new_ids, cache, chunk_tokens))[0]
        # Chosen once and told to all: processes that rounded otherwise would each continue another text.
        new_ids = cache.once(lambda logits_V=logits_V: [continuation.choose(logits_V)], 1)
        continuation.add(new_ids[0])
        yield new_ids[0]


@torch.inference_mode()
def _tokens_without_cache(model: Decoder, ids: list[int], continuation: Continuation) -> Iterator[int]:
    """Yield token after token; ``ids`` grows by each."""
    device = next(model.parameters()).device
    while not continuation.has_ended:
        positions_BT = torch.arange(len(ids), device=device)[None]
        hidden_BTM = model(torch.tensor([ids], device=device), positions_BT)
        ids.append(continuation.choose(last_logits(model, hidden_BTM)[0]))
        continuation.add(ids[-1])
        yield ids[-1]
