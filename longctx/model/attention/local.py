"""LocalAttention: the core for one process, which holds every key of its sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from longctx.kernels.attention import ops
from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.kernel_interface import Gradients, KernelRequest, ScoreRules
from longctx.kernels.attention.kernel_selection import KERNELS, choose_kernel
from longctx.kernels.attention.sinks import apply_sinks, sinks_gradient
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from longctx.kernels.devices import on_cpu
from longctx.kernels.dtypes import as_dtype
from longctx.kernels.processor import MatmulMode
from longctx.model.attention.attention_work import EVERY_ROW, Work, backward_work, forward_work
from longctx.model.attention.core import (
    AttentionCore,
    AttentionShapes,
    append_rows,
    check_no_gradient,
    forward_separately,
    num_reserved_rows,
    num_visible_rows,
    sinks_of,
)
from longctx.model.attention.kv_cache import KVCache, LayerCache, TokenChunk
from longctx.model.attention.mask import AttentionMask
from longctx.model.attention.sequence_plans import BatchPlan, SequencesPlan, SlotPlan
from longctx.model.attention.slots import SlotPool
from longctx.model.attention.strided import StridedPiece, continuation, mirrored_work, strided_work, whole_documents
from longctx.model.recompute import RecomputeCache


@dataclass(frozen=True, eq=False)
class LocalPlan:
    """One process's work and the kernel that computes it."""

    shapes: AttentionShapes
    kernel: str
    """Name of the chosen kernel."""
    work: tuple[Work, ...]
    """The mask's bands over all rows, then the stride's extra work."""
    visible_rows: int | None = None
    """Cached rows that some query sees; None for all."""
    reserved_rows: int = 0
    """Rows to reserve for later tokens."""
    newest: CpuFlashKernel | None = None
    """Kernel for a single token that sees every cached row; ``work`` is then empty."""


