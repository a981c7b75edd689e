"""Exact attention over a sequence that is spread over ranks: a transport's KV blocks around a one-device kernel.

The ring itself fits on one screen, ``parallel/transport/point_to_point.py``: fetch, compute, merge, wait.

Axes: B batch, t this rank's tokens, n the tokens of its ring rank (all ranks that share rows together), H query heads,
K key/value heads, D query/key head size, V value head size. Partial results, and the gradients between ranks, are
float32 (float64 for float64 inputs): rounding does not grow with the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.contract import Gradients, Scores
from longctx.kernels.attention.sinks import apply_sinks, sinks_gradient
from longctx.kernels.dtypes import accumulate_dtype, as_dtype
from longctx.kernels.processor import Products
from longctx.model.attention.core import AttentionShapes
from longctx.model.attention.work import attend_work, attend_work_backward
from longctx.model.recompute import RecomputeCache
from parallel.attention.plan import AttentionOptions, ContextParallelPlan, tensor_problem
from parallel.mesh import Mesh
from parallel.runtime.spans import DOING, enter_layer
from parallel.schedule.schedule import Schedule
from parallel.transport.block import KeysAndValues, KVBlock, PartialResult
from parallel.transport.ulysses import HeadExchange


def attend(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    *,
    schedule: Schedule,
    mesh: Mesh,
    kernel: str = "auto",
    scale: float | None = None,
    scores: Scores | None = None,
    sinks_H: Tensor | None = None,
    transport: str = "auto",
    communication_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    products: Products | None = None,
    recompute_cache: RecomputeCache | None = None,
) -> Tensor:
    """Compute attention of this rank's queries over all keys of the sequence that the schedule's mask lets them see.

    Inputs are this rank's shard under the schedule's layout: [1, t, …], the same tokens in B rows if the layout is over
    flattened rows, or B stacked sequences of the same documents. Return [B, t, H, V] in q's dtype. Every rank of the
    context group must make the same call: in each call the ranks compare their arguments before the first byte is sent.
    Layers that share a schedule build one ``ContextParallelPlan`` and call ``attend_planned``.

    ``scores`` (default: the dot product times ``scale``, by default D^-½) may add a soft cap and biases; ``sinks_H``
    are learnable logits of a key without value. The other options are those of ``AttentionOptions``. Raise ConfigError
    if a kernel, layout or mesh does not support the call; ClusterError if a rank differs, dies or is too late."""
    options = AttentionOptions(kernel, transport, communication_dtype, deterministic, products)
    if scores is not None and scale is not None:
        raise ConfigError(f"scale={scale} is given twice: leave it out, scores.scale={scores.scale} is the one.")
    if scale is None:
        scale = float(q_BtHD.shape[-1] ** -0.5)
    scores = scores or Scores(scale=scale)
    problem = tensor_problem(q_BtHD, k_BtKD, v_BtKV, sinks_H, schedule, mesh)
    shapes = AttentionShapes.of(q_BtHD, k_BtKD, v_BtKV, scores)
    plan = ContextParallelPlan.build(schedule, mesh, shapes, options, problem=problem)
    return attend_planned(q_BtHD, k_BtKD, v_BtKV, plan, scores=scores, sinks_H=sinks_H, recompute_cache=recompute_cache)


def attend_planned(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    plan: ContextParallelPlan,
    *,
    scores: Scores | None = None,
    sinks_H: Tensor | None = None,
    recompute_cache: RecomputeCache | None = None,
) -> Tensor:
    """Compute ``attend`` by a plan on which the ranks have agreed; ``scores`` are those of its shapes."""
    B, t = q_BtHD.shape[:2]
    scores = scores or Scores(scale=q_BtHD.shape[-1] ** -0.5)
    q, k, v = plan.as_shard(q_BtHD, k_BtKD, v_BtKV)
    plan.shapes.check_call(q, sinks_H)
    mine = plan.heads.query_heads
    call = _Call(plan, scores.of_heads(mine.start, mine.stop), recompute_cache)
    # The full table is an input of the function: autograd sees only the tensors among a function's arguments.
    table_NH = None
    if scores.relative_bias is not None:
        table_NH = scores.relative_bias.table_NH
    out = _Attention.apply(q, k, v, table_NH, sinks_H, call)
    return out.view(B, t, out.shape[2], out.shape[3])


@dataclass(frozen=True)
class _Call:
    """State shared by the forward and backward of one attention call."""

    plan: ContextParallelPlan
    scores: Scores
    """Of this rank's heads."""
    recompute_cache: RecomputeCache | None


