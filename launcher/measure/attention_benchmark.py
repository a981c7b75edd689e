"""Rates for linear-layer matmuls by shape, and for attention by length, mask and head size, using the layers' own code.

Axes: N tokens, M input and output width; T tokens over all documents, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from launcher.measure.profile_entry import DTYPES, ProfileEntry
from launcher.measure.rank_timer import RankTimer
from launcher.measure.sizes import BenchmarkSizes
from launcher.plan.attention_cost import BACKWARD_FLOPS
from longctx.kernels.attention.kernel_interface import KernelRequest, ScoreRules
from longctx.kernels.attention.kernel_selection import choose_kernel
from longctx.kernels.attention.slices import AttentionSlice, slice_table
from longctx.kernels.matmul import multiply, multiply_backward
from longctx.kernels.processor import MatmulMode, fastest_matmul_mode
from parallel.schedule.bands import area

_TOGETHER = 8
"""Documents, or windows, per call at most."""
_MOST_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Tokens per call, unless one document has more."""


def benchmark_matmuls(timer: RankTimer, sizes: BenchmarkSizes) -> Iterator[ProfileEntry]:
    """Measure FLOPs per second in a linear layer: the forward matmul, and both backward matmuls together."""
    axes = {"tokens": sizes.tokens, "width": sizes.widths}
    forward = ProfileEntry("product_flops", axes, "linear layer, forward matmul")
    backward = ProfileEntry("product_backward_flops", axes, "linear layer, both backward matmuls")
    for dtype, (N, M) in product(DTYPES, product(sizes.tokens, sizes.widths)):
        x_NM, weight_MM, dy_NM = (torch.randn(rows, M, device=timer.device, dtype=dtype) / M**0.5 for rows in (N, M, N))
        matmul_mode: MatmulMode = fastest_matmul_mode()
        # One multiplication and one addition per token and weight.
        flops = 2 * N * M * M
        with torch.no_grad():
            seconds = timer.seconds(lambda: multiply(x_NM, weight_MM, matmul_mode=matmul_mode))  # noqa: B023
            forward.add(dtype, flops / seconds)
            seconds = timer.seconds(
                lambda: multiply_backward(
                    dy_NM,  # noqa: B023
                    x_NM,  # noqa: B023
                    weight_MM,  # noqa: B023
                    needs_x=True,
                    needs_weight=True,
                    matmul_mode=matmul_mode,  # noqa: B023
                )
            )
            backward.add(dtype, 2 * flops / seconds)
    yield forward
    yield backward


def benchmark_attention(timer: RankTimer, sizes: BenchmarkSizes) -> Iterator[ProfileEntry]:
    """Measure attention FLOPs per second, forward and backward, for causal documents, full squares, and sliding
    windows.
    """
    yield from _table(timer, sizes, "", "length", sizes.lengths, "causal attention within documents")
    yield from _table(timer, sizes, "full_", "length", sizes.squares, "attention without a mask")
    yield from _table(timer, sizes, "window_", "window", sizes.windows, "causal sliding-window attention")


def slices_of(kind: str, size: int, tokens: int) -> list[AttentionSlice]:
    """Build a mask over ``tokens``: documents with ``size`` tokens each, or for "window_" one document with this
    window.
    """
    if kind == "window_":
        return [AttentionSlice(0, tokens, 0, tokens, 0, size - 1)]
    lo = None
    # A causal document hides later keys; a ring hop's rectangle has no bounds.
    if kind == "":
        lo = 0
    return [AttentionSlice(start, start + size, start, start + size, lo) for start in range(0, tokens, size)]


def _table(
    timer: RankTimer, sizes: BenchmarkSizes, kind: str, axis: str, points: Sequence[int], description: str
) -> tuple[ProfileEntry, ProfileEntry]:
    axes = {axis: points, "head_dim": sizes.head_dims}
    note = ""
    if timer.device.type == "cuda":
        note = f"; float32 only at {points[0]} and with head_dim {sizes.head_dims[0]}"
    forward = ProfileEntry(f"{kind}attention_flops", axes, f"{description}, forward{note}")
    backward = ProfileEntry(f"{kind}attention_backward_flops", axes, f"{description}, backward{note}")
    for dtype, (size, D) in product(DTYPES, product(points, sizes.head_dims)):
        if timer.device.type == "cuda" and dtype == torch.float32 and forward.values.get("float32"):
            # FlexAttention recompiles for every size: a few minutes, for a dtype that few runs use.
            forward.add(dtype, forward.values["float32"][0])
            backward.add(dtype, backward.values["float32"][0])
            continue
        # Several short documents, as in a real call; with a window, at least half the rows see all of it.
        least = size
        if kind == "window_":
            least = 2 * size
        tokens = min(_TOGETHER * size, max(least, _MOST_TOKENS[timer.device.type]))
        slices = slice_table(slices_of(kind, size, tokens))
        seconds = _seconds(timer, sizes.num_heads, D, tokens, dtype, slices, window=kind == "window_")
        # QK^T and PV each take one multiplication and one addition per unmasked score and channel.
        flops = 4 * sizes.num_heads * D * area(slices.numpy())
        # Masked scores count as no work: a kernel that computes them anyway is slower.
        forward.add(dtype, flops / seconds[0])
        backward.add(dtype, BACKWARD_FLOPS * flops / seconds[1])
    return forward, backward


def _seconds(
    timer: RankTimer, H: int, D: int, T: int, dtype: torch.dtype, slices: Tensor, *, window: bool
) -> tuple[float, float]:
    request = KernelRequest(
        device_type=timer.device.type,
        dtype=dtype,
        head_dim=D,
        num_heads=H,
        num_kv_heads=H,
        window=window,
        matmul_mode=fastest_matmul_mode(),
    )
    kernel, scores = choose_kernel("auto", request), ScoreRules(scale=D**-0.5)
    q, k, v, dout = (torch.randn(1, T, H, D, device=timer.device, dtype=dtype) for _ in range(4))
    with torch.no_grad():
        out, lse = kernel.forward(q, k, v, slices, scores=scores)
        # Same dtype as in a layer: partial results are float32.
        out = out.to(dtype)
        forward = timer.seconds(lambda: kernel.forward(q, k, v, slices, scores=scores))
        backward = timer.seconds(lambda: kernel.backward(dout, q, k, v, out, lse, slices, scores=scores))
    return forward, backward
