"""New tokens and a layer's cache: what is stored and what is still seen, for a core of one process and of many."""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.model.attention.cache import LayerCache
from longctx.model.attention.core import AttentionShapes
from longctx.model.attention.mask import AttentionMask


def check_no_gradient(q_BtHD: Tensor) -> None:
    """ConfigError where a backward pass would be wanted of attention over caches that has none."""
    if torch.is_grad_enabled() and q_BtHD.requires_grad:
        raise ConfigError("attention over these caches has no backward pass. Use torch.no_grad().")


def append_rows(
    cache: LayerCache,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    shapes: AttentionShapes,
    *,
    earlier_rows: int | None,
    later_rows: int,
) -> tuple[Tensor, Tensor]:
    """Store new keys and values; returns all that are stored and seen (``LayerCache.append``)."""
    rows = {"earlier_rows": earlier_rows, "later_rows": later_rows}
    if not shapes.values_in_keys:
        keys, values = cache.append(k_BtKD, v_BtKV, **rows)
        assert values is not None
        return keys, values
    keys, _ = cache.append(k_BtKD, None, **rows)
    return keys, keys[..., : shapes.value_dim]


def later_stored(mask: AttentionMask, shapes: AttentionShapes) -> int:
    """Later tokens whose keys will be stored beside all that are: none where old keys make space for new."""
    if not sees_all(mask):
        return 0
    return shapes.later_tokens


def earlier_seen(mask: AttentionMask, shapes: AttentionShapes) -> int:
    """Cached tokens, the newest, that some query of a chunk sees."""
    assert shapes.cached_tokens is not None, "no cache"
    if mask.window is None or sees_all(mask):
        return shapes.cached_tokens
    return min(shapes.cached_tokens, mask.window - 1)


def sees_all(mask: AttentionMask) -> bool:
    """Whether every cached token may be seen by some later query."""
    # Sink tokens and those of a stride are seen from anywhere.
    return mask.window is None or bool(mask.sink_tokens or mask.stride)
