"""What an attention layer calls: the mask it is given, the core that computes, the cache that decoding fills.

``LocalAttention`` serves one process. A core that spreads the sequence over processes has the same signature and
lives outside this package; a layer cannot tell which one it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.errors import ConfigError
from longctx.kernels import ops
from longctx.kernels.contract import KernelRequest, Pair, Scores
from longctx.kernels.select import choose_kernel
from longctx.kernels.sinks import apply_sinks, sinks_gradient
from longctx.model.sparse import (
    Piece,
    Strided,
    add_strided_gradients,
    attend_strided_,
    continuation,
    strided_work,
    whole_documents,
)
from longctx.model.stash import Stash


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see: those of its own document, earlier ones alone if ``causal``, near ones if windowed.

    ``cu_seqlens`` are the global boundaries of the (flattened) sequence, also when this process holds only a part.
    """

    cu_seqlens: tuple[int, ...]
    causal: bool = True
    window: int | None = None
    """Tokens a query sees, itself included: keys with 0 ≤ i − j < window (|i − j| < window when not causal)."""
    sink_tokens: int = 0
    """First tokens of a document that its queries see from beyond the window too (arXiv 2309.17453)."""
    stride: int = 0
    """Beyond the window, queries see tokens a multiple of this before them (arXiv 1904.10509); 0 for none."""
    num_tokens: int = field(init=False, compare=False, repr=False)
    """Length of the whole sequence."""
    num_documents: int = field(init=False, compare=False, repr=False)
    """Documents of the sequence, empty ones too."""
    longest: int = field(init=False, compare=False, repr=False)
    """Tokens of the longest document."""
    pair_table: Tensor = field(init=False, compare=False, repr=False)
    """The work of a process that holds the whole sequence: ``document_pairs`` as a tensor.

    Formed here, once, as the counts are, for a compiled layer: numbers it reads in ``cu_seqlens`` are compiled in.
    """

    def __post_init__(self) -> None:
        if self.cu_seqlens[:1] != (0,) or any(b < a for a, b in pairwise(self.cu_seqlens)):
            raise ConfigError(f"cu_seqlens {_shown(self.cu_seqlens)} must start at 0 and never descend.")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1: a query sees itself. None lifts the window.")
        if self.sink_tokens < 0:
            raise ConfigError(f"sink_tokens={self.sink_tokens} must not be negative; 0 has none.")
        self._check_stride()
        object.__setattr__(self, "num_tokens", self.cu_seqlens[-1])
        object.__setattr__(self, "num_documents", len(self.cu_seqlens) - 1)
        object.__setattr__(self, "longest", max((b - a for a, b in pairwise(self.cu_seqlens)), default=0))
        object.__setattr__(self, "pair_table", ops.pair_table(document_pairs(self)))

    @cached_property
    def strided(self) -> Strided | None:
        """The rest of that work: what the stride lets queries see before their windows.

        Formed when it is first asked for, which should not be in a compiled layer; ranks that hold a part of the
        sequence have no use for it.
        """
        return _strided(self, whole_documents(self.cu_seqlens))

    def _check_stride(self) -> None:
        if self.stride < 0:
            raise ConfigError(f"stride={self.stride} must not be negative; 0 has none.")
        if self.stride and (self.window is None or self.sink_tokens or not self.causal):
            raise ConfigError(
                f"stride={self.stride} needs a window and goes with neither sink tokens nor bidirectional attention; "
                f"got window={self.window}, sink_tokens={self.sink_tokens}, causal={self.causal}."
            )


def _shown(cu_seqlens: tuple[int, ...]) -> str:
    """The boundaries around the first that is out of order."""
    wrong = next((i for i, (a, b) in enumerate(pairwise(cu_seqlens)) if b < a), 0)
    return f"[… {', '.join(map(str, cu_seqlens[wrong : wrong + 2]))} …]"


class KVCache(Protocol):
    """Keys and values of the tokens already seen, layer by layer, for one sequence that grows."""

    def append(self, layer: int, k_BtKD: Tensor, v_BtKV: Tensor) -> tuple[Tensor, Tensor]:
        """Store new rows; return all rows of the layer so far, [B, s, K, D] and [B, s, K, V]."""
        ...

    def add_state(self, layer: int, state_sBKDW: Tensor) -> None:
        """Add to what a linear layer knows of the tokens so far."""
        ...

    def state(self, layer: int) -> Tensor | None:
        """The sum of what was added, None before anything was."""
        ...


