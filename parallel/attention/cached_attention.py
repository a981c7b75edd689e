"""Attention for new tokens over a cache whose keys are sharded over ranks: prompt chunks, and decoding.

Keys never leave their rank. A chunk's queries travel to them (``parallel/transport/query_ring.py``), and results are
merged by their log-sum-exps in float32, as in training.

Axes: B batch, t this rank's new tokens, s cached keys, H query heads, K key/value heads, D query/key head size, V value
head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import AttentionKernel, KernelRequest, ScoreRules
from longctx.kernels.attention.kernel_selection import choose_kernel
from longctx.kernels.attention.sinks import apply_sinks
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.attention.attention_work import Work, forward_work
from longctx.model.attention.core import (
    AttentionShapes,
    SeparatePlans,
    append_rows,
    check_no_gradient,
    num_reserved_rows,
    num_visible_rows,
)
from longctx.model.attention.kv_cache import LayerCache
from longctx.model.attention.mask import AttentionMask
from parallel.attention.agreement import verify_across_ranks
from parallel.attention.context_parallel_plan import ContextParallelOptions, call_signature
from parallel.layout.cached_layout import ChunkPlacement, count_tokens, tokens_from
from parallel.layout.sequence import TokenRuns
from parallel.mesh import Mesh
from parallel.schedule.cached_work import cached_work
from parallel.schedule.ring_work import Mask
from parallel.transport.kv_block import PartialResult
from parallel.transport.query_ring import Compute, merge_gathered, query_ring_attention


@dataclass(frozen=True, eq=False)
class CachedPlan:
    """One chunk's plan, shared by all layers of one kind."""

    mesh: Mesh
    shapes: AttentionShapes
    kernel: AttentionKernel
    stored: slice
    """New tokens' rows whose keys this rank stores."""
    past_rows: int
    """Rows in this rank's cache that some query sees."""
    future_rows: int
    """Rows that will be appended later."""
    work: tuple[tuple[Work, ...], ...]
    """Work per hop with the visiting rank's queries; a single entry if every rank has all queries."""
    is_replicated: bool

    @classmethod
    def build(
        cls,
        mask: AttentionMask,
        shapes: AttentionShapes,
        placement: object,
        mesh: Mesh,
        options: ContextParallelOptions,
    ) -> CachedPlan:
        """Build a chunk's plan. Collective, except for single tokens.

        Raise ConfigError on every rank if one has a problem, ClusterError if ranks mismatch or one times out.
        """
        problem = chunk_problem(mask, shapes, placement, mesh)
        plan = None
        if problem is None:
            assert isinstance(placement, ChunkPlacement)
            try:
                plan = _assemble(mask, shapes, placement, mesh, options)
            except ConfigError as error:
                problem = str(error)
        verify_chunk(placement, mesh, call_signature(shapes, options, plan and plan.kernel), problem)
        assert plan is not None, "a problem that the ranks did not exchange"
        return plan


def chunk_problem(mask: AttentionMask, shapes: AttentionShapes, placement: object, mesh: Mesh) -> str | None:
    """Return the reason if a chunk cannot be processed, otherwise None."""
    if not isinstance(placement, ChunkPlacement):
        return f"the cache was not created for these {mesh.context} ranks. Use Decoder.new_cache()."
    if not mask.causal:
        return "a cache needs causal attention: without it, earlier tokens would have to see later ones."
    if placement.degree != mesh.context:
        return f"the cache is sharded over {placement.degree} ranks, the model over {mesh.context}."
    num_given = count_tokens(placement.given(mesh.context_rank))
    if shapes.tokens != num_given:
        return f"rank {mesh.rank} received {shapes.tokens} chunk tokens; its shard has {num_given}."
    return None


def verify_chunk(placement: object, mesh: Mesh, signature: str, problem: str | None) -> None:
    """Compare the chunk over the context group, unless it is a single token.

    Raise ConfigError on every rank if one has a ``problem``, ClusterError on a mismatch.
    """
    if not isinstance(placement, ChunkPlacement):
        raise ConfigError(problem or "no chunk")
    # A generated token's plan follows from the chunks before it, so a comparison is redundant.
    if problem is None and placement.layout is None and placement.num_tokens == 1 and placement.prefix.num_tokens:
        return
    verify_across_ranks(placement, mesh, signature, problem)


