"""ObservedAttention: a core that also records how much one head's queries attend to each key group.

Axes: T tokens in the row, G key groups, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import AttentionCore, AttentionShapes, sinks_of
from longctx.model.attention.kv_cache import LayerCache
from longctx.model.attention.local import LocalAttention, LocalPlan
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache


@dataclass(frozen=True, eq=False)
class ObservedPlan:
    """Plan for all layers, and the mask and shapes to plan the observed layer again."""

    inner: LocalPlan
    mask: AttentionMask
    shapes: AttentionShapes


class ObservedAttention(AttentionCore):
    """Single-process core that sums one head's softmax weights per query over key groups, in one layer.

    The sums are attention outputs for one-hot group vectors as values. So masks, biases and sinks are the kernel's own,
    and no full query-by-key matrix is formed. It supports one forward pass over one row, without a cache.
    """

    def __init__(self, *, call: int, head: int, groups_T: Tensor) -> None:
        """Observe a head in layer ``call``, counted among the softmax attention layers.

        ``groups_T`` assigns a group to each key.
        """
        self._inner = LocalAttention()
        # blockwise accepts any value width, here the number of groups.
        self._observer = LocalAttention("blockwise")
        self._call, self._head, self._groups_T = call, head, groups_T
        self._calls = 0
        self.weights_TG: Tensor | None = None
        """Each query's weights, summed over the keys in a group; a learned sink has the remainder to 1."""
        self.is_seen_TG: Tensor | None = None
        """True if the mask lets a query see some key in the group."""

    def new_cache(self) -> NoReturn:
        """Raise NotImplementedError: a cache would mean several forward passes."""
        raise NotImplementedError("attention is observed in one forward pass, without a cache")

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> ObservedPlan:
        """Plan like a single-process core, and keep the mask."""
        return ObservedPlan(self._inner.plan(mask, shapes, placement), mask, shapes)

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: ObservedPlan,
        cache: LayerCache | None = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        # Layers call in order, once each per forward pass.
        if self._calls == self._call:
            self._record_weights(
                q_BtHD, k_BtKD, plan, scores or ScoreRules(scale=q_BtHD.shape[-1] ** -0.5), sinks_of(weights)
            )
        self._calls += 1
        return self._inner(q_BtHD, k_BtKD, v_BtKV, plan=plan.inner, scores=scores, weights=weights)

    def _record_weights(
        self, q_BtHD: Tensor, k_BtKD: Tensor, plan: ObservedPlan, scores: ScoreRules, sinks_H: Tensor | None
    ) -> None:
        head, heads = self._head, slice(self._head, self._head + 1)
        key_head = head // (q_BtHD.shape[2] // k_BtKD.shape[2])
        q, k = q_BtHD[:, :, heads].float(), k_BtKD[:, :, key_head : key_head + 1].float()
        if sinks_H is not None:
            sinks_H = sinks_H[heads].float()
        self.weights_TG = self._sums(q, k, plan, scores.of_heads(head, head + 1), sinks_H)
        # Equal scores give every visible key a weight, including one that would round to 0.
        equal = ScoreRules(scale=1.0)
        self.is_seen_TG = self._sums(torch.zeros_like(q), torch.zeros_like(k), plan, equal, None) > 0

    def _sums(self, q: Tensor, k: Tensor, plan: ObservedPlan, scores: ScoreRules, sinks_H: Tensor | None) -> Tensor:
        """Sum one head's query weights over key groups; return [T, G]."""
        v_TG = functional.one_hot(self._groups_T.to(q.device)).to(q.dtype)
        shapes = replace(
            plan.shapes,
            num_heads=1,
            num_kv_heads=1,
            value_dim=v_TG.shape[1],
            dtype=q.dtype,
            rules=scores.rules,
        )
        again = self._observer.plan(plan.mask, shapes)
        weights = () if sinks_H is None else (sinks_H,)
        out_BTHG = self._observer(q, k, v_TG[None, :, None], plan=again, scores=scores, weights=weights)
        return out_BTHG[0, :, 0]
