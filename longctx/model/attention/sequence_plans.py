"""Plans for several sequences on one process: single tokens in slots of one pool share one kernel call.

Axes: t tokens, n of them in one call, one per sequence, s rows in the longest sequence, H query heads, K key/value
heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.dtypes import as_dtype, int64_tensor
from longctx.model.attention.core import AttentionShapes, PassCore, SeparatePlans, plan_separately
from longctx.model.attention.kv_cache import LayerCache, TokenChunk
from longctx.model.attention.mask import AttentionMask
from longctx.model.attention.slots import SLOT_TOKENS, CacheSlot, SlotLayer, as_range


@dataclass(frozen=True, eq=False, kw_only=True)
class SlotPlan:
    """Plan for single tokens of sequences in one pool's slots."""

    kernel: CpuFlashKernel
    tokens: tuple[int, ...]
    """Indices of these tokens in the pass, in slot order."""
    tokens_n: Tensor | None
    """The same indices for ``index_select``; None if all tokens are taken in their order."""
    slots_n: Tensor
    slots: slice | Tensor
    """The same slots, as a slice if they are consecutive: its rows are not copied."""
    rows_n: Tensor
    """Row of each new token in its slot."""
    longest: int
    """Rows in the longest sequence, including its new token."""
    bias_n11s: Tensor | None
    """0 for rows in the token's own sequence, −inf after its end; None if all sequences are equally long."""
    value_dim: int
    values_in_keys: bool

    @classmethod
    def build(cls, kernel: CpuFlashKernel, shapes: AttentionShapes, chunks: Sequence[TokenChunk]) -> SlotPlan | None:
        """Plan single tokens that have all earlier rows in slots; return None for fewer than two or a longer chunk."""
        if any(chunk.num_tokens != 1 for chunk in chunks):
            return None
        in_slots = [
            (chunk.placement, token)
            for token, chunk in enumerate(chunks)
            if isinstance(chunk.placement, CacheSlot) and chunk.start < SLOT_TOKENS
        ]
        # One call reads one pool: the first sequence's.
        by_slot = sorted((slot.number, token) for slot, token in in_slots if slot.pool is in_slots[0][0].pool)
        if len(by_slot) < 2:
            return None
        slots, tokens = [slot for slot, _ in by_slot], [token for _, token in by_slot]
        rows, tokens_n = [chunks[token].start for token in tokens], None
        if tokens != list(range(len(chunks))):
            tokens_n = int64_tensor(tokens)
        rows_n, longest, bias_n11s = int64_tensor(rows), max(rows) + 1, None
        if min(rows) + 1 < longest:
            is_other_n11s = torch.arange(longest) > rows_n[:, None, None, None]
            bias_n11s = torch.zeros(is_other_n11s.shape).masked_fill_(is_other_n11s, -torch.inf)
        return cls(
            kernel=kernel,
            tokens=tuple(tokens),
            tokens_n=tokens_n,
            slots_n=int64_tensor(slots),
            slots=as_range(slots),
            rows_n=rows_n,
            longest=longest,
            bias_n11s=bias_n11s,
            value_dim=shapes.value_dim,
            values_in_keys=shapes.values_in_keys,
        )

    def forward(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        caches: Sequence[LayerCache],
        scores: ScoreRules,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Add these tokens to their caches; return their output [1, n, H, V]."""
        # Store keys first: a token sees itself.
        q_nHD, k_nKD, v_nKV = self._take(q_BtHD), self._take(k_BtKD), self._take(v_BtKV)
        pool, stored_nKV = pool_of([caches[token] for token in self.tokens]), None
        if not self.values_in_keys:
            stored_nKV = v_nKV
        pool.put(self.slots_n, self.rows_n, k_nKD, stored_nKV, stop=self.longest)
        keys, values = pool.first_rows(self.slots, self.longest)
        if values is None:
            values = keys[..., : self.value_dim]
        out = self.kernel.forward_newest(
            q_nHD.unsqueeze(1), keys, values, self.bias_n11s, scores=scores, sinks_H=sinks_H
        )
        return as_dtype(out.transpose(0, 1), q_BtHD.dtype)

    def _take(self, x_BtHX: Tensor) -> Tensor:
        if self.tokens_n is None:
            return x_BtHX[0]
        return x_BtHX[0].index_select(0, self.tokens_n)


def pool_of(buffers: Sequence[LayerCache]) -> SlotLayer:
    """Return the slot memory that all of these buffers share, and count one more row in each."""
    pool = buffers[0].slots
    assert pool is not None, "rows without a slot"
    for buffer in buffers:
        assert buffer.slots is pool, "rows from several pools"
        buffer.count_row()
    return pool


# Sequences are served in three ways, fewest calls first: prompts of equal length as the rows of one batch
# (``BatchPlan``), single tokens in slots of one pool by one kernel call (``SlotPlan``), and the others by one call each
# (``SeparatePlans``).
@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Plan for sequences that start with equally many tokens, as rows of one batch."""

    num_sequences: int
    core_plan: Any
    """The core's own plan for the batch."""

    @classmethod
    def build(
        cls, core: PassCore, mask: AttentionMask, shapes: AttentionShapes, chunks: Sequence[TokenChunk]
    ) -> BatchPlan | None:
        """Plan these chunks as one batch; return None for unequal lengths, cached tokens, one token or one chunk."""
        lengths = {(chunk.start, chunk.num_tokens, chunk.remaining_tokens) for chunk in chunks}
        start, num_tokens, remaining_tokens = next(iter(lengths))
        if len(lengths) > 1 or start or num_tokens == 1 or len(chunks) == 1:
            return None
        batch = {"batch": len(chunks), "tokens": num_tokens, "cached_tokens": 0, "remaining_tokens": remaining_tokens}
        return cls(len(chunks), core.plan(mask, replace(shapes, **batch), None))

    def rows(self, x_BtHX: Tensor) -> Tensor:
        """View all sequences' tokens [1, t, H, X] as batch rows."""
        return x_BtHX.unflatten(1, (self.num_sequences, -1))[0]


@dataclass(frozen=True, eq=False)
class SequencesPlan:
    """Plan that divides sequences into those computed together and those computed alone."""

    batch_plan: BatchPlan | None
    """Plan for all sequences if they are equally long; excludes the other fields."""
    slot_plan: SlotPlan | None
    separate_plans: SeparatePlans | None
    order_t: Tensor | None
    """Position of each token's result among those together and then alone; None if all are in order."""

    @classmethod
    def build(
        cls,
        core: PassCore,
        mask: AttentionMask,
        shapes: AttentionShapes,
        chunks: Sequence[TokenChunk],
        slot_plan: SlotPlan | None,
    ) -> SequencesPlan:
        """Plan all sequences, given those that are computed together."""
        batch_plan = BatchPlan.build(core, mask, shapes, chunks)
        if batch_plan is not None:
            return cls(batch_plan, None, None, None)
        tokens: list[int] = []
        if slot_plan is not None:
            tokens += slot_plan.tokens
        others = [sequence for sequence in range(len(chunks)) if sequence not in tokens]
        separate_plans = None
        if others:
            # On one process a plan depends on lengths alone.
            separate_plans = plan_separately(core, mask, shapes, chunks, others, has_placement=False)
        order_t = None
        # If some are together, each sequence has one token, so both are numbered the same way.
        if tokens + others != list(range(len(chunks))):
            order_t = torch.tensor(tokens + others).argsort()
        return cls(None, slot_plan, separate_plans, order_t)

    def in_order(self, outs: Sequence[Tensor]) -> Tensor:
        """Return the results from both parts, [1, t, H, V], in token order."""
        out = outs[0]
        if len(outs) > 1:
            out = torch.cat(list(outs), dim=1)
        if self.order_t is not None:
            out = out.index_select(1, self.order_t)
        return out
