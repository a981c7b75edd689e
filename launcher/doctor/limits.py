"""Checks for operating system limits, the compiler, and the master port."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import socket
from pathlib import Path

from launcher.doctor.check_result import CheckResult

_MIN_OPEN_FILES = 1024
_CONNECTIONS_PER_RANK = 8
"""Process groups per rank, at most; gloo connects to every rank in each group."""
_OWN_FILES = 256
_DEFAULT_MAP_COUNT = 65530
_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
_INFINIBAND = Path("/sys/class/infiniband")


def check_open_files(world_size: int, soft: int | None = None) -> CheckResult:
    """Check ``ulimit -n`` against the connections one rank may open at ``world_size``."""
    current, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft is None:
        soft = current
    needed = max(_MIN_OPEN_FILES, _CONNECTIONS_PER_RANK * world_size + _OWN_FILES)
    hint = ""
    if soft != resource.RLIM_INFINITY and soft < needed:
        hint = f"ulimit -n {needed}"
        # Users may raise the soft limit; only root may raise the hard one.
        if hard != resource.RLIM_INFINITY and hard < needed:
            hint = f"Raise the hard limit ({hard}) in /etc/security/limits.conf to {needed}"
    return CheckResult.of("open files", f"{human_limit(soft)} (ulimit -n)", hint)


def check_locked_memory(soft: int | None = None, infiniband: Path = _INFINIBAND) -> CheckResult:
    """Check ``ulimit -l``, which limits RDMA registrations; warn only if there is an InfiniBand adapter."""
    if soft is None:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    hint = ""
    if soft != resource.RLIM_INFINITY and infiniband.is_dir() and any(infiniband.iterdir()):
        hint = "InfiniBand registers memory: set memlock unlimited in limits.conf (docker --ulimit memlock=-1)"
    return CheckResult.of("locked memory", f"{human_limit(soft, kib=True)} (ulimit -l)", hint)


def check_map_count(path: Path = _MAP_COUNT) -> CheckResult | None:
    """Check ``vm.max_map_count``; return None if the system has no such limit."""
    try:
        count = int(path.read_text())
    except (OSError, ValueError):
        return None
    hint = ""
    if count < _DEFAULT_MAP_COUNT:
        hint = f"Below the Linux default: sysctl -w vm.max_map_count={_DEFAULT_MAP_COUNT}"
    return CheckResult.of("memory maps", f"{count} (vm.max_map_count)", hint)


def check_compiler() -> CheckResult:
    """Check for g++ and ninja, which zero.offload (DeepSpeed's AdamW) and train.compile need."""
    # CXX may be set but empty, or contain a wrapper and options, such as "ccache g++ -v".
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    programs = [word for word in words if not word.startswith("-")] + ["ninja"]
    missing = [name for name in programs if shutil.which(name) is None]
    if not missing:
        return CheckResult.of("compiler", " and ".join(programs))
    hint = "Only zero.offload and train.compile need them: apt-get install g++ ninja-build; put .venv/bin in PATH"
    return CheckResult.of("compiler", f"no {' and no '.join(missing)} in PATH", hint)


def check_port(port: int) -> CheckResult:
    """Check that rank 0's port is free on this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # As in PyTorch's store: lingering connections from a finished run do not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            hint = f"Another run may use it: ss -ltnp 'sport = :{port}'; or deepspeed --master_port {port + 1}"
            return CheckResult.of("master port", f"{port} is taken: {error.strerror}", hint, "fail")
    return CheckResult.of("master port", f"{port} is free")


def human_limit(count: int, *, kib: bool = False) -> str:
    """Format a limit as ``ulimit`` does; ``kib`` converts bytes to KiB."""
    if count == resource.RLIM_INFINITY:
        return "unlimited"
    if kib:
        return f"{count // 1024} KiB"
    return str(count)
