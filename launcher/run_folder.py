"""A run's folder: created before any allocation, with files that document the run."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from launcher.cluster.exit import is_for_console
from launcher.metrics.record import METRICS_FILE
from launcher.wording import ON_TERMINAL, ONLY_IN_FILE
from longctx import __version__
from longctx.errors import ClusterError, ConfigError
from longctx.files import replaced_file
from longctx.untrusted.terminal import escape_control_characters, for_terminal
from parallel.runtime.launched import code_version

if TYPE_CHECKING:  # the report reads this file's names without torch
    from launcher.config.config_sections import RunConfig
    from parallel.mesh import Mesh

CONFIG_FILE = "config.toml"
ENVIRONMENT_FILE = "environment.json"
ATTEMPTS = "attempts"
"""Folder with the config and environment for each start of the run, by number."""
LOGS = "logs"
IMPORTED = "imported"
"""Checkpoint converted from a Hugging Face folder, to start from."""
HOLDER_FILE = "holder"
"""File in ``LOGS`` that names the process that owns the folder; it is also the lock."""
_PACKAGES = (
    *("torch", "deepspeed", "numpy", "pyarrow", "sentencepiece", "safetensors", "tokenizers", "transformers"),
    *("triton", "flash-attn", "flash-attn-4", "fla-core"),
)
"""Packages whose versions are recorded in the environment, if installed."""
HOLD_SECONDS = 15.0
"""Seconds that a start waits for the previous process, which may be saving."""


def prepare_folder(config: RunConfig) -> Path:
    """Create and return the run's folder. Raise ConfigError if it is not writable, or has a run that is not resumed."""
    folder = Path(config.run.output_dir)
    try:
        if config.run.resume == "no" and (folder / METRICS_FILE).exists():
            raise ConfigError(
                f"run.output_dir={config.run.output_dir!r} already holds a run.\nResume it (--run.resume latest), or "
                "choose another folder (--run.output_dir ...)."
            )
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        # Permissions are not enough: the disk may be full or mounted read-only.
        probe = folder / f".writable.{os.getpid()}"
        probe.write_text("x")
        probe.unlink()
    except (OSError, ValueError) as error:
        # A null character in the name gives ValueError.
        raise ConfigError(
            f"run.output_dir={config.run.output_dir!r} cannot be written: {error}.\nChoose a writable folder "
            "(--run.output_dir ...), on a disk with free space."
        ) from error
    return folder


def hold_folder(folder: Path, *, wait_seconds: float = HOLD_SECONDS) -> None:
    """Lock the folder against other runs while this process lives; raise ClusterError if a run is active in it.

    Called by rank 0. The system releases the lock when the process ends, for any reason.
    """
    path = folder / LOGS / HOLDER_FILE
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline, has_warned = time.monotonic() + wait_seconds, False
    # A run that was stopped may still write its last checkpoint when the next attempt starts.
    while not _is_locked(handle):
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        owner_message = f"run.output_dir={str(folder)!r} is in use by another run: {holder}."
        if time.monotonic() > deadline:
            os.close(handle)
            raise ClusterError(
                f"{owner_message}\nTwo runs would overwrite each other's files. End that run first, or choose another "
                "folder (--run.output_dir ...)."
            )
        if not has_warned:
            # At once rather than after the wait: the user may have started it by mistake.
            sys.stderr.write(
                escape_control_characters(f"{owner_message} Waiting up to {wait_seconds:.0f} s for it to end.\n")
            )
            sys.stderr.flush()
            has_warned = True
        time.sleep(0.1)
    # The text is for people; the lock does not depend on it.
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()} since {datetime.now():%F %T}".encode(), 0)
    # The handle stays open: closing it would release the lock.


