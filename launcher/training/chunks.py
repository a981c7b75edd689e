"""``settle_free_chunks``: ``train.chunk_tokens = "auto"`` as the memory that is free at a run's start allows."""

from __future__ import annotations

import dataclasses
import logging

import torch

from launcher.config.sections import RunConfig
from launcher.plan.chunks import settle_chunks
from launcher.plan.estimate import HEADROOM, fits, peak_bytes
from launcher.plan.memory import gib
from launcher.plan.world import World
from launcher.training.planned import hardware_of
from longctx.kernels.memory import available_bytes
from parallel.mesh import Mesh
from parallel.runtime.device import device_name, free_bytes
from parallel.runtime.process import gather_objects, on_rank_0

log = logging.getLogger(__name__)


def settle_free_chunks(config: RunConfig, mesh: Mesh, device: torch.device) -> RunConfig:
    """The config with "auto" settled for the rank that has least memory free; the log says how. Collective.

    Context degree and layout come first. ConfigError where neither whole rows nor chunks go with the other settings.
    """
    if config.train.chunk_tokens != "auto":
        return config
    free = gather_objects((free_bytes(device), available_bytes(with_growth=True) // mesh.ranks_per_node))
    on_device, on_host = (min(of_ranks) for of_ranks in zip(*free, strict=True))

    def settled() -> RunConfig:
        hardware, _ = hardware_of(device_name(device))
        # What a program takes is taken already.
        hardware = dataclasses.replace(hardware, memory_bytes=on_device, host_memory_bytes=on_host, process_bytes=0)
        world = World(ranks=mesh.world_size, ranks_per_node=mesh.ranks_per_node)
        found = settle_chunks(config, lambda one: fits(one, world, hardware, share=1 - HEADROOM))
        log.info(
            "train.chunk_tokens=auto is %d, train.head_groups %d: a rank's peak is %s, and %s are free.",
            found.chunk_tokens,
            found.train.head_groups,
            gib(peak_bytes(found, world, hardware)),
            gib(on_device),
        )
        return found

    return on_rank_0(settled)
