"""What DeepSpeed holds on a rank, by arithmetic on the shapes of the traced module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from launcher.config.resolved import ResolvedConfig
from launcher.plan.memory import memory_of_rank
from launcher.plan.reduction import Reduction, reduction_bytes
from longctx.model.experts.experts import is_expert_weight
from parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes on the device between two steps, and what comes on top within one."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int
    """Whole weights that ZeRO 3 has at once, at most."""
    reduction: Reduction


def partition_bytes(config: ResolvedConfig, module: nn.Module, mesh: Mesh, device: str = "cuda") -> Held:
    """The bytes of a rank under the config's ZeRO stage, on a ``device`` of this type.

    ``module`` has the shapes of this rank before ZeRO: whole parameters, its own experts alone.
    """
    memory = memory_of_rank(config, config.model.config(), mesh.world_size)
    weights = memory.weights
    whole = sum(p.numel() for p in module.parameters()) * config.dtype.itemsize
    if config.zero.stage != 3:
        # The traced module's own: what a rank holds is what was built here.
        weights = whole
    weights += sum(b.numel() for b in module.buffers()) * config.dtype.itemsize
    parameters = {name: p.shape for name, p in module.named_parameters()}
    experts = {name for name in parameters if mesh.expert > 1 and is_expert_weight(name)}
    gathered = 0
    if config.zero.stage == 3:
        gathered = _gathered(config, parameters, experts, mesh)
    return Held(
        weights=weights - memory.weights_elsewhere,
        gradients=memory.gradients - memory.gradients_elsewhere,
        optimizer=memory.optimizer - memory.optimizer_elsewhere,
        gathered=gathered,
        reduction=reduction_bytes(config, parameters, experts, world_size=mesh.world_size, device=device),
    )


def _block_sizes(parameters: dict[str, torch.Size]) -> dict[str, int]:
    """Values of each block's weights, by the block's name."""
    sizes: dict[str, int] = {}
    for name, shape in parameters.items():
        before, layers, behind = name.partition(".layers.")
        if layers:
            block = before + layers + behind.partition(".")[0]
            sizes[block] = sizes.get(block, 0) + shape.numel()
    return sizes


def _gathered(config: ResolvedConfig, parameters: dict[str, torch.Size], experts: set[str], mesh: Mesh) -> int:
    """Bytes of whole weights in ZeRO 3, at most. A rank's own part of them stays where it is."""
    if mesh.expert == mesh.world_size:
        # Nobody else holds them, so there is nothing to gather.
        parameters = {name: shape for name, shape in parameters.items() if name not in experts}
    sizes = [shape.numel() for shape in parameters.values()]
    live = min(sum(sizes), config.zero.max_live_parameters)
    # What arrives at once lies by ranks, and is copied into parameters.
    arriving = min(sum(sizes), max(config.zero.prefetch_bucket_size, *sizes))
    if config.train.chunk_tokens:
        # By chunks the weights of a block are gathered together.
        largest = max(_block_sizes(parameters).values())
        live, arriving = max(live, largest), max(arriving, largest)
    return (live + arriving) * config.dtype.itemsize
