"""Muon's cost beyond AdamW's update: orthogonalization matmuls, and the transfer to one rank and back.

The matrices come from the optimizer's own code (``parallel/zero/zero_muon.py``), on the meta device. Ranks in a ZeRO
group do equal work.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from launcher.config.resolved import ResolvedConfig
from launcher.plan.hardware import Hardware
from launcher.plan.parameters import build_shapes
from launcher.plan.planned_world import World
from longctx.model.experts.experts import is_expert_weight
from parallel.zero.zero_muon import STEPS, Matrices, matrices_of

_FLOAT32 = 4


def num_orthogonal(config: ResolvedConfig) -> int:
    """Return how many values Muon updates in a rank's matrices, before ZeRO."""
    return sum(matrices.number * matrices.size for matrices in matrices_of(build_shapes(config)).values())


def muon_seconds(config: ResolvedConfig, world: World, hardware: Hardware) -> float:
    """Return a rank's matmul and message seconds per update."""
    seconds = 0.0
    for matrices, ranks in _matrices(config, world):
        rows, columns = sorted((matrices.rows, matrices.columns))
        # X·Xᵀ, its square, and the polynomial's product with X.
        flops = STEPS * (4.0 * rows * rows * columns + 2.0 * rows**3)
        rate = hardware.product_flops.at(config.train.dtype, tokens=rows, width=sqrt(rows * columns))
        seconds += matrices.number * flops / rate / ranks
        # With fewer matrices than ranks, each matrix is split over several ranks and must be transferred.
        if matrices.number < ranks:
            sent = 2.0 * _FLOAT32 * matrices.number * matrices.size / ranks
            bandwidth = hardware.node_bandwidth if ranks <= world.ranks_per_node else hardware.network_bandwidth
            seconds += sent / bandwidth.at(bytes=sent)
    return seconds


def _matrices(config: ResolvedConfig, world: World) -> Iterator[tuple[Matrices, int]]:
    """Yield a rank's matrices by parameter, with the number of ranks that share their update."""
    for name, matrices in matrices_of(build_shapes(config)).items():
        ranks = world.ranks
        if is_expert_weight(name):
            ranks //= config.parallel.expert
        # Without ZeRO every rank updates all its matrices.
        yield matrices, ranks if config.zero.stage else 1
