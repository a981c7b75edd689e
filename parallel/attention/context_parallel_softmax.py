"""Exact attention over a sharded sequence: a transport delivers KV blocks to a single-device kernel.

The ring itself fits on one screen, ``parallel/transport/point_to_point.py``: fetch, compute, merge, wait.

Axes: B batch, t this rank's tokens, n tokens on its ring rank (all ranks that share rows together), H query heads, K
key/value heads, D query/key head size, V value head size. Partial results, and gradients in flight, are float32
(float64 for float64 inputs), so that rounding does not grow with the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import Gradients, ScoreRules
from longctx.kernels.attention.sinks import apply_sinks, sinks_gradient
from longctx.kernels.dtypes import accumulate_dtype, as_dtype
from longctx.kernels.processor import MatmulMode
from longctx.model.attention.attention_work import backward_work, forward_work
from longctx.model.attention.core import AttentionShapes
from longctx.model.recompute import RecomputeCache
from parallel.attention.context_parallel_plan import ContextParallelOptions, ContextParallelPlan, tensor_problem
from parallel.mesh import Mesh
from parallel.runtime.activity import ACTIVITY, enter_layer
from parallel.schedule.attention_schedule import Schedule
from parallel.transport.kv_block import KeysAndValues, KVBlock, PartialResult
from parallel.transport.ulysses import HeadExchange


def context_parallel_attention(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    *,
    schedule: Schedule,
    mesh: Mesh,
    kernel: str = "auto",
    scale: float | None = None,
    scores: ScoreRules | None = None,
    sinks_H: Tensor | None = None,
    transport: str = "auto",
    communication_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    matmul_mode: MatmulMode | None = None,
    recompute_cache: RecomputeCache | None = None,
) -> Tensor:
    """Compute attention for local queries over all keys in the sequence that the schedule's mask permits.

    Inputs are this rank's shard under the schedule's layout: [1, t, …], the same tokens in B rows if the layout is over
    flattened rows, or B stacked sequences with the same documents. Return [B, t, H, V] in q's dtype. Every rank in the
    context group must make the same call; each call compares the arguments before the first byte is sent. Layers that
    share a schedule should build one ``ContextParallelPlan`` and call ``planned_attention``.

    ``scores`` (default: the dot product times ``scale``, by default D^-½) may add a soft cap and biases; ``sinks_H``
    are learnable logits for a key without value. For the other options see ``ContextParallelOptions``. Raise
    ConfigError if kernel, layout or mesh do not support the call; ClusterError if a rank mismatches, dies or times out.
    """
    options = ContextParallelOptions(kernel, transport, communication_dtype, deterministic, matmul_mode)
    if scores is not None and scale is not None:
        raise ConfigError(f"scale={scale} and scores.scale={scores.scale} are both given: leave scale out.")
    if scale is None:
        scale = float(q_BtHD.shape[-1] ** -0.5)
    scores = scores or ScoreRules(scale=scale)
    problem = tensor_problem(q_BtHD, k_BtKD, v_BtKV, sinks_H, schedule, mesh)
    shapes = AttentionShapes.of(q_BtHD, k_BtKD, v_BtKV, scores)
    plan = ContextParallelPlan.build(schedule, mesh, shapes, options, problem=problem)
    return planned_attention(
        q_BtHD, k_BtKD, v_BtKV, plan, scores=scores, sinks_H=sinks_H, recompute_cache=recompute_cache
    )


def planned_attention(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    plan: ContextParallelPlan,
    *,
    scores: ScoreRules | None = None,
    sinks_H: Tensor | None = None,
    recompute_cache: RecomputeCache | None = None,
) -> Tensor:
    """Compute ``context_parallel_attention`` with a plan that the ranks have compared; ``scores`` must match its
    shapes.
    """
    B, t = q_BtHD.shape[:2]
    scores = scores or ScoreRules(scale=q_BtHD.shape[-1] ** -0.5)
    q, k, v = plan.as_shard(q_BtHD, k_BtKD, v_BtKV)
    plan.shapes.check_call(q, sinks_H)
    mine = plan.heads.query_heads
    call = _Call(plan, scores.of_heads(mine.start, mine.stop), recompute_cache)
    # Pass the full table as an argument: autograd sees only tensors among a function's arguments.
    table_NH = None
    if scores.relative_bias is not None:
        table_NH = scores.relative_bias.table_NH
    out = _Attention.apply(q, k, v, table_NH, sinks_H, call)
    return out.view(B, t, out.shape[2], out.shape[3])


@dataclass(frozen=True)
class _Call:
    """State shared by one attention call's forward and backward."""

    plan: ContextParallelPlan
    scores: ScoreRules
    """Restricted to this rank's heads."""
    recompute_cache: RecomputeCache | None


