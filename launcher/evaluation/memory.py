"""How many samples are measured together: as many as have memory for their caches, and few enough to lose."""

from __future__ import annotations

import torch

from launcher.evaluation.options import Options
from longctx.config import ModelConfig
from longctx.generation.batch import MAX_SEQUENCES
from longctx.generation.cache_size import cache_bytes
from parallel.mesh import Mesh
from parallel.runtime.device import free_bytes
from parallel.runtime.process import gather_objects

TOGETHER_TOKENS = 131_072
"""Most tokens of the samples that are measured together: a command that is stopped loses them."""


def samples_together(options: Options, model: ModelConfig, mesh: Mesh, device: torch.device, length: int) -> int:
    """Samples of so many tokens that each context group measures together, at least one. Collective."""
    of_one = cache_bytes(
        model, length, getattr(torch, options.dtype), chunk_tokens=options.chunk_tokens, degree=mesh.context
    )
    # Half of what is free: buffers that grow are copied, and a pass over a chunk needs memory of its own.
    fitting = free_bytes(device) // 2 // of_one
    # All ranks take part in each sample, or have as many turns: the one with least memory decides.
    return max(1, min(MAX_SEQUENCES, TOGETHER_TOKENS // length, min(gather_objects(fitting))))