class AttentionCore(Protocol):
    """Exact softmax attention of this process's queries over every key of the sequence that the mask lets them see."""

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
        stash: Stash | None = None,
    ) -> Tensor:
        """Output [B, t, H, V] in q's dtype.

        ``scores`` default to the dot product scaled by D^-½. ``sinks_H`` are learnable logits, one a query head, of a
        key without value that every query sees (GPT-OSS). A ``stash`` keeps the result of a layer that backward will
        recompute, so that the core's work and communication are not done again.
        """
        ...


class LocalKVCache:
    """All keys and values in this process's memory, in buffers that double when they are full."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self._states: dict[int, Tensor] = {}

    def append(self, layer: int, k_BtKD: Tensor, v_BtKV: Tensor) -> tuple[Tensor, Tensor]:
        start = self._lengths.get(layer, 0)
        stop = start + k_BtKD.shape[1]
        if layer not in self._buffers or self._buffers[layer][0].shape[1] < stop:
            self._grow(layer, (k_BtKD, v_BtKV), start, stop)
        keys, values = self._buffers[layer]
        keys[:, start:stop], values[:, start:stop] = k_BtKD, v_BtKV
        self._lengths[layer] = stop
        return keys[:, :stop], values[:, :stop]

    def add_state(self, layer: int, state_sBKDW: Tensor) -> None:
        known = self._states.get(layer)
        self._states[layer] = state_sBKDW if known is None else known + state_sBKDW

    def state(self, layer: int) -> Tensor | None:
        return self._states.get(layer)

    def _grow(self, layer: int, like: tuple[Tensor, Tensor], start: int, stop: int) -> None:
        rows = max(2 * start, stop, 64)
        keys, values = (x.new_zeros(x.shape[0], rows, *x.shape[2:]) for x in like)
        if layer in self._buffers:
            for new, old in zip((keys, values), self._buffers[layer], strict=True):
                new[:, :start] = old[:, :start]
        self._buffers[layer] = (keys, values)


class LocalAttention:
    """The core of one process, which holds every key: its documents are the kernel's pairs."""

    is_operator = True
    """Its work is one operator: ``torch.compile`` need not leave its graph for it."""

    def __init__(self, kernel: str = "auto") -> None:
        self.kernel = kernel

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
        stash: Stash | None = None,
    ) -> Tensor:
        B, T, H, D = q_BtHD.shape
        if sinks_H is not None and sinks_H.shape != (H,):
            raise ConfigError(
                f"sinks_H has shape {tuple(sinks_H.shape)}; it needs one logit for each of {H} query heads."
            )
        scores = scores or Scores(scale=D**-0.5)
        K, V = v_BtKV.shape[2:]
        device, windowed = q_BtHD.device.type, mask.window is not None
        kernel = _kernel_for(self.kernel, device, q_BtHD.dtype, (D, H, K, V), windowed, *_wishes(scores))
        if cache is not None:
            k_BtKD, v_BtKV = cache.append(layer, k_BtKD, v_BtKV)
            table, strided = _continuation_work(mask, T, k_BtKD.shape[1])
        elif mask.num_tokens != B * T:
            raise ValueError(f"{B} rows of {T} tokens are not the {mask.num_tokens} tokens of cu_seqlens")
        else:
            table, strided = mask.pair_table, mask.strided if mask.stride else None
            q_BtHD, k_BtKD, v_BtKV = (x.reshape(1, B * T, *x.shape[2:]) for x in (q_BtHD, k_BtKD, v_BtKV))
        bias_table = None if scores.relative_bias is None else scores.relative_bias.table_NH
        out = _Attention.apply(q_BtHD, k_BtKD, v_BtKV, bias_table, sinks_H, table, strided, kernel, scores, stash)
        return out.view(B, T, H, V)


def document_pairs(mask: AttentionMask) -> tuple[Pair, ...]:
    """The pairs of every non-empty document of a mask whose whole sequence lies in this process."""
    return tuple(pair for a, b in pairwise(mask.cu_seqlens) for pair in _visible(a, b, mask))