class _Attention(torch.autograd.Function):
    """Autograd function: rows to heads, attention over KV blocks, heads to rows; the reverse in backward.

    Without a recompute cache it saves the kernel's inputs for backward. With one (the layer is recomputed), q, k and v
    come from recomputation, and backward exchanges them for heads again, so that recomputation itself sends nothing.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, sinks: Tensor | None, call: _Call
    ) -> Tensor:
        ctx.call, ctx.layer = call, ACTIVITY.layer
        cache, heads = call.recompute_cache, call.plan.heads
        known = None
        if cache is not None:
            known = cache.load()
        # Recomputation: the first forward already communicated, so its output is reused and no kernel runs.
        if known is not None:
            out, lse = known
            ctx.save_for_backward(q, k, v, out, lse, sinks)
            return out
        # [B, t, H, D] → [B, n, h, D]: from here on the kernel sees all the ring rank's rows for this rank's heads.
        q_heads, k_heads, v_heads = heads.to_heads(q), heads.to_heads(k, keys=True), heads.to_heads(v, keys=True)
        out_heads, lse = _blocks_forward(call, q_heads, k_heads, v_heads)
        # Sinks enter once, after the merge: added per block, their logit would count once per block in the softmax.
        if sinks is not None:
            out_heads, lse = apply_sinks(out_heads, lse, sinks[heads.query_heads])
        out_heads = out_heads.to(q.dtype)
        out = heads.to_rows(out_heads)
        # With a cache, q, k and v are rows that recomputation produces anyway; saving heads would take extra memory.
        if cache is None:
            ctx.save_for_backward(q_heads, k_heads, v_heads, out_heads, lse, sinks)
        else:
            cache.save(out.detach(), lse)
            ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):  # type: ignore[override]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        call: _Call = ctx.call
        # Autograd runs layers in its own order, so each backward marks its layer itself.
        enter_layer(ctx.layer)
        heads = call.plan.heads
        q_dtype, k_dtype, v_dtype = q.dtype, k.dtype, v.dtype
        if call.recompute_cache is not None:
            q, k, v = heads.to_heads(q), heads.to_heads(k, keys=True), heads.to_heads(v, keys=True)
            out = heads.to_heads(out)
        dout = heads.to_heads(dout)
        grads = _blocks_backward(call, dout, q, k, v, out, lse)
        dsinks = None
        # Beside adapters the sinks are frozen, and their gradient would take float32 copies of the output.
        if sinks is not None and ctx.needs_input_grad[4]:
            mine = sinks_gradient(dout, out, lse, sinks[heads.query_heads]).to(sinks.dtype)
            dsinks = _whole_heads(mine, heads)
        dbias = grads.dbias_table_NH
        if dbias is not None:
            dbias = _whole_heads(dbias, heads)
        dq = heads.to_rows(grads.dq_BtHD.to(q_dtype))
        dk = heads.to_rows(grads.dk_BsKD, keys=True)  # summed over ranks before rounding
        dv = heads.to_rows(grads.dv_BsKV, keys=True)
        return dq, dk.to(k_dtype), dv.to(v_dtype), dbias, dsinks, None


def _whole_heads(mine: Tensor, heads: HeadExchange) -> Tensor:
    """Place this rank's heads [..., h] among all heads [..., H], with zeros for the others."""
    if heads.mesh.ulysses == 1:
        return mine
    # Zeros are correct: parameter gradients are summed over ranks, and each head is on one rank.
    shape = list(mine.shape)
    shape[-1] = heads.num_heads
    whole = mine.new_zeros(shape)
    whole[..., heads.query_heads] = mine
    return whole


# Transport and kernel meet only in `compute`: the transport decides which rows arrive when, the kernel knows one block.
# Merging partial results by log-sum-exp makes any order and any split exact (`parallel/transport/kv_block.py`).
def _blocks_forward(call: _Call, q_BnHD: Tensor, k_BnKD: Tensor, v_BnKV: Tensor) -> PartialResult:
    """Return output and log-sum-exp over all KV blocks, merged in float32 (log-sum-exps in float64)."""
    kernel_forward = partial(call.plan.kernel.forward, scores=call.scores)

    def compute(block: KVBlock) -> PartialResult:
        keys, values = call.plan.heads.expand(block.keys_BsKD), call.plan.heads.expand(block.values_BsKV)
        return forward_work(q_BnHD[:, block.queries], keys, values, block.work, kernel_forward)

    return call.plan.transport.forward(k_BnKD, v_BnKV, compute)


def _blocks_backward(call: _Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Gradients:
    """Return gradients for this rank's rows and heads, and for the bias table, summed over all KV blocks.

    dQ stays on this rank and is summed here; the transport returns dK and dV to their owners.
    """
    # Backward needs no second softmax pass over ranks: `out` and `lse` are those of the full softmax, so that each
    # block's probabilities exp(s − lse) are already normalized (FlashAttention-2, arXiv 2307.08691).
    kernel_backward = partial(call.plan.kernel.backward, scores=call.scores)
    dq: Tensor | None = None
    dbias: Tensor | None = None

    def compute(block: KVBlock) -> KeysAndValues:
        nonlocal dq, dbias
        rows = block.queries
        keys, values = call.plan.heads.expand(block.keys_BsKD), call.plan.heads.expand(block.values_BsKV)
        grads = backward_work(
            dout[:, rows], q[:, rows], keys, values, out[:, rows], lse[:, rows], block.work, kernel_backward
        )
        if dq is None:  # the local block comes first and covers all queries
            dq, dbias = as_dtype(grads.dq_BtHD, accumulate_dtype(q.dtype)), grads.dbias_table_NH
        else:
            dq[:, rows] += grads.dq_BtHD
            dbias = _sum(dbias, grads.dbias_table_NH)
        return call.plan.heads.fold(grads.dk_BsKD), call.plan.heads.fold(grads.dv_BsKV)

    dk, dv = call.plan.transport.backward(k, v, compute)
    assert dq is not None
    return Gradients(dq, dk, dv, dbias)


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None:
        return part
    if part is None:
        return total
    return total + part
