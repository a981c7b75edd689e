"""Interface between single-device attention kernels and their callers: requests, inputs and results.

Axes: B batch, t query rows and s key rows on this device, H query heads, K key/value heads, D query/key head size, V
value head size, N buckets of a bias table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype, as_dtype
from longctx.kernels.merge import merge_ as merge_
from longctx.kernels.processor import MatmulMode

RULES = {"softcap": "soft cap", "alibi": "ALiBi", "relative_bias": "learned bias"}
"""Score rules beyond the scaled dot product, each with its display name."""


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A learned bias per head and distance bucket (T5, arXiv 1910.10683 §2.1 and its code).

    With n buckets per direction, distances below n/2 have a bucket each; larger ones share buckets that widen
    logarithmically up to ``max_distance``, and anything beyond uses the last bucket. A bidirectional table reserves
    half its buckets for keys after the query; otherwise such keys count as distance 0.
    """

    table_NH: Tensor
    max_distance: int = 128
    bidirectional: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreRules:
    """Score parameters: ``cap·tanh(q·k·scale / cap) − slope·|distance| + bias(distance)``.

    The soft cap comes first and the biases after it, as in flash-attn. Distances are in tokens.
    """

    scale: float
    """Scale factor on the dot product; usually D^-½."""
    softcap: float | None = None
    """Bound on the scaled dot product's magnitude (Gemma 2); None for no cap."""
    alibi_slopes_H: Tensor | None = None
    """Each query head's float32 ALiBi slope (arXiv 2108.12409); positive slopes favour near keys. No gradient."""
    relative_bias: RelativeBias | None = None
    """Learned distance bias; its table receives a gradient."""

    @property
    def needs_relative_positions(self) -> bool:
        """True if scores depend on the two tokens' positions."""
        return self.alibi_slopes_H is not None or self.relative_bias is not None

    @property
    def rules(self) -> tuple[str, ...]:
        """Active rules beyond the scaled dot product, keys of ``RULES``."""
        values = (self.softcap, self.alibi_slopes_H, self.relative_bias)
        return tuple(rule for rule, value in zip(RULES, values, strict=True) if value is not None)

    def table_gradient(self, dtype: torch.dtype) -> Tensor | None:
        """Return a zero accumulator for the bias table's gradient, if there is a table."""
        if self.relative_bias is None:
            return None
        return torch.zeros_like(self.relative_bias.table_NH, dtype=dtype)

    def of_heads(self, start: int, stop: int) -> ScoreRules:
        """Restrict per-head parameters to query heads [start, stop)."""
        slopes, bias = self.alibi_slopes_H, self.relative_bias
        if slopes is not None:
            slopes = slopes[start:stop]
        if bias is not None:
            bias = replace(bias, table_NH=bias.table_NH[:, start:stop])
        return replace(self, alibi_slopes_H=slopes, relative_bias=bias)


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """Properties that a kernel must support for a call, known before any tensor exists."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    value_dim: int | None = None
    """Value head size if it differs from ``head_dim``."""
    window: bool = False
    """Whether slices may have an upper bound ``hi``."""
    rules: tuple[str, ...] = ()
    """Active score rules, keys of ``RULES``."""
    deterministic: bool = False
    """Whether the backward pass must be bitwise reproducible."""
    matmul_mode: MatmulMode | None = None
    """How a CPU multiplies bfloat16; None leaves it to the kernel."""

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        if self.value_dim not in (None, self.head_dim):
            heads += f" (values {self.value_dim})"
        dtype = str(self.dtype).removeprefix("torch.")
        parts = [heads, dtype, f"on {self.device_type}"]
        parts += [name for name in ("window", "deterministic") if getattr(self, name)]
        return ", ".join(parts + [RULES[rule] for rule in self.rules])


class Gradients(NamedTuple):
    """A kernel's gradients: partial results, or the inputs' dtype if the kernel has already rounded them."""

    dq_BtHD: Tensor
    dk_BsKD: Tensor
    dv_BsKV: Tensor
    dbias_table_NH: Tensor | None = None
    """Gradient for the relative bias table, if there is one."""

    def widened(self) -> Gradients:
        """Convert to ``accumulate_dtype``, so that further gradients can be added."""
        dq, dk, dv = (as_dtype(x, accumulate_dtype(x.dtype)) for x in self[:3])
        return Gradients(dq, dk, dv, self.dbias_table_NH)


class AttentionKernel(Protocol):
    """Softmax attention and its gradient over the slices on one device.

    ``slices`` is a table (``slices.slice_table``). Several slices may contain the same query row, over disjoint keys;
    the kernel merges them. Results are *partial results*: new tensors that the caller owns, in ``accumulate_dtype``
    (float32; float64 for float64 inputs), mergeable across hops without rounding.
    """

    # Log-sum-exps are float64: over 8192 keys one is about 9, float32 rounds that to 5e-7, and every gradient in the
    # row inherits the error.
    name: str

    def supports(self, request: KernelRequest) -> str | None:
        """Return None if the kernel can serve the request, else the reason why not."""
        ...

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, slices: Tensor, *, scores: ScoreRules
    ) -> tuple[Tensor, Tensor]:
        """Return output [B, t, H, V] and natural log-sum-exp [B, t, H] (float64); 0 and −inf on rows without a key."""
        ...

    def backward(
        self,
        dout_BtHV: Tensor,
        q_BtHD: Tensor,
        k_BsKD: Tensor,
        v_BsKV: Tensor,
        out_BtHV: Tensor,
        lse_BtH: Tensor,
        slices: Tensor,
        *,
        scores: ScoreRules,
    ) -> Gradients:
        """Return the gradients for these slices alone, given each query row's *global* output and log-sum-exp.

        Summed over all keys and ranks, they equal the exact gradient. ``lse`` may exceed the log-sum-exp over the keys
        (a learnable sink takes a share), and is −inf on rows without any visible key.
        """
        ...
