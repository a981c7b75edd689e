"""What DeepSpeed holds on a rank, by arithmetic on the shapes of the traced module."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.sections import RunConfig
from launcher.training.memory import memory_of_rank
from longctx.objectives.causal_lm import CausalLM
from parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes between two steps, and what ZeRO 3 gathers on top within one."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int


def partition_bytes(config: RunConfig, module: CausalLM, mesh: Mesh) -> Held:
    """The bytes of a rank under the config's ZeRO stage."""
    memory = memory_of_rank(config, config.model.config(), mesh.world_size)
    weights, gathered = memory.weights, 0
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    if config.zero_stage == 3:
        gathered = min(whole - weights, config.zero.max_live_parameters * config.dtype.itemsize)
    else:
        # The traced module's own: what a rank holds is what was built here.
        weights = whole
    weights += sum(b.numel() * b.element_size() for b in module.buffers())
    return Held(weights=weights, gradients=memory.gradients, optimizer=memory.optimizer, gathered=max(0, gathered))
