"""The folders that a run swaps to: made, written to, compared with what will lie there, before anything is built."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from launcher.config.resolved import ResolvedConfig
from launcher.plan.memory import gib, memory_of_rank
from launcher.wording import plural
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.swap_file import SwapFile

log = logging.getLogger(__name__)


def check_swap_folders(config: ResolvedConfig, model: ModelConfig, world_size: int, ranks_here: int) -> None:
    """ConfigError unless ``zero.nvme_path`` and ``train.store_path`` can be written and have room for this machine's
    ranks.

    Nothing happens where the run swaps nothing. The log says how much it will be.
    """
    need = memory_of_rank(config, model, world_size)
    if config.zero.nvme_path:
        _check(config, "zero.nvme_path", config.zero.nvme_path, need.disk, ranks_here)
    if config.train.store_path:
        _check(config, "train.store_path", config.train.store_path, need.kept_on_disk, ranks_here)


def _check(config: ResolvedConfig, key: str, path: str, need: int, ranks_here: int) -> None:
    """ConfigError unless the folder has room for ``need`` bytes of each rank."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        is_direct = SwapFile(Path(path)).is_direct
        free = shutil.disk_usage(path).free
    except (OSError, ValueError) as error:
        # ValueError is what a null character in the name gives.
        raise ConfigError(
            f"{key}={path!r} cannot be written: {error}.\n"
            "Choose a folder that you may write to, on a disk of this machine with free space."
        ) from error
    needed = ranks_here * need
    if config.run.memory_check and needed > free:
        raise ConfigError(
            f"{key}={path!r} has {gib(free)} free, and {plural(ranks_here, 'rank')} of this machine will swap "
            f"{gib(needed)} to it, {gib(need)} each.\n"
            "Choose a larger disk, or more machines: ranks need less. --run.memory_check false starts all the same."
        )
    how = "with direct I/O"
    if not is_direct:
        how = "through the page cache, because this file system has no direct I/O"
    log.info(
        "Swapping up to %s to %s, for %s here, %s; %s are free.",
        gib(needed),
        path,
        plural(ranks_here, "rank"),
        how,
        gib(free),
    )
