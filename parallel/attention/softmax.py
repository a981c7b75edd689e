"""Exact attention over a sequence that is spread over ranks: a transport's KV blocks around a one-device kernel.

The ring itself is one screen, ``parallel/transport/point_to_point.py``: fetch, compute, merge, wait.

Axes: B batch, t this rank's tokens, n the tokens of its ring rank (all ranks that share rows together), H query heads,
K key/value heads, D query/key head size, V value head size. Partial results, and the gradients between ranks, are
float32 (float64 for float64 inputs): rounding does not grow with the number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.contract import AttentionKernel, Gradients, KernelRequest, Scores
from longctx.kernels.attention.select import choose_kernel
from longctx.kernels.attention.sinks import apply_sinks, sinks_gradient
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.graphs import outside_graphs
from longctx.kernels.processor import Products
from longctx.model.attention.work import attend_work, attend_work_backward
from longctx.model.recompute import RecomputeCache
from parallel.mesh import Mesh
from parallel.runtime.agreement import agree
from parallel.schedule.schedule import Schedule
from parallel.transport.block import KeysAndValues, KVBlock, PartialResult, Transport
from parallel.transport.select import build_transport
from parallel.transport.ulysses import HeadExchange


@dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed, whatever the layer."""

    kernel: str = "auto"
    transport: str = "auto"
    """p2p, two_level, all_gather or auto."""
    communication_dtype: torch.dtype | None = None
    """Dtype of gradients under way; None: float32, float64 for float64 inputs."""
    deterministic: bool = False
    """Whether the kernel's backward must repeat to the bit."""
    products: Products | None = None
    """How a CPU multiplies bfloat16; None: the way that is faster on this one."""


@outside_graphs("keys, values and states travel between ranks")
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
    agree_again: bool = False,
) -> Tensor:
    """Attention of this rank's queries over every key of the sequence that the schedule's mask lets them see.

    Inputs are this rank's shard under the schedule's layout: [1, t, …] of it, the same tokens in B rows when the layout
    is over flattened rows, or B stacked sequences of the same documents. Returns [B, t, H, V] in q's dtype. Every rank
    of the context group must call it alike; with a schedule's first use (or ``agree_again``) they compare what they
    were given before the first byte travels.

    ``scores`` (default: the dot product times ``scale``, by default D^-½) may add a soft cap and biases; ``sinks_H``
    are learnable logits of a key without value. The other options are ``AttentionOptions``'. ConfigError for what a
    kernel, layout or mesh cannot do; ClusterError when a rank differs, dies or is too late."""
    options = AttentionOptions(kernel, transport, communication_dtype, deterministic, products)
    if scores is None:
        scores = Scores(scale=q_BtHD.shape[-1] ** -0.5 if scale is None else scale)
    elif scale is not None:
        raise ConfigError(f"scale={scale} is given twice: leave it out, scores.scale={scores.scale} is the one.")
    if recompute_cache is None or not recompute_cache.recomputing:  # a recomputed layer has agreed and sends nothing
        shard = _as_shard(schedule, mesh, q_BtHD, k_BtKD, v_BtKV)
        signature = call_signature(*shard, scores, options)
        agree(schedule, mesh, signature, shape_error(*shard, sinks_H, schedule, mesh), again=agree_again)
    return _attend(
        q_BtHD,
        k_BtKD,
        v_BtKV,
        schedule=schedule,
        mesh=mesh,
        options=options,
        scores=scores,
        sinks_H=sinks_H,
        recompute_cache=recompute_cache,
    )


def _attend(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    *,
    schedule: Schedule,
    mesh: Mesh,
    options: AttentionOptions,
    scores: Scores,
    sinks_H: Tensor | None = None,
    recompute_cache: RecomputeCache | None = None,
) -> Tensor:
    """``attend`` once the ranks have agreed on the schedule, the shapes and the options."""
    B, t = q_BtHD.shape[:2]
    q, k, v = _as_shard(schedule, mesh, q_BtHD, k_BtKD, v_BtKV)
    call = _build_call(q, k, v, schedule, mesh, options, scores, recompute_cache)
    table_NH = None if scores.relative_bias is None else scores.relative_bias.table_NH
    out = _Attention.apply(q, k, v, table_NH, sinks_H, call)
    return out.view(B, t, *out.shape[2:])


