"""Exact attention over a sequence that is spread over ranks: a transport's visits around a one-device kernel.

Axes: B batch, t this rank's tokens, n the tokens of its ring index (all ranks that share rows together), H query heads,
K key/value heads, h and k this rank's share of them, D query/key head size, V value head size. Partial results, and the
gradients between ranks, are float32 (float64 for float64 inputs): rounding does not grow with the number
of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.contract import AttentionKernel, KernelRequest, Scores, merge_
from longctx.kernels.attention.select import choose_kernel
from longctx.kernels.attention.sinks import apply_sinks, sinks_gradient
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.graphs import outside_graphs
from longctx.model.attention.strided import add_strided_gradients, attend_strided_
from longctx.model.recompute import RecomputeCache
from parallel.mesh import Mesh
from parallel.runtime.agreement import agree
from parallel.schedule.heads import HeadSplit
from parallel.schedule.schedule import Schedule
from parallel.transport.select import build_transport
from parallel.transport.ulysses import heads_to_rows, rows_to_heads
from parallel.transport.visit import Transport, Visit


@outside_graphs
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
    recompute_cache: RecomputeCache | None = None,
    agree_again: bool = False,
) -> Tensor:
    """Attention of this rank's queries over every key of the sequence that the schedule's mask lets them see.

    Inputs are this rank's share under the schedule's layout: [1, t, …] of it, the same tokens in B rows when the layout
    is over flattened rows, or B stacked sequences of the same documents. Returns [B, t, H, V] in q's dtype. Every rank
    of the context group must call it alike; with a schedule's first use (or ``agree_again``) they compare what they
    were given before the first byte travels.

    ``scores`` (default: the dot product times ``scale``, by default D^-½) may add a soft cap and biases; ``sinks_H``
    are learnable logits of a key without value. ``transport`` is p2p, two_level, all_gather or auto.
    ``communication_dtype`` is the dtype of gradients under way (default: float32, float64 for float64 inputs).
    ``deterministic`` asks for kernels whose backward repeats to the bit. ConfigError for what a kernel, layout or mesh
    cannot do; ClusterError when a rank differs, dies or is too late."""
    B, t = q_BtHD.shape[:2]
    share = schedule.layout.num_local(mesh.context_rank)
    options: dict[str, Any] = {
        "schedule": schedule,
        "mesh": mesh,
        "kernel": kernel,
        "scale": scale,
        "scores": scores,
        "sinks_H": sinks_H,
        "transport": transport,
        "communication_dtype": communication_dtype,
        "deterministic": deterministic,
        "recompute_cache": recompute_cache,
        "agree_again": agree_again,
    }
    if t != share and B * t == share:  # rows of a flattened micro-batch
        q, k, v = (x.reshape(1, share, *x.shape[2:]) for x in (q_BtHD, k_BtKD, v_BtKV))
        return attend(q, k, v, **options).unflatten(1, (B, t)).squeeze(0)
    scores = _check_scores(scores, scale, q_BtHD.shape[-1])
    if (
        recompute_cache is None or not recompute_cache.recomputing
    ):  # a layer that is computed again has agreed already, and sends nothing
        words = _words(q_BtHD, k_BtKD, v_BtKV, scores, transport, communication_dtype)
        problem = _problem(q_BtHD, k_BtKD, v_BtKV, sinks_H, schedule, mesh)
        agree(schedule, mesh, words, problem, again=agree_again)
    call = _build_call(
        q_BtHD,
        k_BtKD,
        v_BtKV,
        schedule,
        mesh,
        kernel,
        scores,
        transport,
        communication_dtype,
        deterministic,
        recompute_cache,
    )
    table = None if scores.relative_bias is None else scores.relative_bias.table_NH
    return _Attention.apply(q_BtHD, k_BtKD, v_BtKV, table, sinks_H, call)


@dataclass(frozen=True)
class _Call:
    """What the passes of one attention call have in common."""

    transport: Transport
    kernel: AttentionKernel
    scores: Scores
    """Of this rank's heads."""
    mesh: Mesh
    heads: HeadSplit
    num_heads: int
    num_kv_heads: int
    recompute_cache: RecomputeCache | None

    @property
    def query_heads(self) -> slice:
        """This rank's."""
        return slice(*self.heads.queries[self.mesh.ulysses_rank])

    def to_heads(self, x: Tensor, *, keys: bool = False) -> Tensor:
        """[B, t, heads, …] → [B, n, this rank's heads, …]; itself where heads are not split."""
        group = self.mesh.ulysses_group
        ranges = self.heads.keys if keys else self.heads.queries
        return x if group is None else rows_to_heads(x, ranges, self.mesh.ulysses_rank, group)

    def to_rows(self, x: Tensor, *, keys: bool = False) -> Tensor:
        """The inverse; heads that several ranks hold are summed."""
        group = self.mesh.ulysses_group
        ranges, count = (self.heads.keys, self.num_kv_heads) if keys else (self.heads.queries, self.num_heads)
        return x if group is None else heads_to_rows(x, ranges, count, group)

    def expand(self, x_BskD: Tensor) -> Tensor:
        """Key heads as the kernel wants them: one for each query head where the rank's groups are uneven."""
        wanted = self.heads.key_of_query(self.mesh.ulysses_rank)
        return x_BskD if wanted is None else x_BskD[:, :, wanted]

    def fold(self, grad_BshD: Tensor) -> Tensor:
        """Gradients of expanded key heads, summed into the heads they came from."""
        wanted = self.heads.key_of_query(self.mesh.ulysses_rank)
        if wanted is None:
            return grad_BshD
        B, s, _, D = grad_BshD.shape
        first, last = self.heads.keys[self.mesh.ulysses_rank]
        index = torch.tensor(wanted, device=grad_BshD.device)
        return grad_BshD.new_zeros(B, s, last - first, D).index_add_(2, index, grad_BshD)


