"""AttentionCore: plan once a batch, attend in every layer; the KVCache protocol."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from longctx.kernels.attention.contract import Scores
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache


class KVCache(Protocol):
    """Keys and values of the tokens already seen, layer by layer, for one sequence that grows."""

    def append(self, layer: int, k_BtKD: Tensor, v_BtKV: Tensor) -> tuple[Tensor, Tensor]:
        """Store new rows; return all rows of the layer so far, [B, s, K, D] and [B, s, K, V]."""
        ...

    def add_state(self, layer: int, state_sBKDW: Tensor) -> None:
        """Add to what a linear layer knows of the tokens so far."""
        ...

    def state(self, layer: int) -> Tensor | None:
        """The sum of what was added, None before anything was."""
        ...


class AttentionCore(Protocol):
    """Exact softmax attention of this process's queries over every key of the sequence that the mask lets them see."""

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
        """Output [B, t, H, V] in q's dtype.

        ``scores`` default to the dot product scaled by D^-½. ``sinks_H`` are learnable logits, one a query head, of a
        key without value that every query sees (GPT-OSS). A ``recompute_cache`` keeps the result of a layer that
        backward will recompute, so that the core's work and communication are not done again."""
        ...
