"""Rates for all work except matmuls and attention: sums, copies, norms, rotation, activations, routing, the loss.

Axes: N tokens, M width, F inner FFN width, V vocabulary, H heads, D head size, C channel pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from launcher.measure.profile_entry import DTYPES, ProfileEntry
from launcher.measure.rank_timer import RankTimer
from launcher.measure.sizes import BenchmarkSizes
from longctx.config import ModelConfig
from longctx.kernels.cross_entropy import losses_
from longctx.kernels.loss_options import PLAIN
from longctx.kernels.rms_norm import rms_norm
from longctx.model.experts.moe_layer import MixtureOfExperts, MoECall
from longctx.model.layers.mlp import gated, gated_backward
from longctx.model.rotary import apply_rotary

_WIDTH, _HEAD_DIM, _EXPERTS, _CHOSEN = 512, 64, 8, 2
_FLOAT32, _SAMPLED_ROWS = 4, 256

Pass = Callable[[RankTimer, int, torch.dtype], tuple[float, ...]]
"""Return seconds for forward, and for backward if there is one, on tensors with this many values."""


def benchmark_elementwise(timer: RankTimer, sizes: BenchmarkSizes) -> Iterator[ProfileEntry]:
    """Measure bytes per second for each kind of work, counting bytes as ``launcher/plan/compute_cost.py`` does."""
    yield from _table(timer, sizes, ("memory_bandwidth",), (3,), _sums, "sums of two tensors")
    yield from _table(timer, sizes, ("copy_bandwidth",), (2,), _copies, "copies to the other dtype")
    yield from _table(timer, sizes, ("norm_bandwidth", "norm_backward_bandwidth"), (2, 4), _norms, "RMSNorm")
    yield from _table(timer, sizes, ("rotary_bandwidth",), (2,), _rotations, "rotary positions")
    names = ("activation_bandwidth", "activation_backward_bandwidth")
    yield from _table(timer, sizes, names, (3, 6), _activations, "gated activation")
    names = ("routing_bandwidth", "routing_backward_bandwidth")
    yield from _table(timer, sizes, names, (4, 8), _routing, "routing, and copying tokens to local experts and back")
    # The loss is computed in cache-sized row ranges for any number of tokens, so there is one rate.
    loss = ProfileEntry("loss_bandwidth", {}, "logits to losses and gradients")
    N, V = sizes.logits
    for dtype in DTYPES:
        logits_NV = torch.randn(N, V, device=timer.device, dtype=dtype)
        targets_N = torch.zeros(N, device=timer.device, dtype=torch.int64)
        seconds = timer.seconds(lambda: losses_(logits_NV, targets_N, PLAIN, with_gradient=True))  # noqa: B023
        loss.add(dtype, 5 * _FLOAT32 * N * V / seconds)
    yield loss


def _table(
    timer: RankTimer,
    sizes: BenchmarkSizes,
    names: tuple[str, ...],
    passes: tuple[int, ...],
    of_pass: Pass,
    description: str,
) -> Iterator[ProfileEntry]:
    pass_names = ("forward", "backward") if len(names) > 1 else ("both ways",)
    axes = {"bytes": sizes.tensor_bytes}
    entries = [ProfileEntry(name, axes, f"{description}, {way}") for name, way in zip(names, pass_names, strict=True)]
    for dtype in DTYPES:
        for num_bytes in sizes.tensor_bytes:
            seconds = of_pass(timer, num_bytes // dtype.itemsize, dtype)
            for entry, times, pass_seconds in zip(entries, passes, seconds, strict=True):
                entry.add(dtype, times * num_bytes / pass_seconds)
    yield from entries


def _random(timer: RankTimer, num_values: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return repeated random values: sampling every value in a large tensor would take longer than the measurement."""
    rows = max(1, num_values // width)
    few = torch.randn(min(rows, _SAMPLED_ROWS), width, device=timer.device)
    return few.to(dtype).repeat(-(-rows // len(few)), 1)[:rows].contiguous()


def _sums(timer: RankTimer, num_values: int, dtype: torch.dtype) -> tuple[float, ...]:
    x_NM, y_NM = (_random(timer, num_values, _WIDTH, dtype) for _ in range(2))
    return (timer.seconds(lambda: x_NM + y_NM),)


def _copies(timer: RankTimer, num_values: int, dtype: torch.dtype) -> tuple[float, ...]:
    other = torch.bfloat16
    if dtype == torch.bfloat16:
        other = torch.float32
    x_NM = _random(timer, num_values, _WIDTH, dtype)
    return (timer.seconds(lambda: x_NM.to(other)),)


def _norms(timer: RankTimer, num_values: int, dtype: torch.dtype) -> tuple[float, ...]:
    x_NM = _random(timer, num_values, _WIDTH, dtype).requires_grad_()
    weight_M = torch.ones(_WIDTH, device=timer.device, dtype=dtype).requires_grad_()
    return _forward_backward(timer, lambda: rms_norm(x_NM, weight_M, 1e-5), (x_NM, weight_M))


def _rotations(timer: RankTimer, num_values: int, dtype: torch.dtype) -> tuple[float, ...]:
    x_BtHD = _random(timer, num_values, _WIDTH, dtype).view(1, -1, _WIDTH // _HEAD_DIM, _HEAD_DIM)
    cos, sin = (torch.randn(1, x_BtHD.shape[1], 1, _HEAD_DIM // 2, device=timer.device) for _ in range(2))
    with torch.no_grad():
        return (timer.seconds(lambda: apply_rotary(x_BtHD, cos, sin)),)


def _activations(timer: RankTimer, num_values: int, dtype: torch.dtype) -> tuple[float, ...]:
    gate_NF, up_NF, dout_NF = (_random(timer, num_values, _WIDTH, dtype) for _ in range(3))

    def backward() -> None:
        # Same work as ``GatedLinear`` around its matmuls: recompute the inner values, then both gradients.
        gated("swiglu", gate_NF, up_NF)
        gated_backward("swiglu", dout_NF, gate_NF, up_NF)

    return timer.seconds(lambda: gated("swiglu", gate_NF, up_NF)), timer.seconds(backward)


def _routing(timer: RankTimer, num_values: int, dtype: torch.dtype) -> tuple[float, ...]:
    """Time a layer with negligible experts, two channels wide, so that routing dominates."""
    config = ModelConfig(
        hidden_size=_WIDTH,
        num_heads=_WIDTH // _HEAD_DIM,
        num_kv_heads=_WIDTH // _HEAD_DIM,
        head_dim=_HEAD_DIM,
        ffn_size=_WIDTH,
        num_experts=_EXPERTS,
        experts_per_token=_CHOSEN,
        expert_ffn_size=2,
        shared_ffn_size=0,
    )
    layer = MixtureOfExperts(config).to(device=timer.device, dtype=dtype)
    # The layer does not initialize its parameters; a zero router would send all tokens to the same experts.
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.02)
    x_BtM = _random(timer, num_values // _CHOSEN, _WIDTH, dtype)[None].requires_grad_()
    call = MoECall(documents_Bt=torch.zeros(x_BtM.shape[:2], device=timer.device, dtype=torch.int64), num_documents=1)
    return _forward_backward(timer, lambda: layer(x_BtM, call)[0], (x_BtM, *layer.parameters()))


def _forward_backward(timer: RankTimer, forward: Callable[[], Tensor], inputs: tuple[Any, ...]) -> tuple[float, float]:
    """Time a function, and separately its gradient."""
    # Build a graph, as in training: the function also writes the activations saved for backward.
    of_forward = timer.seconds(forward)
    out = forward()
    dout = torch.randn_like(out)
    return of_forward, timer.seconds(
        lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True, allow_unused=True)
    )
