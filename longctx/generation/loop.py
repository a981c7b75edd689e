"""Tokens out of a decoder, one at a time: greedy or sampled, and the decoder that a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longctx.checkpoint_format import CheckpointReader, find_checkpoint, model_config
from longctx.errors import CheckpointError, ConfigError
from longctx.model.cores import KVCache, LocalKVCache
from longctx.model.decoder import Decoder


@dataclass(frozen=True)
class Greedy:
    """Always the likeliest token; of equal ones the lowest id."""

    def start(self) -> Callable[[Tensor], int]:
        """A function from the next token's logits [V], fp32, to its id."""
        return lambda logits_V: int(logits_V.argmax())


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Draw tokens from the model's distribution; the same seed draws the same tokens.

    Temperature first, then top-k, then top-p, as Hugging Face does it.
    """

    temperature: float = 1.0
    """Divides the logits: below 1 sharper, above 1 flatter."""
    top_k: int = 0
    """Keep this many of the likeliest tokens (ties with the last one too); 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together reach this probability; at least one."""
    seed: int = 0
    """Of the generator."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be above 0. For the likeliest token use Greedy().")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must not be negative; 0 keeps every token.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must lie in (0, 1]; 1 keeps every token.")

    def start(self) -> Callable[[Tensor], int]:
        """A function from the next token's logits [V], fp32, to its id; it owns a generator, on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(logits_V: Tensor) -> int:
            return int(torch.multinomial(self.probabilities(logits_V.cpu()), 1, generator=generator))

        return draw

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """The distribution [V] that tokens are drawn from."""
        scores_V = logits_V / self.temperature
        if self.top_k:
            smallest_kept = scores_V.topk(min(self.top_k, len(scores_V))).values[-1]
            scores_V = scores_V.masked_fill(scores_V < smallest_kept, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores_V.sort()
            dropped = ascending.softmax(0).cumsum(0) <= 1 - self.top_p
            dropped[-1] = False
            scores_V = scores_V.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), -torch.inf)
        return scores_V.softmax(0)


@torch.no_grad()
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
    """The tokens that follow the prompt: at most ``max_new_tokens``, the last one of ``stop_ids`` if any comes.

    The prompt is read once, then one token a step against the cached keys (``cache`` must be empty; default: a
    ``LocalKVCache``). ``use_cache=False`` reads everything again at each step, which is slow and gives the same tokens.
    """
    check_request(model, prompt_ids, max_new_tokens)
    choose = (strategy or Greedy()).start()
    if use_cache and cache is None:
        cache = LocalKVCache()
    ids, unread = list(prompt_ids), len(prompt_ids)
    for _ in range(max_new_tokens):
        start = len(ids) - unread if use_cache else 0
        ids.append(choose(_next_logits(model, ids[start:], start, cache if use_cache else None)))
        unread = 1
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt_ids) :]


def check_request(model: Decoder, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    """ConfigError for an empty prompt, an id outside the vocabulary, or a negative number of tokens."""
    if len(prompt_ids) == 0:
        raise ConfigError("the prompt is empty: a model continues at least one token. Start with the begin id.")
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must not be negative.")
    vocab_size = model.config.vocab_size
    if outside := [i for i in prompt_ids if not 0 <= i < vocab_size]:
        raise ConfigError(f"prompt id {outside[0]} is not in the model's vocabulary, 0 to {vocab_size - 1}.")


def load_model(checkpoint: str | Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """The decoder of a checkpoint, or of a run's newest one, on the CPU, ready to generate from.

    Strict: CheckpointError unless the checkpoint holds exactly the decoder's tensors.
    """
    reader = CheckpointReader(find_checkpoint(checkpoint))
    model = Decoder(model_config(reader), seed=None).to(dtype)
    try:
        model.load_state_dict(dict(reader.state_dict(dtype)))
    except RuntimeError as error:
        raise CheckpointError(f"{reader.folder} does not hold the decoder of its own config: {error}") from error
    return model.eval()


def _next_logits(model: Decoder, ids: Sequence[int], start: int, cache: KVCache | None) -> Tensor:
    """Logits [V], fp32, after ``ids``, the first of which stands at position ``start``."""
    device = next(model.parameters()).device
    tokens_BT = torch.tensor([ids], device=device)
    positions_BT = torch.arange(start, start + len(ids), device=device)[None]
    hidden_BTM = model(tokens_BT, positions_BT, cache=cache)
    return model.logits(hidden_BTM[:, -1:])[0, 0].float()
