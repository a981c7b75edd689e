"""Start a script's ranks on this machine, from this process alone.

Each rank is a process in its own group: a terminal's Ctrl-C reaches only this process, which forwards it to the ranks.
They save, report, and end with one exit code, which becomes this process's own. They stay in this process's session, so
that `longctx run` finds them if this process is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.cluster.exit import DONE, HEAD_START_SECONDS, NOT_IN_STORE, STOPPED
from launcher.cluster.sessions import SignalForwarder, end_all
from longctx.errors import LongCtxError
from parallel.runtime.launched import COMMAND
from parallel.runtime.launcher_processes import COMMAND_PID_VARIABLE
from parallel.runtime.listening import free_port

ROOT = Path(__file__).resolve().parents[2]
"""Folder with the four packages, in a checkout or among installed packages."""
_POLL_SECONDS = 0.1


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Build the environment for one rank on this machine; the ranks' rendezvous is at ``port``."""
    return {
        **os.environ,
        "RANK": str(rank),
        # deepspeed's launcher sets LOCAL_SIZE, torchrun sets LOCAL_WORLD_SIZE; libraries may read either.
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        COMMAND_PID_VARIABLE: str(os.getpid()),
    }


def run_ranks(command: str, script: str, arguments: Sequence[str], ranks: int) -> int:
    """Execute ``launcher/script`` on ``ranks`` ranks to their end; return the first nonzero exit code, otherwise 0.

    ``command`` is the verb as the user typed it, for messages. Raise LongCtxError if a process cannot be started.
    """
    words = [sys.executable, str(ROOT / "launcher" / script)]
    words.extend(arguments)
    port, stop, started = free_port(), SignalForwarder(), list[subprocess.Popen[bytes]]()
    # Inherited by the ranks: under `stty tostop`, a background group is suspended when it writes to its terminal.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    # A background group may not read its terminal; a file or a pipe is passed on to the rank that reads it.
    given = None
    if sys.stdin is not None and sys.stdin.isatty():
        given = subprocess.DEVNULL
    leaders: list[int] = []
    with stop.listening():
        try:
            for rank in range(ranks):
                environment = rank_environment(rank, ranks, port) | {COMMAND: command}
                started.append(subprocess.Popen(words, env=environment, stdin=given, process_group=0))
                leaders.append(started[-1].pid)
            with stop.forwarding_to(leaders):
                code = _wait(started)
                # Remaining processes if a rank was killed: its peers, and their workers. A second signal ends them at
                # once.
                end_all(leaders)
                return code
        except OSError as error:
            raise LongCtxError(f"{words[0]} cannot be started: {error.strerror}.") from error
        finally:
            end_all(leaders)


def num_gpus() -> int:
    """Return how many GPUs on this machine the ranks would use."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    import torch  # takes half a second, which a start with --ranks saves

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes; return the first nonzero exit code. After a failure, wait for a limited time only."""
    first, since = DONE, 0.0
    while None in (codes := [process.poll() for process in started]):
        failed = [code for code in codes if code]
        if first == DONE and failed:
            # A failed rank notifies the others, which end by themselves; ranks before the rendezvous cannot be
            # notified.
            first, since = failed[0], time.monotonic()
        is_failure = first not in (DONE, STOPPED, NOT_IN_STORE)
        if is_failure and time.monotonic() - since > 2 * HEAD_START_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
    if first == DONE:
        first = next((code for code in codes if code), DONE)
    return 128 - first if first < 0 else first
