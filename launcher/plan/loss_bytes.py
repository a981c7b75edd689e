"""``loss_bytes``: what the loss of a micro-batch takes while it goes through the logits, chunk by chunk."""

from __future__ import annotations

from launcher.config.resolved import ResolvedConfig
from longctx.kernels.cross_entropy import TILE_ELEMENTS, tokens_of_chunk

_FLOAT32 = 4
_LOGITS_OF_GPU = 1 << 29
"""Of a chunk, at most (longctx/kernels/cross_entropy.py)."""
_BLOCK_OF_GPU = 1 << 27
"""Of them, those that are worked on at once, in float32."""


def loss_bytes(config: ResolvedConfig, tokens: int, device_type: str) -> int:
    """Bytes beside the gradients of hidden states and head, for so many tokens of a rank."""
    if device_type == "cpu":
        return _on_cpu(config, tokens)
    logits = min(_LOGITS_OF_GPU, tokens * config.model.vocab_size)
    chunk = logits * config.dtype.itemsize
    # Eager, a block's copies in float32; compiled, the gradient of the whole chunk.
    return chunk + max(3 * min(_BLOCK_OF_GPU, logits) * _FLOAT32, chunk)


def _on_cpu(config: ResolvedConfig, tokens: int) -> int:
    """Where blocks fit a cache: a chunk's logits and its own gradient, normed hidden states, products of the head."""
    vocab_size, model_width, width = config.model.vocab_size, config.model.hidden_size, config.dtype.itemsize
    normed, head = tokens * model_width * width, 0
    chunk = min(tokens_of_chunk(vocab_size, model_width, "cpu"), tokens)
    if width < _FLOAT32 and config.train.products == "float32":
        # Tiles of the head's weight and the chunk's hidden states, converted.
        head = 2 * min(TILE_ELEMENTS, vocab_size * model_width) * _FLOAT32 + chunk * model_width * _FLOAT32
        width = _FLOAT32
    elif width < _FLOAT32:
        head = vocab_size * model_width * width
    return chunk * (vocab_size + model_width) * width + head + normed
