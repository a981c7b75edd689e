"""Attention cores called alone, and cores of the tests' own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longctx.kernels.attention.contract import Scores
from longctx.model.attention.cache import LocalKVCache
from longctx.model.attention.core import AttentionCore, AttentionShapes
from longctx.model.attention.mask import AttentionMask


def attend_once(
    core: AttentionCore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    cache: LocalKVCache | None = None,
    scores: Scores | None = None,
    **asked: Any,
) -> Tensor:
    """What the core gives in a first layer, by a plan for this one call."""
    scores = scores or Scores(scale=q.shape[-1] ** -0.5)
    layer = None if cache is None else cache.layer(0)
    shapes = AttentionShapes.of(q, k, v, scores, None if cache is None else cache.num_tokens)
    return core(q, k, v, plan=core.plan(mask, shapes), cache=layer, scores=scores, **asked)


class MaskIsPlan:
    """A core without plans of its own: layers are given the mask."""

    def plan(self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None) -> Any:
        return mask