def attention_with_cache(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    plan: CachedPlan,
    cache: LayerCache,
    *,
    scores: ScoreRules | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the output [B, t, H, V] for new tokens over all cached keys and their own. Collective; no backward."""
    plan.shapes.check_call(q_BtHD, sinks_H)
    check_no_gradient(q_BtHD)
    scores = scores or ScoreRules(scale=q_BtHD.shape[-1] ** -0.5)
    compute = _over_own_keys(k_BtKD, v_BtKV, plan, cache, scores)
    # Two transports: replicated queries need one gather of partial results; split queries travel around the ring.
    if plan.is_replicated:
        out, lse = merge_gathered(plan.mesh, compute(q_BtHD, 0))
    else:
        out, lse = query_ring_attention(plan.mesh, q_BtHD, plan.shapes.value_dim, compute)
    if sinks_H is not None:
        out, lse = apply_sinks(out, lse, sinks_H)
    return out.to(q_BtHD.dtype)


def attention_with_caches(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    plan: SeparatePlans,
    caches: Sequence[LayerCache],
    *,
    scores: ScoreRules | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return the output [1, t, H, V] for tokens that every rank has, each sequence over its own cache.

    Collective, with one gather for all sequences. No backward.
    """
    check_no_gradient(q_BtHD)
    scores = scores or ScoreRules(scale=q_BtHD.shape[-1] ** -0.5)
    parts = []
    for tokens, of_one, cache in zip(plan.tokens, plan.plans, caches, strict=True):
        compute = _over_own_keys(k_BtKD[:, tokens], v_BtKV[:, tokens], of_one, cache, scores)
        parts.append(compute(q_BtHD[:, tokens], 0))
    out, lse = (torch.cat(of_tokens, dim=1) for of_tokens in zip(*parts, strict=True))
    # Concatenate before the gather: one collective for all sequences, however many are decoded together.
    out, lse = merge_gathered(plan.plans[0].mesh, (out, lse))
    if sinks_H is not None:
        out, lse = apply_sinks(out, lse, sinks_H)
    return out.to(q_BtHD.dtype)


def _over_own_keys(k_BtKD: Tensor, v_BtKV: Tensor, plan: CachedPlan, cache: LayerCache, scores: ScoreRules) -> Compute:
    # Store before computing: a query also sees keys from its own chunk.
    """Store this rank's new keys; return a function that computes queries over all its stored keys."""
    stored = plan.stored
    keys, values = append_rows(
        cache,
        k_BtKD[:, stored],
        v_BtKV[:, stored],
        plan.shapes,
        visible_rows=plan.past_rows,
        reserved_rows=plan.future_rows,
    )
    kernel_forward = partial(plan.kernel.forward, scores=scores)

    def compute(queries: Tensor, hop: int) -> PartialResult:
        if not plan.work[hop]:
            return _no_keys(queries, plan.shapes.value_dim)
        return forward_work(queries, keys, values, plan.work[hop], kernel_forward)

    return compute


def _assemble(
    mask: AttentionMask, shapes: AttentionShapes, placement: ChunkPlacement, mesh: Mesh, options: ContextParallelOptions
) -> CachedPlan:
    """Build this rank's plan. Raise ConfigError if the kernel does not support it."""
    rank, is_replicated = mesh.context_rank, placement.layout is None
    start = placement.prefix.num_tokens
    # With a window, only rows from the oldest visible token on count.
    visible_runs = tokens_from(placement.prefix.runs, start - num_visible_rows(mask, shapes))
    stored = placement.stored(rank)
    # By hop: at hop h the queries from the rank h positions before this one arrive.
    visitors = [rank]
    if not is_replicated:
        visitors = [(rank - hop) % mesh.context for hop in range(mesh.context)]
    work = tuple(
        cached_work(
            placement.given(visitor),
            visible_runs,
            stored,
            stop=placement.stop,
            mask=Mask(mask.causal, mask.window, mask.sink_tokens, mask.stride),
            relative_positions=bool({"alibi", "relative_bias"} & set(shapes.rules)),
        )
        for visitor in visitors
    )
    return CachedPlan(
        mesh,
        shapes,
        choose_kernel(options.kernel, _request(mask, shapes, options)),
        _rows_of(stored, start, is_replicated=is_replicated),
        count_tokens(visible_runs),
        -(-num_reserved_rows(mask, shapes) // mesh.context),
        work,
        is_replicated,
    )


def _request(mask: AttentionMask, shapes: AttentionShapes, options: ContextParallelOptions) -> KernelRequest:
    return KernelRequest(
        shapes.device_type,
        shapes.dtype,
        shapes.head_dim,
        shapes.num_heads,
        shapes.num_kv_heads,
        value_dim=shapes.value_dim,
        window=mask.window is not None,
        rules=shapes.rules,
        matmul_mode=options.matmul_mode,
    )


def _rows_of(stored: TokenRuns, start: int, *, is_replicated: bool) -> slice:
    """Return the stored rows among the rank's new rows: all of them, or every n-th."""
    if not is_replicated:
        return slice(None)
    if not stored:
        return slice(0, 0)
    (run,) = stored
    return slice(run.start - start, run.stop - start, run.step)


def _no_keys(q_BtHD: Tensor, value_dim: int) -> PartialResult:
    """Return the partial result without keys: zeros, with log-sum-exp −∞."""
    shape = q_BtHD.shape[:-1]
    out = q_BtHD.new_zeros((*shape, value_dim), dtype=accumulate_dtype(q_BtHD.dtype))
    return out, q_BtHD.new_full(shape, -torch.inf, dtype=torch.float64)
