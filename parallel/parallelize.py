"""Where a model meets a mesh: one function, in the order that matters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from longctx.objectives.causal_lm import CausalLM
from parallel.attention import ContextParallelAttention
from parallel.linear_attention import ContextParallelLinearAttention, check_linear_layout
from parallel.mesh import Mesh


def build_parallel_model(
    config: ModelConfig,
    mesh: Mesh,
    *,
    layout: str,
    kernel: str = "auto",
    transport: str = "auto",
    wire: torch.dtype | None = None,
    deterministic: bool = False,
    recompute: bool = False,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    seed: int = 0,
) -> CausalLM:
    """The module that ZeRO wraps: a decoder whose attention spans the mesh's context ranks, and its objective.

    Weights depend on ``seed`` and their names alone, so every rank of every mesh starts from the same model.
    ConfigError when the layers cannot have this layout.
    """
    check_layers(config, layout, mesh.ring_degree)
    # 1. attention first: the model is built around its core
    core = ContextParallelAttention(mesh, layout, kernel, transport, wire, deterministic)
    decoder = Decoder(config, core)
    decoder.linear_core = ContextParallelLinearAttention(mesh, layout)
    decoder.initialize(seed)  # 2. then weights, before anything is partitioned
    decoder.recompute = recompute  # 3. recomputation wraps blocks; the core's result is kept: hops are not repeated
    # 4. the objective outermost: one forward, one module
    return CausalLM(decoder, reduce_counts=_context_sum(mesh), z_loss=z_loss, label_smoothing=label_smoothing)


def check_layers(config: ModelConfig, layout: str, ring_degree: int) -> None:
    """ConfigError when a layout does not serve every kind of the model's layers."""
    if "linear" in config.layers:
        check_linear_layout(layout, ring_degree)


def _context_sum(mesh: Mesh):
    """Sums router counts over the ranks that share a sequence."""

    def reduce_counts(counts_LSE: Tensor) -> Tensor:
        if mesh.context_group is not None:
            dist.all_reduce(counts_LSE, group=mesh.context_group)
        return counts_LSE

    return reduce_counts
