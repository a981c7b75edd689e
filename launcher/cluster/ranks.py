"""Start of a script's ranks on this machine, by this process alone.

Each rank is a process in a group of its own: a terminal's Ctrl-C reaches only this process, which forwards it to the
ranks. They save, say so, and end with one exit code, which becomes this process's own. They stay in this process's
session, where `longctx run` finds them if this process is killed.
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
from launcher.cluster.sessions import Stop, end_all
from longctx.errors import LongCtxError
from parallel.runtime.launched import COMMAND
from parallel.runtime.listening import free_port
from parallel.runtime.parents import STARTER

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the four packages, in a checkout or among the installed ones."""
_POLL_SECONDS = 0.1


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment of one of ``ranks`` ranks of this machine, which meet at ``port``."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        STARTER: str(os.getpid()),
    }


def run_ranks(command: str, script: str, arguments: Sequence[str], ranks: int) -> int:
    """Run ``launcher/script`` on ``ranks`` ranks to their end; return the exit code of the first that ended otherwise.

    ``command`` is the verb as its user typed it, which messages repeat. Raise LongCtxError if a process cannot be
    started.
    """
    words = [sys.executable, str(ROOT / "launcher" / script)]
    words.extend(arguments)
    port, stop, started = free_port(), Stop(), list[subprocess.Popen[bytes]]()
    # Inherited by the ranks: `stty tostop` would suspend a group in the background that writes to its terminal.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    # A group in the background may not read its terminal; a file or a pipe may be read by the rank that reads.
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
            with stop.meaning(leaders):
                code = _wait(started)
                # What is left if a rank was killed: the others, and their workers. A second signal does not wait.
                end_all(leaders)
                return code
        except OSError as error:
            raise LongCtxError(f"{words[0]} cannot be started: {error.strerror}.") from error
        finally:
            end_all(leaders)


def num_gpus() -> int:
    """Return the number of GPUs of this machine that ranks would use."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0
    import torch  # half of a second, which a start with --ranks does without

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()


def _wait(started: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes; return the first exit code that is not 0, and do not wait for others after a failure."""
    first, since = DONE, 0.0
    while None in (codes := [process.poll() for process in started]):
        failed = [code for code in codes if code]
        if first == DONE and failed:
            # A rank that failed has told the others, which end by themselves; those that have not met yet do not.
            first, since = failed[0], time.monotonic()
        is_failure = first not in (DONE, STOPPED, NOT_IN_STORE)
        if is_failure and time.monotonic() - since > 2 * HEAD_START_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
    if first == DONE:
        first = next((code for code in codes if code), DONE)
    return 128 - first if first < 0 else first
