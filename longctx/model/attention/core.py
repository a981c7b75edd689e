"""AttentionCore: plan once per forward pass and layer kind, then attend in every layer.

Axes: B rows, t tokens of this process, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.kv_cache import KVCache, LayerCache, TokenChunk
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache


@dataclass(frozen=True, kw_only=True)
class AttentionShapes:
    """Plan inputs in addition to the mask: this process's tensor sizes and the score rules."""

    batch: int
    tokens: int
    """Query tokens per row."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Head size for queries and keys."""
    value_dim: int
    dtype: torch.dtype
    device_type: str
    scale: float
    softcap: float | None = None
    rules: tuple[str, ...] = ()
    """``ScoreRules.rules``."""
    beta_scale: float = 1.0
    """Factor on the token's write to the state (gated delta rule)."""
    cached_tokens: int | None = None
    """Tokens that a cache already holds keys for; None without a cache."""
    remaining_tokens: int = 0
    """``TokenChunk.remaining_tokens``: a cache reserves room for all of them at once."""
    values_in_keys: bool = False
    """True if values are the first ``value_dim`` channels of the keys, so that a cache stores them once."""

    @classmethod
    def of(
        cls, q_BtHD: Tensor, k_BtKD: Tensor, v_BtKV: Tensor, scores: ScoreRules, cached_tokens: int | None = None
    ) -> AttentionShapes:
        """Build the shapes from tensors."""
        batch, tokens, num_heads, head_dim = q_BtHD.shape
        return cls(
            batch=batch,
            tokens=tokens,
            num_heads=num_heads,
            num_kv_heads=k_BtKD.shape[2],
            head_dim=head_dim,
            value_dim=v_BtKV.shape[3],
            dtype=q_BtHD.dtype,
            device_type=q_BtHD.device.type,
            scale=scores.scale,
            softcap=scores.softcap,
            rules=scores.rules,
            cached_tokens=cached_tokens,
        )

    def check_whole(self, documents: PackedDocuments) -> None:
        """Raise ValueError unless this process holds every token of the documents."""
        if documents.num_tokens != self.batch * self.tokens:
            raise ValueError(
                f"{self.batch} rows of {self.tokens} tokens are not the {documents.num_tokens} tokens of cu_seqlens; "
                "a shard of them needs `document_ids` and a core that spans its ranks"
            )

    def check_call(self, q_BtHD: Tensor, sinks_H: Tensor | None) -> None:
        """Raise ValueError if the queries do not match the plan, ConfigError if sinks are not one per query head."""
        # A stale plan would not fail in the kernel: its slices would silently select other rows.
        planned = (self.batch, self.tokens, self.num_heads, self.head_dim)
        if q_BtHD.shape != planned or q_BtHD.dtype != self.dtype:
            raise ValueError(
                f"queries {tuple(q_BtHD.shape)} of {q_BtHD.dtype} came with a plan for {planned} of {self.dtype}; "
                "plan again for each forward pass"
            )
        if sinks_H is not None and sinks_H.shape != (self.num_heads,):
            raise ConfigError(
                f"sinks_H has shape {tuple(sinks_H.shape)}; it needs one logit for each of {self.num_heads} query "
                "heads."
            )


Plan = Any
"""Work that a core repeats in every layer of one kind during a forward pass; its contents are private to the core."""