def _is_locked(handle: int) -> bool:
    """Return True if this process now holds the lock, or if the file system does not support locks."""
    try:
        # Not flock, which a forked child would keep.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def write_config_and_environment(folder: Path, config: RunConfig, mesh: Mesh, num_parameters: int) -> None:
    """Write the resolved config and rank 0's environment, once for the folder and once for this attempt."""
    previous_attempts = [int(path.name) for path in (folder / ATTEMPTS).glob("*") if path.name.isdecimal()]
    # Each start overwrites the folder's copy; the attempt's copy remains as history.
    attempt = folder / ATTEMPTS / f"{max(previous_attempts, default=0) + 1:03d}"
    attempt.mkdir(parents=True)
    environment = json.dumps(_environment(mesh, num_parameters), indent=1) + "\n"
    for name, text in ((CONFIG_FILE, config.to_toml()), (ENVIRONMENT_FILE, environment)):
        for place in (attempt, folder):
            with replaced_file(place / name) as temporary:
                temporary.write_text(text)


def start_logging(folder: Path, rank: int) -> None:
    """Log INFO to ``logs/rank_N.log`` on every rank; on the console, INFO from rank 0 and warnings from the others."""
    to_file = _LogFile(folder / LOGS / f"rank_{rank}.log")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    to_console = _Console(sys.stdout)
    if rank == 0:
        to_console.setLevel(logging.INFO)
        to_console.setFormatter(logging.Formatter("%(message)s"))
    else:
        to_console.setLevel(logging.WARNING)
        to_console.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
    to_console.addFilter(is_for_console)
    to_console.addFilter(lambda record: not _is_detail(record))
    # On a full disk, logging's own traceback would bury the error that reports it.
    logging.raiseExceptions = False
    # Only our packages, not the root logger: DeepSpeed and torch log messages that users did not request.
    ours = [logging.getLogger(name) for name in ("launcher", "parallel", "data_pipeline", "longctx", "__main__")]
    for logger in ours:
        logger.setLevel(logging.INFO)
        # Otherwise root handlers would print each line again.
        logger.propagate = False
        logger.handlers = [to_file, to_console]


def _is_detail(record: logging.LogRecord) -> bool:
    """Return True if a record is only for the file: marked so, or about kernel selection and below WARNING."""
    is_of_kernels = record.name.startswith("longctx.kernels.") and record.levelno < logging.WARNING
    return is_of_kernels or hasattr(record, ONLY_IN_FILE)


class _Console(logging.StreamHandler[TextIO]):
    """Console handler for a stream that may be a terminal: file and document names are untrusted."""

    def format(self, record: logging.LogRecord) -> str:
        return for_terminal(getattr(record, ON_TERMINAL, None) or super().format(record), self.stream)


class _LogFile(logging.FileHandler):
    """A rank's log file. A failed write does not end the run and is reported once."""

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Report once, on the console, that lines are missing from here on."""
        error = sys.exc_info()[1]
        # An error that ends the run is more informative and must be the user's last message.
        if self._has_failed or not is_for_console(record):
            return
        self._has_failed = True
        number = getattr(error, "errno", None)
        sys.stdout.write(
            escape_control_characters(
                f"Log lines are missing from {self.baseFilename}: errno {number}. The run continues.\n"
            )
        )
        sys.stdout.flush()


def _environment(mesh: Mesh, num_parameters: int) -> dict[str, Any]:
    """Collect host, versions, degrees and command line as plain values."""
    # Deferred: the report imports this module without torch.
    import torch

    packages: dict[str, str] = {"longctx": __version__}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "sources": code_version(),
        "commit": _commit(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "packages": packages,
        "world_size": mesh.world_size,
        "data": mesh.data,
        "context": mesh.context,
        "expert": mesh.expert,
        "num_parameters": num_parameters,
        "command": sys.argv,
    }


def _commit() -> str | None:
    """Return the sources' commit, with "+" if tracked files differ from it; None outside git."""
    root = Path(__file__).parents[1]
    try:
        if not (root / ".git").exists():
            return None
        git_options: dict[str, Any] = {"cwd": root, "capture_output": True, "text": True, "timeout": 5}
        commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, **git_options)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], check=False, **git_options)
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + "+" * bool(changed.returncode)


def processor_name() -> str:
    """Return the processor's name."""
    # On Linux platform.processor() is the architecture, or empty.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    # On ARM there is no model name.
    return platform.machine()
