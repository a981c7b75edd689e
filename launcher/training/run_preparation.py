"""A run's folder, log and devices, checked before anything is opened or built."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import torch

from launcher.config.resolved import ResolvedConfig
from launcher.config.zero_section import zero_options
from launcher.metrics.trackers.tracker_threads import check_trackers
from launcher.plan.memory_estimate import check_memory, gib, memory_of_rank
from launcher.run_folder import hold_folder, prepare_folder, start_logging
from launcher.wording import format_count
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.swap_file import SwapFile
from parallel.comm.world import on_every_rank, on_rank_0
from parallel.mesh import Mesh
from parallel.zero.cpu_adam import compile_cpu_adam
from parallel.zero.zero_options import check_device

log = logging.getLogger(__name__)


def prepare_run(config: ResolvedConfig, model: ModelConfig, mesh: Mesh, device: torch.device) -> Path:
    """Check memory, folders, disks and packages, lock the run's folder and start the ranks' logs. Collective.

    Return the folder. Raise ConfigError on every rank if a check fails.
    """
    check_device(zero_options(config.zero), device.type)
    on_every_rank(lambda: check_memory(config, model, mesh.world_size, mesh.ranks_per_node, device))
    folder = on_every_rank(lambda: prepare_folder(config))
    # Lock before logging: a second run in this folder must not write to the first one's logs.
    on_rank_0(lambda: hold_folder(folder))
    start_logging(folder, mesh.rank)
    on_every_rank(lambda: check_swap_folders(config, model, mesh.world_size, mesh.ranks_per_node))
    on_rank_0(lambda: check_trackers(config.run.trackers))
    # Compile now, so that a missing compiler is reported before the model is built.
    if config.zero.offload != "none":
        on_every_rank(compile_cpu_adam)
    return folder


def check_swap_folders(config: ResolvedConfig, model: ModelConfig, world_size: int, local_ranks: int) -> None:
    """Raise ConfigError unless ``zero.nvme_path`` and ``train.store_path`` are writable, with room for this machine's
    ranks.

    Returns early if the run does not swap. Logs the number of bytes.
    """
    need = memory_of_rank(config, model, world_size)
    if config.zero.nvme_path:
        _check(config, "zero.nvme_path", config.zero.nvme_path, need.disk, local_ranks)
    if config.train.store_path:
        _check(config, "train.store_path", config.train.store_path, need.kept_on_disk, local_ranks)


def _check(config: ResolvedConfig, key: str, path: str, need: int, local_ranks: int) -> None:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        is_direct = SwapFile(Path(path)).is_direct
        free = shutil.disk_usage(path).free
    except (OSError, ValueError) as error:
        # A null character in the name raises ValueError.
        raise ConfigError(
            f"{key}={path!r} cannot be written: {error}.\nChoose a writable folder, on a local disk with free space."
        ) from error
    needed = local_ranks * need
    if config.run.memory_check and needed > free:
        raise ConfigError(
            f"{key}={path!r} has {gib(free)} free, and {format_count(local_ranks, 'rank')} on this machine will swap "
            f"{gib(needed)} to it, {gib(need)} each.\nChoose a larger disk, or more machines, which lowers the need "
            "per rank. --run.memory_check false starts anyway."
        )
    how = "with direct I/O"
    if not is_direct:
        how = "through the page cache, because this file system has no direct I/O"
    log.info(
        "Swapping up to %s to %s, for %s here, %s; %s are free.",
        gib(needed),
        path,
        format_count(local_ranks, "rank"),
        how,
        gib(free),
    )
