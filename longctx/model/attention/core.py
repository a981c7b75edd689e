"""AttentionCore: plan once per forward pass and kind of layer, then attend in every layer.

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
from longctx.kernels.attention.contract import Scores
from longctx.model.attention.cache import KVCache, LayerCache, TokenChunk
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache


@dataclass(frozen=True, kw_only=True)
class AttentionShapes:
    """Inputs of a plan besides its mask: sizes of this process's tensors, and the rules of their scores."""

    batch: int
    tokens: int
    """Query tokens of each row."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Head size of queries and keys."""
    value_dim: int
    dtype: torch.dtype
    device_type: str
    scale: float
    softcap: float | None = None
    rules: tuple[str, ...] = ()
    """``Scores.rules``."""
    beta_scale: float = 1.0
    """Factor of what a token writes to a state (gated delta rule)."""
    cached_tokens: int | None = None
    """Earlier tokens whose keys a cache holds; None where there is no cache."""
    later_tokens: int = 0
    """``TokenChunk.later_tokens``: a cache makes space for all of them at once."""
    values_in_keys: bool = False
    """Whether values are the first ``value_dim`` channels of the keys, which a cache then stores once."""

    @classmethod
    def of(
        cls, q_BtHD: Tensor, k_BtKD: Tensor, v_BtKV: Tensor, scores: Scores, cached_tokens: int | None = None
    ) -> AttentionShapes:
        """Return the shapes of these tensors."""
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
        """Raise ValueError unless this process holds all tokens of the documents."""
        if documents.num_tokens != self.batch * self.tokens:
            raise ValueError(
                f"{self.batch} rows of {self.tokens} tokens are not the {documents.num_tokens} tokens of cu_seqlens; "
                "a shard of them needs `document_ids` and a core that spans its ranks"
            )

    def check_call(self, q_BtHD: Tensor, sinks_H: Tensor | None) -> None:
        """Raise ValueError if the queries differ from the plan's, ConfigError if sinks are not one per query head."""
        # A plan of another batch would not fail in the kernel: its slices would just be of other rows.
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
"""What a core does in every layer of one kind, for one forward pass; what is in it is the core's own."""


class PassCore(Protocol):
    """Core as a forward pass uses it: it plans once per kind of layer, and attends in each layer."""

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> Plan:
        """Plan the work of all layers of one kind, before the first of them; recomputation reads the plan again.

        ``placement`` is the location of the batch's tokens, for a core that spreads them over processes
        (``Batch.placement``, ``TokenChunk.placement``); None leaves it to the core. Such a core's plan is collective.
        ``key_placement`` is that of a source's tokens, in cross attention.
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
        scores: Scores | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Return the output [B, t, H, V] in q's dtype.

        ``plan`` is this core's, for these shapes; ``cache`` the layer's (``PassCache.layer``). ``scores`` default to
        the dot product scaled by D^-½. ``weights`` are the mixer's weights that its core uses, heads first
        (``MixerNetwork.core_weights``). A ``recompute_cache`` keeps the result of a layer that backward will recompute,
        so that the core's work and communication are not done again."""
        ...


class AttentionCore(PassCore):
    """Exact attention of this process's queries over every key of the sequence that the mask lets them see."""

    def new_cache(self) -> KVCache:
        """Return an empty cache for a sequence that this core's processes continue."""
        return KVCache()

    def new_caches(self, most: int) -> Callable[[], KVCache]:
        """Return a function that makes an empty cache; at most ``most`` are in use together and may share memory."""
        return self.new_cache

    def plan_each(self, mask: AttentionMask, shapes: AttentionShapes, chunks: Sequence[TokenChunk]) -> Plan:
        """Plan for chunks of several sequences. ``mask`` and ``shapes`` are those of all tokens as one row."""
        return plan_alone(self, mask, shapes, chunks)

    def attend_each(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: Any,
        caches: Sequence[LayerCache],
        scores: Scores | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return output [1, t, H, V] of the tokens of several sequences, by the plan for all and the cache of each.

        Each sequence's output equals that of a call for it alone, except for rounding. There is no backward.
        """
        return attend_alone(self, q_BtHD, k_BtKD, v_BtKV, plan, caches, scores, weights)


@dataclass(frozen=True, eq=False)
class EachAlone:
    """Plan for some sequences, each by itself."""

    sequences: tuple[int, ...]
    """Which of the pass's sequences they are."""
    tokens: tuple[slice, ...]
    """Where their tokens are in the pass's row."""
    plans: tuple[Any, ...]


def plan_alone(
    core: PassCore,
    mask: AttentionMask,
    shapes: AttentionShapes,
    chunks: Sequence[TokenChunk],
    sequences: Sequence[int] | None = None,
    *,
    has_placement: bool = True,
) -> EachAlone:
    """Return the core's own plan for each of these sequences, by default all; equal sequences share one.

    Without ``has_placement`` the core plans by numbers of tokens only.
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
        # Sequences of a batch are mostly in step, and a plan costs as much as an exchange between processes.
        place = chunk.start, chunk.num_given, chunk.later_tokens, placement
        if place not in known:
            of_one = replace(shapes, tokens=chunk.num_given, cached_tokens=chunk.start, later_tokens=chunk.later_tokens)
            known[place] = core.plan(mask, of_one, placement)
        plans.append(known[place])
    return EachAlone(tuple(sequences), tuple(tokens[sequence] for sequence in sequences), tuple(plans))


def tokens_of(chunks: Sequence[TokenChunk]) -> list[slice]:
    """Return the position of each sequence's tokens in a pass's row on this process."""
    found, start = [], 0
    for chunk in chunks:
        found.append(slice(start, start + chunk.num_given))
        start += chunk.num_given
    return found


def attend_alone(
    core: PassCore,
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    plan: EachAlone,
    caches: Sequence[LayerCache],
    scores: Scores | None = None,
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
    """Return the sinks [H], the only weights of softmax attention: logits of a key without value (GPT-OSS)."""
    return next(iter(weights), None)


# ------------------------------------------------------------------------------------ new tokens and a layer's cache


def check_no_gradient(q_BtHD: Tensor) -> None:
    """Raise ConfigError if attention over caches would need a backward pass, which it does not have."""
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
    """Store new keys and values; return all that are stored and seen (``LayerCache.append``)."""
    rows = {"earlier_rows": earlier_rows, "later_rows": later_rows}
    if not shapes.values_in_keys:
        keys, values = cache.append(k_BtKD, v_BtKV, **rows)
        assert values is not None
        return keys, values
    keys, _ = cache.append(k_BtKD, None, **rows)
    return keys, keys[..., : shapes.value_dim]


def later_stored(mask: AttentionMask, shapes: AttentionShapes) -> int:
    """Return the later tokens that will be stored in addition to the present ones: 0 if old keys make space for new."""
    if not sees_all(mask):
        return 0
    return shapes.later_tokens


def earlier_seen(mask: AttentionMask, shapes: AttentionShapes) -> int:
    """Return the number of cached tokens, the newest, that some query of a chunk sees."""
    assert shapes.cached_tokens is not None, "no cache"
    if mask.window is None or sees_all(mask):
        return shapes.cached_tokens
    return min(shapes.cached_tokens, mask.window - 1)


def sees_all(mask: AttentionMask) -> bool:
    """Return whether every cached token may be seen by some later query."""
    # Sink tokens and those of a stride are seen from anywhere.
    return mask.window is None or bool(mask.sink_tokens or mask.stride)