class _Attention(torch.autograd.Function):
    """Rows to heads, the visits, heads to rows; and the way back.

    Without a recompute_cache what the kernel saw is kept for backward. With one (the layer is recomputed) q, k and v
    come as the recomputation makes them and are traded for heads again in backward, so that recomputing sends nothing.
    """

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, sinks: Tensor | None, call: _Call
    ) -> Tensor:
        ctx.call, ctx.lean = call, call.recompute_cache is not None
        known = None if call.recompute_cache is None else call.recompute_cache.load()
        if known is not None:
            out, lse = known
            ctx.save_for_backward(q, k, v, out, lse, sinks)
            return out
        heads = (call.to_heads(q), call.to_heads(k, keys=True), call.to_heads(v, keys=True))
        out_heads, lse = _visit_all(call, *heads)
        if sinks is not None:
            out_heads, lse = apply_sinks(out_heads, lse, sinks[call.query_heads])
        out_heads = out_heads.to(q.dtype)
        out = call.to_rows(out_heads)
        if call.recompute_cache is not None:
            call.recompute_cache.save(out.detach(), lse)
            ctx.save_for_backward(q, k, v, out, lse, sinks)
        else:
            ctx.save_for_backward(*heads, out_heads, lse, sinks)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):  # type: ignore[override]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        call: _Call = ctx.call
        dtypes = (q.dtype, k.dtype, v.dtype)
        if ctx.lean:
            q, k, v, out = (
                call.to_heads(q),
                call.to_heads(k, keys=True),
                call.to_heads(v, keys=True),
                call.to_heads(out),
            )
        dout = call.to_heads(dout)
        dq, dk, dv, dtable = _visit_all_backward(call, dout, q, k, v, out, lse)
        dsinks = None
        if sinks is not None:
            dsinks = torch.zeros_like(sinks)
            dsinks[call.query_heads] = sinks_gradient(dout, out, lse, sinks[call.query_heads]).to(sinks.dtype)
        if dtable is not None and call.mesh.ulysses > 1:
            whole = dtable.new_zeros(dtable.shape[0], call.num_heads)
            whole[:, call.query_heads] = dtable
            dtable = whole
        dq = call.to_rows(dq.to(dtypes[0]))
        dk, dv = (call.to_rows(g, keys=True) for g in (dk, dv))  # summed over ranks before they are rounded
        return dq, dk.to(dtypes[1]), dv.to(dtypes[2]), dtable, dsinks, None


