"""A run's folder: made before anything is allocated, with the files that explain the run later."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cluster.exit import is_for_console
from launcher.metrics.record import METRICS_FILE
from longctx import __version__
from longctx.errors import ConfigError
from longctx.files import replaced_file

if TYPE_CHECKING:  # the report reads this file's names without torch
    from launcher.config.sections import RunConfig
    from parallel.mesh import Mesh

CONFIG_FILE = "config.toml"
ENVIRONMENT_FILE = "environment.json"
LOGS = "logs"
IMPORTED = "imported"
"""Checkpoint that a Hugging Face folder was converted into, to start from."""


def prepare_folder(config: RunConfig) -> Path:
    """Make the run's folder and return it; ConfigError when it cannot be written or holds a run already."""
    folder = Path(config.run.output_dir)
    try:
        if config.run.resume == "no" and (folder / METRICS_FILE).exists():
            raise ConfigError(
                f"run.output_dir={config.run.output_dir!r} already holds a run.\n"
                "Go on with it (--run.resume latest), or choose another folder (--run.output_dir ...)."
            )
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        # Permissions do not say it: the disk may be full, or mounted to be read only.
        probe = folder / f".writable.{os.getpid()}"
        probe.write_text("x")
        probe.unlink()
    except (OSError, ValueError) as error:
        # ValueError is what a null character in the name gives.
        raise ConfigError(
            f"run.output_dir={config.run.output_dir!r} cannot be written: {error}.\n"
            "Choose a folder you may write to (--run.output_dir ...), on a disk with free space."
        ) from error
    return folder


def write_config_and_environment(folder: Path, config: RunConfig, mesh: Mesh, num_parameters: int) -> None:
    """Write the resolved config, and the environment of rank 0."""
    with replaced_file(folder / CONFIG_FILE) as temporary:
        temporary.write_text(config.to_toml())
    with replaced_file(folder / ENVIRONMENT_FILE) as temporary:
        temporary.write_text(json.dumps(_environment(mesh, num_parameters), indent=1) + "\n")


def start_logging(folder: Path, rank: int) -> None:
    """Log INFO to ``logs/rank_N.log`` on every rank; on the console, INFO of rank 0 and warnings of the others."""
    to_file = logging.FileHandler(folder / LOGS / f"rank_{rank}.log")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_console = logging.StreamHandler(sys.stdout)
    if rank == 0:
        to_console.setLevel(logging.INFO)
        to_console.setFormatter(logging.Formatter("%(message)s"))
    else:
        to_console.setLevel(logging.WARNING)
        to_console.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    to_console.addFilter(is_for_console)
    # A full disk must not bury the error that says so under the log's own traceback.
    logging.raiseExceptions = False
    # Our packages alone, not the root: DeepSpeed and torch log what no user of ours asked for.
    ours = [logging.getLogger(name) for name in ("launcher", "parallel", "data_pipeline", "longctx", "__main__")]
    for logger in ours:
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.handlers = [to_file, to_console]


def _environment(mesh: Mesh, num_parameters: int) -> dict[str, Any]:
    """Host, versions, degrees and command line, as plain values."""
    packages: dict[str, str] = {"longctx": __version__}
    for name in ("torch", "deepspeed", "numpy", "pyarrow", "sentencepiece", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": packages,
        "world_size": mesh.world_size,
        "data": mesh.data,
        "context": mesh.context,
        "expert": mesh.expert,
        "num_parameters": num_parameters,
        "command": sys.argv,
    }


def processor_name() -> str:
    """The processor's name."""
    # On Linux platform.processor() is the architecture, or empty.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    # ARM has no model name there.
    return platform.machine()
