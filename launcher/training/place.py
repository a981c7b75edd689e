"""The place of a run: its folder, log and devices, checked before anything is opened or built."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from launcher.config.resolved import ResolvedConfig
from launcher.config.zero import zero_options
from launcher.metrics.trackers.thread import check_trackers
from launcher.plan.memory import check_memory
from launcher.run_folder import LOGS, hold_folder, prepare_folder, start_logging
from launcher.training.swap_folder import check_swap_folders
from longctx.config import ModelConfig
from parallel.comm.world import on_every_rank, on_rank_0
from parallel.mesh import Mesh
from parallel.zero.cpu_adam import compile_cpu_adam
from parallel.zero.options import check_device

log = logging.getLogger(__name__)


def prepare_place(config: ResolvedConfig, model: ModelConfig, mesh: Mesh, device: torch.device) -> Path:
    """Check memory, folders, disks and packages, hold the run's folder and begin the ranks' logs. Collective.

    Returns the folder. ConfigError on every rank for what cannot be had.
    """
    check_device(zero_options(config.zero), device.type)
    on_every_rank(lambda: check_memory(config, model, mesh.world_size, mesh.ranks_per_node, device))
    folder = on_every_rank(lambda: prepare_folder(config))
    on_rank_0(lambda: hold_folder(folder))
    start_logging(folder, mesh.rank)
    log.info("Every rank's log: %s/rank_N.log", folder / LOGS)
    on_every_rank(lambda: check_swap_folders(config, model, mesh.world_size, mesh.ranks_per_node))
    on_rank_0(lambda: check_trackers(config.run.trackers))
    if config.zero.offload != "none":
        on_every_rank(compile_cpu_adam)
    return folder