class PassCore(Protocol):
    """Core interface for a forward pass: plan once per layer kind, attend in each layer."""

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> Plan:
        """Plan the work for all layers of one kind, before the first of them runs; recomputation reuses the plan.

        ``placement`` locates the batch's tokens for a core that spreads them over processes (``Batch.placement``,
        ``TokenChunk.placement``); None leaves the choice to the core. Planning in such a core is collective.
        ``key_placement`` locates a source's tokens in cross attention.
        """
        ...

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: Any,
        cache: Any = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Compute attention; return the output [B, t, H, V] in q's dtype.

        ``plan`` must be this core's, for these shapes, and ``cache`` this layer's (``PassCache.layer``). ``scores``
        defaults to the dot product scaled by D^-½. ``weights`` are the mixer's weights that its core reads, heads first
        (``MixerNetwork.core_weights``). A ``recompute_cache`` saves the result in a layer that backward recomputes, so
        that the core neither computes nor communicates twice.
        """
        ...


class AttentionCore(PassCore):
    """Exact attention from this process's queries to every key in the sequence that the mask allows."""

    def new_cache(self) -> KVCache:
        """Return an empty cache for a sequence that this core's processes continue."""
        return KVCache()

    def new_caches(self, most: int) -> Callable[[], KVCache]:
        """Return a factory for empty caches; at most ``most`` are in use at a time and may share memory."""
        return self.new_cache

    def plan_sequences(self, mask: AttentionMask, shapes: AttentionShapes, chunks: Sequence[TokenChunk]) -> Plan:
        """Plan chunks from several sequences; ``mask`` and ``shapes`` describe all tokens as one row."""
        return plan_separately(self, mask, shapes, chunks)

    def forward_sequences(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: Any,
        caches: Sequence[LayerCache],
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Tensor:
        """Compute output [1, t, H, V] for tokens from several sequences, by the plan for all and each one's cache.

        Each sequence's output equals that of a separate call, except for rounding. There is no backward.
        """
        return forward_separately(self, q_BtHD, k_BtKD, v_BtKV, plan, caches, scores, weights)


@dataclass(frozen=True, eq=False)
class SeparatePlans:
    """Plans for sequences that are computed one at a time."""

    sequences: tuple[int, ...]
    """Indices of these sequences in the pass."""
    tokens: tuple[slice, ...]
    """Span of each one's tokens in the pass's row."""
    plans: tuple[Any, ...]


def plan_separately(
    core: PassCore,
    mask: AttentionMask,
    shapes: AttentionShapes,
    chunks: Sequence[TokenChunk],
    sequences: Sequence[int] | None = None,
    *,
    has_placement: bool = True,
) -> SeparatePlans:
    """Plan each of these sequences (default: all) separately; equal sequences share one plan.

    Without ``has_placement`` the core plans from token counts only.
    """
    if sequences is None:
        sequences = range(len(chunks))
    tokens = tokens_of(chunks)
    plans = []
    known: dict[Any, Plan] = {}
    for sequence in sequences:
        chunk, placement = chunks[sequence], None
        if has_placement:
            placement = chunk.placement
        # Sequences in a batch mostly have equal lengths, and a plan may cost an exchange between processes.
        place = chunk.start, chunk.num_given, chunk.remaining_tokens, placement
        if place not in known:
            of_one = replace(
                shapes, tokens=chunk.num_given, cached_tokens=chunk.start, remaining_tokens=chunk.remaining_tokens
            )
            known[place] = core.plan(mask, of_one, placement)
        plans.append(known[place])
    return SeparatePlans(tuple(sequences), tuple(tokens[sequence] for sequence in sequences), tuple(plans))


def tokens_of(chunks: Sequence[TokenChunk]) -> list[slice]:
    """Return the span of each sequence's tokens in this process's row."""
    found, start = [], 0
    for chunk in chunks:
        found.append(slice(start, start + chunk.num_given))
        start += chunk.num_given
    return found


def forward_separately(
    core: PassCore,
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    plan: SeparatePlans,
    caches: Sequence[LayerCache],
    scores: ScoreRules | None = None,
    weights: Sequence[Tensor] = (),
) -> Tensor:
    """Call a core for the plan's sequences one after another; return the output [1, n, H, V]."""
    outs = []
    for sequence, tokens, of_one in zip(plan.sequences, plan.tokens, plan.plans, strict=True):
        out = core(
            q_BtHD[:, tokens],
            k_BtKD[:, tokens],
            v_BtKV[:, tokens],
            plan=of_one,
            cache=caches[sequence],
            scores=scores,
            weights=weights,
        )
        outs.append(out)
    return torch.cat(outs, dim=1)


def sinks_of(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the sinks [H], softmax attention's only weights: logits for a key without value (GPT-OSS)."""
    return next(iter(weights), None)


# ------------------------------------------------------------------------------------ new tokens and a layer's cache


def check_no_gradient(q_BtHD: Tensor) -> None:
    """Raise ConfigError if attention over caches would need a backward pass, which does not exist."""
    if torch.is_grad_enabled() and q_BtHD.requires_grad:
        raise ConfigError("attention over these caches has no backward pass. Use torch.no_grad().")


def append_rows(
    cache: LayerCache,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    shapes: AttentionShapes,
    *,
    visible_rows: int | None,
    reserved_rows: int,
) -> tuple[Tensor, Tensor]:
    """Store new keys and values; return all stored rows that queries see (``LayerCache.append``)."""
    rows = {"visible_rows": visible_rows, "reserved_rows": reserved_rows}
    if not shapes.values_in_keys:
        keys, values = cache.append(k_BtKD, v_BtKV, **rows)
        assert values is not None
        return keys, values
    keys, _ = cache.append(k_BtKD, None, **rows)
    return keys, keys[..., : shapes.value_dim]


def num_reserved_rows(mask: AttentionMask, shapes: AttentionShapes) -> int:
    """Return how many later tokens will be stored in addition to the present ones: 0 if old rows make room for new."""
    if not sees_all(mask):
        return 0
    return shapes.remaining_tokens


def num_visible_rows(mask: AttentionMask, shapes: AttentionShapes) -> int:
    """Return how many cached tokens, counted from the newest, are visible to some query in a chunk."""
    assert shapes.cached_tokens is not None, "no cache"
    if mask.window is None or sees_all(mask):
        return shapes.cached_tokens
    return min(shapes.cached_tokens, mask.window - 1)


def sees_all(mask: AttentionMask) -> bool:
    """Return whether a later query may still see every cached token."""
    # Sink tokens and strided tokens are visible at any distance.
    return mask.window is None or bool(mask.sink_tokens or mask.stride)