class _Attention(torch.autograd.Function):
    """Autograd function: rows to heads, attention over KV blocks, heads to rows; and the reverse in backward.

    Without a recompute cache the kernel's inputs are kept for backward. With one (the layer is recomputed) q, k and v
    are those of the recomputation and are traded for heads again in backward, so that recomputing sends nothing.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, sinks: Tensor | None, call: _Call
    ) -> Tensor:
        ctx.call, ctx.layer = call, DOING.layer
        cache, heads = call.recompute_cache, call.plan.heads
        known = None
        if cache is not None:
            known = cache.load()
        if known is not None:
            out, lse = known
            ctx.save_for_backward(q, k, v, out, lse, sinks)
            return out
        q_heads, k_heads, v_heads = heads.to_heads(q), heads.to_heads(k, keys=True), heads.to_heads(v, keys=True)
        out_heads, lse = _attend_blocks(call, q_heads, k_heads, v_heads)
        if sinks is not None:
            out_heads, lse = apply_sinks(out_heads, lse, sinks[heads.query_heads])
        out_heads = out_heads.to(q.dtype)
        out = heads.to_rows(out_heads)
        # With a cache q, k and v are rows that recomputation makes anyway; saved heads would take extra memory.
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
        enter_layer(ctx.layer)
        heads = call.plan.heads
        q_dtype, k_dtype, v_dtype = q.dtype, k.dtype, v.dtype
        if call.recompute_cache is not None:
            q, k, v = heads.to_heads(q), heads.to_heads(k, keys=True), heads.to_heads(v, keys=True)
            out = heads.to_heads(out)
        dout = heads.to_heads(dout)
        grads = _attend_blocks_backward(call, dout, q, k, v, out, lse)
        dsinks = None
        if sinks is not None:
            mine = sinks_gradient(dout, out, lse, sinks[heads.query_heads]).to(sinks.dtype)
            dsinks = _whole_heads(mine, heads)
        dtable = grads.dtable_NH
        if dtable is not None:
            dtable = _whole_heads(dtable, heads)
        dq = heads.to_rows(grads.dq_BtHD.to(q_dtype))
        dk = heads.to_rows(grads.dk_BsKD, keys=True)  # summed over ranks before it is rounded
        dv = heads.to_rows(grads.dv_BsKV, keys=True)
        return dq, dk.to(k_dtype), dv.to(v_dtype), dtable, dsinks, None


def _whole_heads(mine: Tensor, heads: HeadExchange) -> Tensor:
    """Return this rank's heads [..., h] among all heads [..., H], with zeros for the others."""
    if heads.mesh.ulysses == 1:
        return mine
    # Zeros for the others: gradients of parameters are summed over ranks, and one rank has each head's.
    shape = list(mine.shape)
    shape[-1] = heads.num_heads
    whole = mine.new_zeros(shape)
    whole[..., heads.query_heads] = mine
    return whole


def _attend_blocks(call: _Call, q_BnHD: Tensor, k_BnKD: Tensor, v_BnKV: Tensor) -> PartialResult:
    """Return output and log-sum-exp over all KV blocks, merged in float32 (log-sum-exps in float64)."""
    kernel_forward = partial(call.plan.kernel.forward, scores=call.scores)

    def compute(block: KVBlock) -> PartialResult:
        keys, values = call.plan.heads.expand(block.keys_BsKD), call.plan.heads.expand(block.values_BsKV)
        return attend_work(q_BnHD[:, block.queries], keys, values, block.work, kernel_forward)

    return call.plan.transport.forward(k_BnKD, v_BnKV, compute)


def _attend_blocks_backward(
    call: _Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    """Return the gradients of this rank's rows and heads, and of the bias table, summed over all KV blocks.

    dQ stays on this rank and is summed here; dK and dV go to the transport, which returns them to their owners.
    """
    kernel_backward = partial(call.plan.kernel.backward, scores=call.scores)
    dq: Tensor | None = None
    dtable: Tensor | None = None

    def compute(block: KVBlock) -> KeysAndValues:
        nonlocal dq, dtable
        rows = block.queries
        keys, values = call.plan.heads.expand(block.keys_BsKD), call.plan.heads.expand(block.values_BsKV)
        grads = attend_work_backward(
            dout[:, rows], q[:, rows], keys, values, out[:, rows], lse[:, rows], block.work, kernel_backward
        )
        if dq is None:  # the rank's own keys come first and meet all its queries
            dq, dtable = as_dtype(grads.dq_BtHD, accumulate_dtype(q.dtype)), grads.dtable_NH
        else:
            dq[:, rows] += grads.dq_BtHD
            dtable = _sum(dtable, grads.dtable_NH)
        return call.plan.heads.fold(grads.dk_BsKD), call.plan.heads.fold(grads.dv_BsKV)

    dk, dv = call.plan.transport.backward(k, v, compute)
    assert dq is not None
    return Gradients(dq, dk, dv, dtable)


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None:
        return part
    if part is None:
        return total
    return total + part
