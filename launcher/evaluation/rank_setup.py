"""Process group and mesh for commands that compute with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from launcher.cluster.hostfile import check_hostfile
from launcher.evaluation.computation import Computation
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from parallel.comm.process import process_group
from parallel.comm.world import num_ranks
from parallel.mesh import Mesh, check_degrees, closest_value
from parallel.parallelize import check_experts
from parallel.runtime.device import choose_device
from parallel.runtime.launched import environment_rank


@contextmanager
def joined_ranks(options: Computation) -> Iterator[torch.device]:
    """Join the ranks that a launcher started, or continue as a single process, within the ``with`` block.

    Yield the rank's device.
    """
    _, world_size = environment_rank()
    check_hostfile(options.hostfile, world_size)
    device = choose_device(options.device, "--device", context=options.context, expert=options.expert)
    with process_group(timeout_seconds=options.timeout_seconds, device=device):
        yield device


def build_mesh(model: ModelConfig, *, context: int, expert: int) -> Mesh:
    """Build the mesh over all ranks: ``context`` share a prompt (0: all), ``expert`` share the experts. Collective."""
    world_size = num_ranks()
    context = context or world_size
    check_degrees(world_size, context=context, expert=expert)
    check_experts(model, expert, world_size)
    # Ranks that share experts must decode one sequence together.
    if context % expert:
        fits = [degree for degree in range(1, context + 1) if context % degree == 0]
        raise ConfigError(
            f"parallel.expert={expert} does not divide parallel.context={context}: ranks in an expert group decode "
            f"the same prompt.\nTry parallel.expert={closest_value(expert, fits)} (any of {fits})."
        )
    return Mesh.build(context=context, expert=expert)