def _as_shard(schedule: Schedule, mesh: Mesh, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a flattened micro-batch as the one sequence that the layout is over; others as they are."""
    B, t = q.shape[:2]
    num_local = schedule.layout.num_local(mesh.context_rank)
    if t == num_local or B * t != num_local:
        return q, k, v
    q, k, v = (x.reshape(1, num_local, *x.shape[2:]) for x in (q, k, v))
    return q, k, v


@dataclass(frozen=True)
class _Call:
    """What forward and backward of one attention call have in common."""

    transport: Transport
    kernel: AttentionKernel
    scores: Scores
    """Of this rank's heads."""
    heads: HeadExchange
    recompute_cache: RecomputeCache | None


class _Attention(torch.autograd.Function):
    """Rows to heads, the KV blocks, heads to rows; and the way back.

    Without a recompute cache what the kernel saw is kept for backward. With one (the layer is recomputed) q, k and v
    come as the recomputation makes them and are traded for heads again in backward, so that recomputing sends nothing.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, sinks: Tensor | None, call: _Call
    ) -> Tensor:
        ctx.call = call
        cache, heads = call.recompute_cache, call.heads
        known = None if cache is None else cache.load()
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
        heads = call.heads
        dtypes = (q.dtype, k.dtype, v.dtype)
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
        dq = heads.to_rows(grads.dq_BtHD.to(dtypes[0]))
        dk = heads.to_rows(grads.dk_BsKD, keys=True)  # summed over ranks before it is rounded
        dv = heads.to_rows(grads.dv_BsKV, keys=True)
        return dq, dk.to(dtypes[1]), dv.to(dtypes[2]), dtable, dsinks, None


def _whole_heads(mine: Tensor, heads: HeadExchange) -> Tensor:
    """This rank's heads [..., h] among all heads [..., H], the others 0."""
    if heads.mesh.ulysses == 1:
        return mine
    whole = mine.new_zeros(*mine.shape[:-1], heads.num_heads)
    whole[..., heads.query_heads] = mine
    return whole


def _attend_blocks(call: _Call, q_BnHD: Tensor, k_BnKD: Tensor, v_BnKV: Tensor) -> PartialResult:
    """Output and log-sum-exp over all KV blocks, merged in float32 (log-sum-exps in float64)."""
    kernel_forward = partial(call.kernel.forward, scores=call.scores)

    def compute(block: KVBlock) -> PartialResult:
        keys, values = call.heads.expand(block.keys_BsKD), call.heads.expand(block.values_BsKV)
        return attend_work(q_BnHD[:, block.queries], keys, values, block.work, kernel_forward)

    return call.transport.forward(k_BnKD, v_BnKV, compute)


def _attend_blocks_backward(
    call: _Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Gradients:
    """Gradients of this rank's rows and heads, and of the bias table, summed over all KV blocks.

    dQ stays on this rank and is summed here; dK and dV are the transport's, which returns them to their owners.
    """
    kernel_backward = partial(call.kernel.backward, scores=call.scores)
    dq: Tensor | None = None
    dtable: Tensor | None = None

    def compute(block: KVBlock) -> KeysAndValues:
        nonlocal dq, dtable
        rows = block.queries
        keys, values = call.heads.expand(block.keys_BsKD), call.heads.expand(block.values_BsKV)
        grads = attend_work_backward(
            dout[:, rows], q[:, rows], keys, values, out[:, rows], lse[:, rows], block.work, kernel_backward
        )
        if dq is None:  # the rank's own keys come first and meet all its queries
            dq, dtable = grads.dq_BtHD, grads.dtable_NH
        else:
            dq[:, rows] += grads.dq_BtHD
            dtable = _sum(dtable, grads.dtable_NH)
        return call.heads.fold(grads.dk_BsKD), call.heads.fold(grads.dv_BsKV)

    dk, dv = call.transport.backward(k, v, compute)
    assert dq is not None
    return Gradients(dq, dk, dv, dtable)


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return total if part is None else part
    return total + part


def _build_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    mesh: Mesh,
    options: AttentionOptions,
    scores: Scores,
    recompute_cache: RecomputeCache | None,
) -> _Call:
    heads = HeadExchange.build(mesh, q.shape[2], k.shape[2])
    first, stop = heads.query_heads.start, heads.query_heads.stop
    request = KernelRequest(
        q.device.type,
        q.dtype,
        q.shape[3],
        stop - first,
        heads.num_kernel_key_heads,
        value_dim=v.shape[3],
        window=schedule.window is not None,
        rules=scores.rules,
        deterministic=options.deterministic,
        products=options.products,
    )
    if scores.needs_distances:
        schedule = schedule.with_distances()
    return _Call(
        build_transport(options.transport, schedule, mesh, communication_dtype=options.communication_dtype),
        choose_kernel(options.kernel, request),
        scores.of_heads(first, stop),
        heads,
        recompute_cache,
    )


def call_signature(q: Tensor, k: Tensor, v: Tensor, scores: Scores, options: AttentionOptions) -> str:
    """What every rank must have been given alike, besides the schedule."""
    B, _, H, D = q.shape
    communication_dtype = options.communication_dtype or accumulate_dtype(q.dtype)
    return (
        f"{B} × {H}/{k.shape[2]} heads of {D} (values {v.shape[3]}), {q.dtype}, scale {scores.scale:.6g}, soft cap "
        f"{scores.softcap}, transport {options.transport}, gradients as {communication_dtype}"
    )


def shape_error(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: Schedule, mesh: Mesh) -> str | None:
    """What is wrong with this rank's tensors; None when nothing is."""
    num_queries = schedule.layout.num_local(mesh.context_rank)
    num_keys = schedule.key_layout.num_local(mesh.context_rank)
    if (q.shape[1], k.shape[1], v.shape[1]) != (num_queries, num_keys, num_keys):
        return (
            f"rank {mesh.rank} was given {q.shape[1]} queries, {k.shape[1]} keys and {v.shape[1]} values; its shard of "
            f"the layout is {num_queries} tokens. Give it SequenceLayout.split of each."
        )
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0] or k.shape[2] != v.shape[2] or k.shape[3] != q.shape[3]:
        return (
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit each other: batch "
            "sizes must agree, keys and values have the same heads, queries and keys the same head size."
        )
    if not q.dtype == k.dtype == v.dtype:
        return f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}; all must have one dtype."
    if q.shape[2] % k.shape[2]:
        return f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads."
    if sinks is not None and sinks.shape != (q.shape[2],):
        return f"sinks_H has shape {tuple(sinks.shape)}; it needs one logit for each of {q.shape[2]} query heads."
    return None