def continuation_pairs(mask: AttentionMask, num_queries: int, num_keys: int) -> tuple[Pair, ...]:
    """The newest ``num_queries`` tokens of one document against all of its ``num_keys``, under the mask's rules."""
    before = num_keys - num_queries
    newest = (p._replace(q_start=max(p.q_start, before)) for p in _visible(0, num_keys, mask))
    return tuple(p.shifted(queries=-before) for p in newest if p.q_start < p.q_stop)


@torch.compiler.disable(reason="a cache grows: a graph that read its length would serve one token")
def _continuation_work(mask: AttentionMask, num_queries: int, num_keys: int) -> tuple[Tensor, Strided | None]:
    table = ops.pair_table(continuation_pairs(mask, num_queries, num_keys))
    return table, _strided(mask, continuation(num_queries, num_keys))


def _strided(mask: AttentionMask, pieces: list[Piece]) -> Strided | None:
    """What the stride adds to these pieces' windows, as operators take it."""
    if not mask.stride or mask.window is None:
        return None
    work = strided_work(pieces, mask.window, mask.stride)
    return None if work is None else work._replace(pairs=ops.pair_table(work.pairs))


def _visible(start: int, stop: int, mask: AttentionMask) -> Iterator[Pair]:
    """What the queries of a document at rows [start, stop) see: the band of the window, then sink tokens beyond it."""
    if stop <= start:
        return
    window = mask.window
    if window is None or window >= stop - start:  # the window is wider than the document
        yield Pair(start, stop, start, stop, lo=0 if mask.causal else None)
        return
    yield Pair(start, stop, start, stop, lo=0 if mask.causal else 1 - window, hi=window - 1)
    sinks = min(start + mask.sink_tokens, stop)
    if mask.sink_tokens:
        yield Pair(start + window, stop, start, sinks, lo=window)
    if sinks > start + window and not mask.causal:  # sink tokens further ahead than the window reaches
        yield Pair(start, sinks - window, start + window, sinks, hi=-window)


def _wishes(scores: Scores) -> tuple[bool, bool, bool]:
    return scores.softcap is not None, scores.alibi_slopes_H is not None, scores.relative_bias is not None


@torch.compiler.assume_constant_result
def _kernel_for(
    name: str,
    device_type: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    window: bool,
    softcap: bool,
    alibi: bool,
    relative_bias: bool,
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
        softcap=softcap,
        alibi=alibi,
        relative_bias=relative_bias,
    )
    return choose_kernel(name, request).name


class _Attention(torch.autograd.Function):
    """Autograd around a kernel whose pairs hold all there is to see."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias_table: Tensor | None,
        sinks: Tensor | None,
        pairs: Tensor,
        strided: Strided | None,
        kernel: str,
        scores: Scores,
        stash: Stash | None,
    ) -> Tensor:
        """``bias_table`` is the one in ``scores``, named here for autograd."""
        ctx.pairs, ctx.strided, ctx.kernel, ctx.scores = pairs, strided, kernel, scores
        known = None if stash is None else stash.recall()
        if known is None:
            forward = partial(ops.forward, kernel, scores=scores)
            out, lse = forward(q, k, v, pairs)
            if strided is not None:
                attend_strided_(out, lse, q, k, v, strided, forward)
            if sinks is not None:
                out, lse = apply_sinks(out, lse, sinks)
            out = out.to(q.dtype)
            if stash is not None:
                stash.keep(out, lse)
        else:
            out, lse = known
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):  # type: ignore[override]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        backward = partial(ops.backward, ctx.kernel, scores=ctx.scores)
        grads = backward(dout, q, k, v, out, lse, ctx.pairs)
        if ctx.strided is not None:
            grads = add_strided_gradients(grads, (dout, q, out, lse), k, v, ctx.strided, backward)
        dq, dk, dv = (g.to(x.dtype) for g, x in zip(grads[:3], (q, k, v), strict=True))
        bias, dtable = ctx.scores.relative_bias, grads.dtable_NH
        dtable = None if bias is None or dtable is None else dtable.to(bias.table_NH.dtype)
        dsinks = None if sinks is None else sinks_gradient(dout, out, lse, sinks).to(sinks.dtype)
        return dq, dk, dv, dtable, dsinks, None, None, None, None, None
