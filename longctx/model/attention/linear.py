"""The core of linear layers in one process: states in place of scores (``longctx/kernels/linear_attention.py``)."""

from __future__ import annotations

from torch import Tensor

from longctx.documents import PackedDocuments
from longctx.kernels.attention.contract import Scores
from longctx.kernels.linear_attention import Segments, linear_attention
from longctx.model.attention.core import KVCache
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache


class LocalLinearAttention:
    """Linear attention (feature map elu + 1) of one process, which holds every key: its documents are segments.

    A cache holds one state a layer, [1, B, K, D, V + 1], however many tokens it has seen.
    """

    is_operator = False

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        mask: AttentionMask,
        layer: int,
        cache: KVCache | None = None,
        scores: Scores | None = None,
        sinks_H: Tensor | None = None,
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Output [B, t, H, V]; ``scores`` and ``sinks_H`` belong to softmax, and there is nothing to
        recompute_cache."""
        B, T = q_BtHD.shape[:2]
        if cache is not None:
            carried = cache.state(layer)
            segments = Segments(PackedDocuments.of([0, T]), takes=() if carried is None else (0,), gives=(0,))
            out, state = linear_attention(q_BtHD, k_BtKD, v_BtKV, segments=segments, carried_sBKDW=carried)
            cache.add_state(layer, state)
            return out
        if mask.documents.num_tokens != B * T:
            raise ValueError(f"{B} rows of {T} tokens are not the {mask.documents.num_tokens} tokens of cu_seqlens")
        q, k, v = (x.reshape(1, B * T, *x.shape[2:]) for x in (q_BtHD, k_BtKD, v_BtKV))
        out, _ = linear_attention(q, k, v, segments=Segments(mask.documents), causal=mask.causal)
        return out.view(B, T, *out.shape[2:])
