"""What an attention layer calls: the mask it is given, the core that computes, the cache that decoding fills.

``LocalAttention`` serves one process. A core that spreads the sequence over processes has the same signature and
lives outside this package; a layer cannot tell which one it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.contract import AttentionKernel, Pair, Scores
from longctx.kernels.select import choose_kernel, kernel_request
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

    @property
    def num_tokens(self) -> int:
        """Length of the whole sequence."""
        return self.cu_seqlens[-1]


class KVCache(Protocol):
    """Keys and values of the tokens already seen, layer by layer, for one sequence that grows."""

    def append(self, layer: int, k_BtKD: Tensor, v_BtKD: Tensor) -> tuple[Tensor, Tensor]:
        """Store new rows; return all rows of the layer so far, [B, s, K, D] each."""
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

    def append(self, layer: int, k_BtKD: Tensor, v_BtKD: Tensor) -> tuple[Tensor, Tensor]:
        start = self._lengths.get(layer, 0)
        stop = start + k_BtKD.shape[1]
        if layer not in self._buffers or self._buffers[layer][0].shape[1] < stop:
            self._grow(layer, k_BtKD, start, stop)
        keys, values = self._buffers[layer]
        keys[:, start:stop], values[:, start:stop] = k_BtKD, v_BtKD
        self._lengths[layer] = stop
        return keys[:, :stop], values[:, :stop]

    def _grow(self, layer: int, like: Tensor, start: int, stop: int) -> None:
        B, _, K, D = like.shape
        fresh = tuple(like.new_zeros(B, max(2 * start, stop, 64), K, D) for _ in range(2))
        if layer in self._buffers:
            for new, old in zip(fresh, self._buffers[layer], strict=True):
                new[:, :start] = old[:, :start]
        self._buffers[layer] = (fresh[0], fresh[1])


class LocalAttention:
    """The core of one process: each document is a causal block for the kernel."""

    def __init__(self, kernel: str = "auto") -> None:
        self.kernel = kernel

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKD: Tensor,
        *,
        mask: AttentionMask,
        layer: int,
        cache: KVCache | None = None,
        scores: Scores | None = None,
        sinks_H: Tensor | None = None,
        stash: Stash | None = None,
    ) -> Tensor:
        if scores is not None or sinks_H is not None or mask.window is not None or mask.sink_tokens:
            raise ConfigError("windows, sinks and score rules are not built yet in one process's core.")
        kernel = choose_kernel(self.kernel, kernel_request(q_BtHD, k_BtKD))
        if cache is not None:
            k_BtKD, v_BtKD = cache.append(layer, k_BtKD, v_BtKD)
            pairs = (_continuation(q_BtHD.shape[1], k_BtKD.shape[1]),)
            return _KernelAttention.apply(q_BtHD, k_BtKD, v_BtKD, pairs, kernel)
        B, T = q_BtHD.shape[:2]
        if mask.num_tokens != B * T:
            raise ValueError(f"{B} rows of {T} tokens are not the {mask.num_tokens} tokens of cu_seqlens")
        flat = [x.reshape(1, B * T, *x.shape[2:]) for x in (q_BtHD, k_BtKD, v_BtKD)]
        return _KernelAttention.apply(*flat, document_pairs(mask), kernel).view(q_BtHD.shape)


def _continuation(num_queries: int, num_keys: int) -> Pair:
    """The newest ``num_queries`` tokens against every key so far: query row i is token i + num_keys − num_queries."""
    return Pair(0, num_queries, 0, num_keys, lo=num_queries - num_keys)


@lru_cache(maxsize=8)
def document_pairs(mask: AttentionMask) -> tuple[Pair, ...]:
    """One pair for each non-empty document of a mask whose whole sequence lies in this process."""
    bounds = zip(mask.cu_seqlens, mask.cu_seqlens[1:], strict=False)
    return tuple(Pair(a, b, a, b, lo=0 if mask.causal else None) for a, b in bounds if b > a)


class _KernelAttention(torch.autograd.Function):
    """Autograd around a kernel whose pairs hold all there is to see."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, pairs: Sequence[Pair], kernel: AttentionKernel) -> Tensor:
        ctx.pairs, ctx.kernel, ctx.scores = pairs, kernel, Scores(scale=q.shape[-1] ** -0.5)
        out, lse = kernel.forward(q, k, v, pairs, scores=ctx.scores)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        grads = ctx.kernel.backward(dout, q, k, v, out, lse, ctx.pairs, scores=ctx.scores)
        return *(g.to(x.dtype) for g, x in zip(grads[:3], (q, k, v), strict=True)), None, None
