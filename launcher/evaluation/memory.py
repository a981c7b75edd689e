"""How many prompts are under way together: as many as have memory for their caches."""

from __future__ import annotations

import torch

from longctx.config import ModelConfig
from longctx.generation.cache_size import cache_bytes
from parallel.comm.world import gather_objects
from parallel.mesh import Mesh
from parallel.runtime.device import free_bytes


def fitting_together(
    model: ModelConfig,
    mesh: Mesh,
    device: torch.device,
    num_tokens: int,
    *,
    dtype: torch.dtype,
    chunk_tokens: int,
    most: int,
) -> int:
    """How many sequences of so many tokens have memory on every rank: at most ``most``, at least one. Collective."""
    of_one = cache_bytes(model, num_tokens, dtype, chunk_tokens=chunk_tokens, degree=mesh.context)
    # Half of what is free: buffers that grow are copied, and a pass over a chunk needs memory of its own.
    fitting = free_bytes(device) // 2 // of_one
    # Ranks that share sequences must have as many under way: the one with least memory decides.
    return max(1, min(most, min(gather_objects(fitting))))
