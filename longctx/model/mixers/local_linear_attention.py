"""Single-process core for linear layers: states instead of scores (``longctx/kernels/linear_attention.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.linear_attention import StateSegments, linear_attention
from longctx.model.attention.core import AttentionCore, AttentionShapes
from longctx.model.attention.kv_cache import LayerCache
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache


@dataclass(frozen=True, eq=False)
class LocalLinearPlan:
    """Key segments to sum, with the states that enter or leave them, and whether attention is causal."""

    segments: StateSegments
    causal: bool


class LocalLinearAttention(AttentionCore):
    """Linear attention (feature map elu + 1, arXiv 2006.16236) in one process, which holds every key: documents are
    segments.

    A cache holds one state per layer, [1, B, K, D, V + 1], for any number of past tokens.
    """

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> LocalLinearPlan:
        """Return the documents as segments; with a cache one segment, which continues the cached tokens."""
        if shapes.cached_tokens is None:
            shapes.check_whole(mask.documents)
            return LocalLinearPlan(StateSegments(mask.documents), mask.causal)
        # The new tokens are one segment. A state enters it unless they are the sequence's first; one always leaves.
        received: tuple[int, ...] = ()
        if shapes.cached_tokens:
            received = (0,)
        segments = StateSegments(PackedDocuments.of([0, shapes.tokens]), received=received, sent=(0,))
        return LocalLinearPlan(segments, causal=True)

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: LocalLinearPlan,
        cache: LayerCache | None = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Compute output [B, t, H, V]. ``scores`` and ``weights`` are softmax's; recomputation forms the sums again."""
        B, T, H, _ = q_BtHD.shape
        if cache is not None:
            segments, initial_states = plan.segments, cache.state
            out, state = linear_attention(
                q_BtHD, k_BtKD, v_BtKV, segments=segments, initial_states_sBKDW=initial_states
            )
            cache.add_state(state, T)
            return out
        # Rows are laid end to end: documents are boundaries in the flattened tokens.
        q, k, v = (x.reshape(1, B * T, x.shape[2], x.shape[3]) for x in (q_BtHD, k_BtKD, v_BtKV))
        out, _ = linear_attention(q, k, v, segments=plan.segments, causal=plan.causal)
        return out.view(B, T, H, v_BtKV.shape[3])
