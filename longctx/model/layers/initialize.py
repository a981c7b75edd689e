"""Initial weights as a function of a seed and a tensor's name, so that every process and world size starts equal."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from longctx.config import ModelConfig


def initial_value(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The initial value of the parameter ``name``, float32 on the CPU.

    Norms multiply by 1, biases and sinks are 0; all else is normal with ``config.init_std``. Projections that write to
    the residual stream are smaller by sqrt(2 · layers), which keeps its variance independent of depth (GPT-2).
    """
    if name.endswith("norm.weight"):
        if config.norm_offset:
            return torch.zeros(shape)  # the factor is 1 + weight
        return torch.ones(shape)
    if name.endswith(("bias", "sinks.weight")) or "relative_bias" in name:
        return torch.zeros(shape)
    std = config.init_std
    if "o_proj" in name or "down_proj" in name:
        std /= (2 * config.num_layers) ** 0.5
    # a generator for each tensor: no value depends on which tensors a process holds, or on their order
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator).mul_(std)
