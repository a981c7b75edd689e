"""The copy of a checkpoint in the machine's memory, from which a thread writes it while training goes on."""

from __future__ import annotations

from launcher.config.resolved import ResolvedConfig
from launcher.plan.parameters import build_shapes
from launcher.plan.world import World
from longctx.model.experts.experts import is_expert_weight

_VALUE_BYTES = 12
"""Of a parameter's value: a master and two moments, each float32."""


def copies_checkpoints(config: ResolvedConfig, step: int) -> bool:
    """Whether a run that stands at ``step`` copies what it saves, to go on meanwhile."""
    every = config.checkpoint.every_steps
    # What is on a disk is there because the memory has no room for it.
    if config.checkpoint.wait or not every or config.zero.offload == "nvme":
        return False
    # The checkpoint of the last step is waited for in any case.
    return (step // every + 1) * every < config.last_step


def copy_bytes(config: ResolvedConfig, world: World) -> int:
    """Bytes of the rank that copies most; 0 where none does. ``config`` has its stage settled.

    They are no part of what has to fit: a run without this memory waits for its saves.
    """
    if not copies_checkpoints(config, 0):
        return 0
    shapes = {name: p.numel() for name, p in build_shapes(config).named_parameters()}
    # Of routed experts a rank has its own, which so many ranks hold; everything else is on all.
    expert = {name: config.parallel.expert if is_expert_weight(name) else 1 for name in shapes}
    if config.zero.stage:
        return _VALUE_BYTES * sum(-(-numel * expert[name] // world.ranks) for name, numel in shapes.items())
    owned = [0] * world.ranks
    for index, (name, numel) in enumerate(shapes.items()):
        # Whole tensors, dealt out in turns among those that hold the same.
        turn = index % (world.ranks // expert[name])
        for rank in range(turn * expert[name], (turn + 1) * expert[name]):
            owned[rank] += numel
    return _VALUE_BYTES * max(owned)
