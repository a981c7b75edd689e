"""Guard that ends a stopped rank if no other process can: ``python stopped_rank_guard.py PROCESS SECONDS PORT``.

When the run ends, ranks end stopped ranks on their own machine. A rank alone on its machine has no such neighbour: the
run ends elsewhere, and its launcher would wait for it forever. So it starts this process, which checks it once a
second. If the rank has been stopped for SECONDS, and no other rank is connected to the coordinator at PORT any more,
the guard resumes it, so that it receives the reason why the run ended; five seconds later it kills it. The guard
imports little because it lives as long as the rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_POLL_SECONDS = 1.0
_ROUSED_SECONDS = 5.0
"""Grace period for a resumed rank to end by itself."""
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"


def start_guard(seconds: float, port: int) -> None:
    """Start a guard for this process, if the system provides the required tables."""
    # Other systems lack the table; their users see the launcher wait.
    if not Path(_TABLES[0]).exists():
        return
    # Inherit no stream: ssh and launchers wait for all processes that hold one.
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(seconds), str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    """Check the process until it has ended."""
    pid, seconds, port = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    # Process ids are reused, but the parent id equals the rank's only while the rank lives.
    stopped_since = None
    while os.getppid() == pid:
        now = time.monotonic()
        if not is_stopped(pid):
            stopped_since = None
        elif stopped_since is None:
            stopped_since = now
        elif now - stopped_since >= seconds and not is_connected(port):
            os.kill(pid, signal.SIGCONT)
            while os.getppid() == pid and time.monotonic() - now < _ROUSED_SECONDS:
                time.sleep(_ROUSED_SECONDS / 100)
            if os.getppid() == pid:
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(_POLL_SECONDS)


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def is_connected(port: int) -> bool:
    """Return True if a connection between the coordinator's port and another machine is open on both sides.

    The system drops a connection to a lost machine after a minute, whatever the process does.
    """
    for table in _TABLES:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            local, remote, state = line.split()[1:4]
            (local_host, own_port), (remote_host, other_port) = local.split(":"), remote.split(":")
            # Rank 0 is connected to its own coordinator.
            if state == _ESTABLISHED and local_host != remote_host and port in (int(own_port, 16), int(other_port, 16)):
                return True
    return False


if __name__ == "__main__":
    main()