def _visit_all(call: _Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over all visits, merged in float32 (log-sum-exps in float64)."""
    results: list[tuple[Tensor, Tensor]] = []

    def compute(visit: Visit) -> None:
        keys, values = call.expand(visit.keys_BsKD), call.expand(visit.values_BsKV)
        forward = partial(call.kernel.forward, scores=call.scores)
        part = forward(q[:, visit.queries], keys, values, visit.slices)
        for strided in visit.strided:
            attend_strided_(*part, q[:, visit.queries], keys, values, strided, forward)
        if not results:  # the rank's own keys come first and name all its queries
            results.append(part)
            return
        out, lse = results[0]
        merge_(out[:, visit.queries], lse[:, visit.queries], *part)

    call.transport.run(k, v, compute)
    return results[0]


def _visit_all_backward(
    call: _Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv of this rank's rows and heads, and the bias table's gradient, summed over all visits."""
    sums: list[Tensor | None] = []

    def compute(visit: Visit) -> tuple[Tensor, Tensor]:
        keys, values, rows = call.expand(visit.keys_BsKD), call.expand(visit.values_BsKV), visit.queries
        mine = (dout[:, rows], q[:, rows], keys, values, out[:, rows], lse[:, rows])
        backward = partial(call.kernel.backward, scores=call.scores)
        grads = backward(*mine, visit.slices)
        for strided in visit.strided:
            grads = add_strided_gradients(grads, (*mine[:2], *mine[4:]), keys, values, strided, backward)
        if not sums:
            sums.extend((grads.dq_BtHD, grads.dtable_NH))
        else:
            assert sums[0] is not None
            sums[0][:, rows] += grads.dq_BtHD
            if grads.dtable_NH is not None:
                sums[1] = grads.dtable_NH if sums[1] is None else sums[1] + grads.dtable_NH
        return call.fold(grads.dk_BsKD), call.fold(grads.dv_BsKV)

    dk, dv = call.transport.run_backward(k, v, compute)
    dq, dtable = sums
    assert dq is not None
    return dq, dk, dv, dtable


def _build_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    schedule: Schedule,
    mesh: Mesh,
    kernel: str,
    scores: Scores,
    transport: str,
    communication_dtype: torch.dtype | None,
    deterministic: bool,
    recompute_cache: RecomputeCache | None,
) -> _Call:
    H, K = q.shape[2], k.shape[2]
    heads = HeadSplit.build(H, K, mesh.ulysses)
    start, stop = heads.queries[mesh.ulysses_rank]
    first, last = heads.keys[mesh.ulysses_rank]
    request = KernelRequest(
        q.device.type,
        q.dtype,
        q.shape[3],
        stop - start,
        stop - start if heads.key_of_query(mesh.ulysses_rank) else last - first,
        value_dim=v.shape[3],
        window=schedule.window is not None,
        softcap=scores.softcap is not None,
        alibi=scores.alibi_slopes_H is not None,
        relative_bias=scores.relative_bias is not None,
        deterministic=deterministic,
    )
    if scores.needs_distances:
        schedule = schedule.with_distances()
    return _Call(
        transport=build_transport(transport, schedule, mesh, communication_dtype=communication_dtype),
        kernel=choose_kernel(kernel, request),
        scores=scores.of_heads(start, stop),
        mesh=mesh,
        heads=heads,
        num_heads=H,
        num_kv_heads=K,
        recompute_cache=recompute_cache,
    )


def _check_scores(scores: Scores | None, scale: float | None, head_dim: int) -> Scores:
    if scores is not None and scale is not None:
        raise ConfigError(f"scale={scale} is given twice: leave it out, scores.scale={scores.scale} is the one.")
    return Scores(scale=head_dim**-0.5 if scale is None else scale) if scores is None else scores


def _words(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, transport: str, communication_dtype: torch.dtype | None
) -> str:
    """What every rank must have been given alike, besides the schedule."""
    B, _, H, D = q.shape
    return (
        f"{B} × {H}/{k.shape[2]} heads of {D} (values {v.shape[3]}), {q.dtype}, scale {scores.scale:.6g}, soft cap "
        f"{scores.softcap}, transport {transport}, gradients as {communication_dtype or accumulate_dtype(q.dtype)}"
    )


def _problem(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, schedule: Schedule, mesh: Mesh) -> str | None:
    """What is wrong with this rank's tensors."""
    share, keys = (x.num_local(mesh.context_rank) for x in (schedule.layout, schedule.key_layout))
    if (q.shape[1], k.shape[1], v.shape[1]) != (share, keys, keys):
        return (
            f"rank {mesh.rank} was given {q.shape[1]} queries, {k.shape[1]} keys and {v.shape[1]} values; its share of "
            f"the layout is {share} tokens. Give it SequenceLayout.split of each."
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
