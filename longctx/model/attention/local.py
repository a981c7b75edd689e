"""What an attention layer calls: the mask it is given, the core that computes, the cache that decoding fills.

``LocalAttention`` serves one process. A core that spreads the sequence over processes has the same signature and
lives outside this package; a layer cannot tell which one it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.errors import ConfigError
from longctx.kernels.attention import ops
from longctx.kernels.attention.contract import KernelRequest, Scores
from longctx.kernels.attention.select import choose_kernel
from longctx.kernels.attention.sinks import apply_sinks, sinks_gradient
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from longctx.kernels.graphs import outside_graphs
from longctx.kernels.processor import Products
from longctx.model.attention.core import KVCache
from longctx.model.attention.mask import AttentionMask
from longctx.model.attention.strided import Piece, continuation, strided_work
from longctx.model.attention.work import EVERY_ROW, Work, attend_work, attend_work_backward
from longctx.model.recompute import RecomputeCache


class LocalAttention:
    """The core of one process, which holds every key: its documents are the kernel's slices."""

    is_operator = True
    """Its work is one operator: ``torch.compile`` need not leave its graph for it."""

    def __init__(self, kernel: str = "auto", *, products: Products | None = None) -> None:
        """``products`` says how a CPU multiplies bfloat16; None takes what is faster on this one."""
        self.kernel = kernel
        self.products: Products | None = products

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
        B, T, H, D = q_BtHD.shape
        if sinks_H is not None and sinks_H.shape != (H,):
            raise ConfigError(
                f"sinks_H has shape {tuple(sinks_H.shape)}; it needs one logit for each of {H} query heads."
            )
        scores = scores or Scores(scale=D**-0.5)
        K, V = v_BtKV.shape[2:]
        device, windowed = q_BtHD.device.type, mask.window is not None
        kernel = _kernel_for(self.kernel, device, q_BtHD.dtype, (D, H, K, V), self.products, windowed, scores.rules)
        if cache is not None:
            k_BtKD, v_BtKV = cache.append(layer, k_BtKD, v_BtKV)
            work = _continuation_work(mask, T, k_BtKD.shape[1])
        elif mask.documents.num_tokens != B * T:
            raise ValueError(f"{B} rows of {T} tokens are not the {mask.documents.num_tokens} tokens of cu_seqlens")
        else:
            work = _work(mask.slice_table, mask.strided if mask.stride else None)
            q_BtHD, k_BtKD, v_BtKV = (x.reshape(1, B * T, *x.shape[2:]) for x in (q_BtHD, k_BtKD, v_BtKV))
        bias_table = None if scores.relative_bias is None else scores.relative_bias.table_NH
        out = _Attention.apply(q_BtHD, k_BtKD, v_BtKV, bias_table, sinks_H, work, kernel, scores, recompute_cache)
        return out.view(B, T, H, V)


def document_slices(mask: AttentionMask) -> tuple[AttentionSlice, ...]:
    """The slices of every non-empty document of a mask whose whole sequence lies in this process."""
    return tuple(part for a, b in pairwise(mask.documents.bounds) for part in _visible(a, b, mask))


def continuation_slices(mask: AttentionMask, num_queries: int, num_keys: int) -> tuple[AttentionSlice, ...]:
    """The newest ``num_queries`` tokens of one document against all of its ``num_keys``, under the mask's rules."""
    before = num_keys - num_queries
    newest = (p._replace(q_start=max(p.q_start, before)) for p in _visible(0, num_keys, mask))
    return tuple(p.shifted(queries=-before) for p in newest if p.q_start < p.q_stop)


@outside_graphs("a cache grows: a graph that read its length would serve one token")
def _continuation_work(mask: AttentionMask, num_queries: int, num_keys: int) -> tuple[Work, ...]:
    table = slice_table(continuation_slices(mask, num_queries, num_keys))
    return _work(table, strided_beyond(mask, continuation(num_queries, num_keys)))


def _work(table: Tensor, strided: Work | None) -> tuple[Work, ...]:
    """The bands of the mask for all rows, then what a stride adds."""
    bands = Work(EVERY_ROW, EVERY_ROW, table)
    return (bands,) if strided is None else (bands, strided)


def strided_beyond(mask: AttentionMask, pieces: list[Piece]) -> Work | None:
    """What the stride adds to these pieces' windows."""
    if not mask.stride or mask.window is None:
        return None
    return strided_work(pieces, mask.window, mask.stride)


def _visible(start: int, stop: int, mask: AttentionMask) -> Iterator[AttentionSlice]:
    """What the queries of a document at rows [start, stop) see: the band of the window, then sink tokens beyond it."""
    if stop <= start:
        return
    window = mask.window
    if window is None or window >= stop - start:  # the window is wider than the document
        yield AttentionSlice(start, stop, start, stop, lo=0 if mask.causal else None)
        return
    yield AttentionSlice(start, stop, start, stop, lo=0 if mask.causal else 1 - window, hi=window - 1)
    sinks = min(start + mask.sink_tokens, stop)
    if mask.sink_tokens:
        yield AttentionSlice(start + window, stop, start, sinks, lo=window)
    if sinks > start + window and not mask.causal:  # sink tokens further ahead than the window reaches
        yield AttentionSlice(start, sinks - window, start + window, sinks, hi=-window)


@torch.compiler.assume_constant_result
def _kernel_for(
    name: str,
    device_type: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    products: Products | None,
    window: bool,
    rules: tuple[str, ...],
) -> str:
    """The chosen kernel's name. Under ``torch.compile`` it is chosen while compiling, hence the plain arguments."""
    head_dim, num_heads, num_kv_heads, value_dim = sizes
    request = KernelRequest(
        device_type,
        dtype,
        head_dim,
        num_heads,
        num_kv_heads,
        value_dim,
        window=window,
        rules=rules,
        products=products,
    )
    return choose_kernel(name, request).name


class _Attention(torch.autograd.Function):
    """Autograd around a kernel whose work holds all there is to see."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias_table: Tensor | None,
        sinks: Tensor | None,
        work: tuple[Work, ...],
        kernel: str,
        scores: Scores,
        recompute_cache: RecomputeCache | None,
    ) -> Tensor:
        """``bias_table`` is the one in ``scores``, named here for autograd."""
        ctx.work, ctx.kernel, ctx.scores = work, kernel, scores
        known = None if recompute_cache is None else recompute_cache.load()
        if known is None:
            forward = partial(ops.forward, kernel, scores=scores)
            out, lse = attend_work(q, k, v, work, forward)
            if sinks is not None:
                out, lse = apply_sinks(out, lse, sinks)
            out = out.to(q.dtype)
            if recompute_cache is not None:
                recompute_cache.save(out, lse)
        else:
            out, lse = known
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):  # type: ignore[override]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        backward = partial(ops.backward, ctx.kernel, scores=ctx.scores)
        grads = attend_work_backward(dout, q, k, v, out, lse, ctx.work, backward)
        dq, dk, dv = (g.to(x.dtype) for g, x in zip(grads[:3], (q, k, v), strict=True))
        bias, dtable = ctx.scores.relative_bias, grads.dtable_NH
        dtable = None if bias is None or dtable is None else dtable.to(bias.table_NH.dtype)
        dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks).to(sinks.dtype)
        return dq, dk, dv, dtable, dsinks, None, None, None, None