class LocalAttention(AttentionCore):
    """Core for one process, which holds every key: documents become the kernel's slices."""

    def __init__(self, kernel: str = "auto", *, matmul_mode: MatmulMode | None = None) -> None:
        """Set the kernel and the bfloat16 matmul on a CPU; ``matmul_mode=None`` selects this CPU's faster way."""
        self.kernel = kernel
        self.matmul_mode: MatmulMode | None = matmul_mode

    def new_caches(self, most: int) -> Callable[[], KVCache]:
        """Return a factory for this process's empty caches; short sequences share one slot pool."""
        if most == 1:
            return self.new_cache
        return partial(KVCache, SlotPool(most))

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> LocalPlan:
        """Build the documents' slices, or with a cache those of its newest tokens; ignore ``placement``.

        Raise ValueError if the tokens do not match the mask, ConfigError if no kernel supports the request.
        """
        chosen = choose_kernel(self.kernel, self._request(mask, shapes))
        kernel, visible_rows = chosen.name, None
        strided: list[Work] = []
        # A generated token's plan needs no slices: it sees every row that the cache keeps.
        if isinstance(chosen, CpuFlashKernel) and _is_newest(mask, shapes):
            return LocalPlan(
                shapes, kernel, (), num_visible_rows(mask, shapes), num_reserved_rows(mask, shapes), chosen
            )
        # Without a cache each document is a band over its own rows; with one, new tokens meet the visible stored keys.
        if shapes.cached_tokens is None:
            shapes.check_whole(mask.documents)
            slices = document_slices(mask)
            if mask.stride:
                strided = strided_entries(mask, whole_documents(mask.documents.bounds))
        else:
            visible_rows = num_visible_rows(mask, shapes)
            num_keys = visible_rows + shapes.tokens
            slices = continuation_slices(mask, shapes.tokens, num_keys)
            if mask.stride:
                strided = strided_entries(mask, continuation(shapes.tokens, num_keys))
        work = (Work(EVERY_ROW, EVERY_ROW, slice_table(slices)), *strided)
        return LocalPlan(shapes, kernel, work, visible_rows, num_reserved_rows(mask, shapes))

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: LocalPlan,
        cache: LayerCache | None = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        B, T, H, D = q_BtHD.shape
        sinks_H = sinks_of(weights)
        plan.shapes.check_call(q_BtHD, sinks_H)
        if scores is None:
            scores = ScoreRules(scale=D**-0.5)
        if cache is not None:
            k_BtKD, v_BtKV = append_rows(
                cache, k_BtKD, v_BtKV, plan.shapes, visible_rows=plan.visible_rows, reserved_rows=plan.reserved_rows
            )
            if plan.newest is not None:
                # Skip slices and tiles: the code around the kernel takes longer than a generated token's attention.
                out = plan.newest.forward_newest(q_BtHD, k_BtKD, v_BtKV, None, scores=scores, sinks_H=sinks_H)
                return as_dtype(out, q_BtHD.dtype)
            if not torch.is_grad_enabled():
                return _forward_with_sinks(
                    q_BtHD, k_BtKD, v_BtKV, sinks_H, plan.work, _forward_of(plan.kernel, q_BtHD), scores
                )[0]
        else:
            # Slices index the flattened tokens, so rows are laid end to end.
            q_BtHD, k_BtKD, v_BtKV = (x.reshape(1, -1, x.shape[2], x.shape[3]) for x in (q_BtHD, k_BtKD, v_BtKV))
        if not torch.is_grad_enabled() and recompute_cache is None:
            forward = _forward_of(plan.kernel, q_BtHD)
            out, _ = _forward_with_sinks(q_BtHD, k_BtKD, v_BtKV, sinks_H, plan.work, forward, scores)
            return out.view(B, T, H, v_BtKV.shape[3])
        # Autograd sees a tensor only if it is an argument, so the table is passed in addition to the scores.
        bias_table = None
        if scores.relative_bias is not None:
            bias_table = scores.relative_bias.table_NH
        out = _Attention.apply(
            q_BtHD, k_BtKD, v_BtKV, bias_table, sinks_H, plan.work, plan.kernel, scores, recompute_cache
        )
        return out.view(B, T, H, v_BtKV.shape[3])

    def plan_sequences(
        self, mask: AttentionMask, shapes: AttentionShapes, chunks: Sequence[TokenChunk]
    ) -> SequencesPlan:
        """Plan sequences in slots as one call if they see all keys and the kernel can; plan the others separately."""
        kernel, slot_plan = choose_kernel(self.kernel, self._request(mask, shapes)), None
        sees_all = mask.window is None and not mask.stride and not shapes.rules
        if sees_all and isinstance(kernel, CpuFlashKernel):
            slot_plan = SlotPlan.build(kernel, shapes, chunks)
        return SequencesPlan.build(self, mask, shapes, chunks, slot_plan)

    def forward_sequences(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: SequencesPlan,
        caches: Sequence[Any],
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Tensor:
        """Compute output [1, t, H, V], each token attending to its own cache."""
        check_no_gradient(q_BtHD)
        sinks_H = sinks_of(weights)
        if scores is None:
            scores = ScoreRules(scale=q_BtHD.shape[-1] ** -0.5)
        if plan.batch_plan is not None:
            return self._forward_batch(q_BtHD, k_BtKD, v_BtKV, plan.batch_plan, caches, scores, sinks_H)
        outs = []
        if plan.slot_plan is not None:
            outs.append(plan.slot_plan.forward(q_BtHD, k_BtKD, v_BtKV, caches, scores, sinks_H))
        if plan.separate_plans is not None:
            outs.append(forward_separately(self, q_BtHD, k_BtKD, v_BtKV, plan.separate_plans, caches, scores, weights))
        return plan.in_order(outs)

    def _forward_batch(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        batch_plan: BatchPlan,
        caches: Sequence[Any],
        scores: ScoreRules,
        sinks_H: Tensor | None,
    ) -> Tensor:
        """Compute output [1, t, H, V] for the first tokens of equally long sequences, in one call."""
        plan: LocalPlan = batch_plan.core_plan
        q, k, v = batch_plan.rows(q_BtHD), batch_plan.rows(k_BtKD), batch_plan.rows(v_BtKV)
        for n, cache in enumerate(caches):
            own = slice(n, n + 1)
            append_rows(
                cache, k[own], v[own], plan.shapes, visible_rows=plan.visible_rows, reserved_rows=plan.reserved_rows
            )
        out, _ = _forward_with_sinks(q, k, v, sinks_H, plan.work, _forward_of(plan.kernel, q), scores)
        return out.flatten(0, 1).unsqueeze(0)

    def _request(self, mask: AttentionMask, shapes: AttentionShapes) -> KernelRequest:
        return KernelRequest(
            shapes.device_type,
            shapes.dtype,
            shapes.head_dim,
            shapes.num_heads,
            shapes.num_kv_heads,
            shapes.value_dim,
            window=mask.window is not None,
            rules=shapes.rules,
            matmul_mode=self.matmul_mode,
        )


@lru_cache(maxsize=16)  # rows of images have the same documents
def document_slices(mask: AttentionMask) -> tuple[AttentionSlice, ...]:
    """Build slices for every non-empty document in a mask; this process holds the full sequence."""
    if mask.key_documents is not None:
        document_spans = zip(pairwise(mask.documents.bounds), pairwise(mask.key_documents.bounds), strict=True)
        return tuple(AttentionSlice(a, b, c, d) for (a, b), (c, d) in document_spans if a < b and c < d)
    own = tuple(part for a, b in pairwise(mask.documents.bounds) for part in _visible(a, b, mask))
    return own + tuple(_prefix_slices(mask))


def _prefix_slices(mask: AttentionMask) -> Iterator[AttentionSlice]:
    """Yield the slices between each document and its prefix."""
    bounds = mask.documents.bounds
    for number, prefix in enumerate(mask.documents.prefixes):
        a, b = bounds[number : number + 2]
        if prefix < 0 or a == b:
            continue
        c, d = bounds[prefix : prefix + 2]
        # Query i follows the prefix's last key as if it were at row i − between.
        between, hi = a - d, None
        if mask.window is not None:
            b, c = min(b, a + mask.window - 1), max(c, d - mask.window + 1)
            hi = mask.window - 1 + between
        if a < b and c < d:
            yield AttentionSlice(a, b, c, d, hi=hi, offset=-between)


def continuation_slices(mask: AttentionMask, num_queries: int, num_keys: int) -> tuple[AttentionSlice, ...]:
    """Build slices for a document's newest ``num_queries`` tokens against all of its ``num_keys``."""
    before = num_keys - num_queries
    newest = (p._replace(q_start=max(p.q_start, before)) for p in _visible(0, num_keys, mask))
    return tuple(p.shifted(queries=-before) for p in newest if p.q_start < p.q_stop)


def strided_entries(mask: AttentionMask, pieces: list[StridedPiece]) -> list[Work]:
    """Build the stride's work beyond these pieces' windows, on each side that queries see."""
    assert mask.window is not None, "a stride without a window"
    before = strided_work(pieces, mask.window, mask.stride)
    if before is None:
        return []
    if mask.causal:
        return [before]
    return [before, mirrored_work(before)]


def _visible(start: int, stop: int, mask: AttentionMask) -> Iterator[AttentionSlice]:
    """Yield the slices for a document at rows [start, stop): the window's band, then sink tokens beyond it."""
    if stop <= start:
        return
    window = mask.window
    if window is None or window >= stop - start:  # the window covers the document
        if mask.causal:
            yield AttentionSlice(start, stop, start, stop, lo=0)
        else:
            yield AttentionSlice(start, stop, start, stop)
        return
    lo = 1 - window
    if mask.causal:
        lo = 0
    yield AttentionSlice(start, stop, start, stop, lo=lo, hi=window - 1)
    # Sink tokens within the window are in its band already, and each key must count once.
    sinks = min(start + mask.sink_tokens, stop)
    if mask.sink_tokens:
        yield AttentionSlice(start + window, stop, start, sinks, lo=window)
    if sinks > start + window and not mask.causal:  # sink tokens ahead of the query, beyond its window
        yield AttentionSlice(start, sinks - window, start + window, sinks, hi=-window)


def _is_newest(mask: AttentionMask, shapes: AttentionShapes) -> bool:
    """Return whether a single token sees every cached row and no backward pass follows."""
    if shapes.cached_tokens is None or shapes.tokens != 1 or torch.is_grad_enabled():
        return False
    return not mask.stride and not mask.sink_tokens and not shapes.rules


# An operator call takes as long as attention on a generated token, or on a batch of small images.
def _forward_of(kernel: str, q_BtHD: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return the kernel's ``forward``: direct for plain CPU tensors, otherwise as an operator, which a trace needs."""
    if _is_plain(q_BtHD):
        return KERNELS[kernel].forward
    return partial(ops.forward, kernel)


def _backward_of(kernel: str, q_BtHD: Tensor) -> Callable[..., Gradients]:
    """Return the kernel's ``backward``, as ``_forward_of`` does."""
    if _is_plain(q_BtHD):
        return KERNELS[kernel].backward
    return partial(ops.backward, kernel)


def _is_plain(x: Tensor) -> bool:
    # A dispatch mode, such as the audit's capture, looks for the operators.
    return type(x) is Tensor and on_cpu(x) and not is_in_torch_dispatch_mode()


def _forward_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    work: tuple[Work, ...],
    forward: Callable[..., tuple[Tensor, Tensor]],
    scores: ScoreRules,
) -> tuple[Tensor, Tensor]:
    """Return the output in q's dtype, and the log-sum-exp including the sinks."""
    out, lse = forward_work(q, k, v, work, partial(forward, scores=scores))
    if sinks is not None:
        out, lse = apply_sinks(out, lse, sinks)
    # Not ``to``, which would alias the result: PyTorch 2.11's compiler then loses its gradient (180642).
    return as_dtype(out, q.dtype), lse


class _Attention(torch.autograd.Function):
    """Autograd function around a kernel; its work covers all visible keys."""

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
        scores: ScoreRules,
        recompute_cache: RecomputeCache | None,
    ) -> Tensor:
        """Attend, or load the first forward's result; ``bias_table`` is the one in ``scores``, passed for autograd."""
        ctx.work, ctx.kernel, ctx.scores = work, kernel, scores
        # A recomputed layer loads its first forward's result: backward needs it, and no kernel runs again.
        known = None
        if recompute_cache is not None:
            known = recompute_cache.load()
        if known is not None:
            out, lse = known
        else:
            # Backward must read the rounded output, the one that later layers have seen.
            out, lse = _forward_with_sinks(q, k, v, sinks, work, _forward_of(kernel, q), scores)
            if recompute_cache is not None:
                recompute_cache.save(out, lse)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):  # type: ignore[override]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        # The saved log-sum-exp includes the sinks, so the kernel's backward sees final softmax weights.
        backward = partial(_backward_of(ctx.kernel, q), scores=ctx.scores)
        grads = backward_work(dout, q, k, v, out, lse, ctx.work, backward)
        dq, dk, dv = grads.dq_BtHD.to(q.dtype), grads.dk_BsKD.to(k.dtype), grads.dv_BsKV.to(v.dtype)
        bias, dbias_table, dsinks = ctx.scores.relative_bias, None, None
        if bias is not None and grads.dbias_table_NH is not None:
            dbias_table = grads.dbias_table_NH.to(bias.table_NH.dtype)
        # Beside adapters the sinks are frozen, and their gradient would take float32 copies of the output.
        if sinks is not None and ctx.needs_input_grad[4]:
            dsinks = sinks_gradient(dout, out, lse, sinks).to(sinks.dtype)
        return dq, dk, dv, dbias_table, dsinks, None, None, None, None
