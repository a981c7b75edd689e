"""Attention cores called alone, and cores of the tests' own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import AttentionCore, AttentionShapes
from longctx.model.attention.kv_cache import KVCache
from longctx.model.attention.mask import AttentionMask


def attend_once(
    core: AttentionCore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    cache: KVCache | None = None,
    scores: ScoreRules | None = None,
    **asked: Any,
) -> Tensor:
    """What the core gives in a first layer, by a plan for this one call."""
    scores = scores or ScoreRules(scale=q.shape[-1] ** -0.5)
    layer = None if cache is None else cache.layer(0)
    shapes = AttentionShapes.of(q, k, v, scores, None if cache is None else cache.num_tokens)
    return core(q, k, v, plan=core.plan(mask, shapes), cache=layer, scores=scores, **asked)


class MaskIsPlan(AttentionCore):
    """A core without plans of its own: layers are given the mask."""

    def plan(self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None) -> Any:
        return mask


class Blind(MaskIsPlan):
    """Attention that sees nothing: a share of the tokens then gives a share of the results."""

    def __call__(self, q_BtHD: Tensor, k_BtKD: Tensor, v_BtKV: Tensor, **_: Any) -> Tensor:
        groups = q_BtHD.shape[2] // k_BtKD.shape[2]
        return q_BtHD * 0.5 + (v_BtKV - 0.3 * k_BtKD).repeat_interleave(groups, 2)
