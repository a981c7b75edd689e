"""Launchers above this process: identified by their command lines, and watched until one has ended.

If its launcher is killed, a rank would train on, and no process would end it. Only launchers for ranks are matched
(DeepSpeed's and PyTorch's): a shell, a supervisor or a session may end while its child processes continue.

A process handle (``pidfd_open``) signals within milliseconds that any process has ended, not only the parent, so the
runner above the launcher is watched as well. The kernel's parent-death signal would cover only the parent.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import psutil

_POLL_SECONDS = 1.0
"""Polling interval if the system has no process handles."""
_LAUNCHER, _RUNNER = "deepspeed.launcher.launch", "deepspeed.launcher.runner"
_TORCHRUN = ("torch.distributed.run", "torch.distributed.launch")
_PROGRAMS = ("deepspeed", "deepspeed.pt", "ds", "torchrun")
"""Commands that a user types."""
PDSH = "pdsh"
"""Starts launchers on several machines, over ssh."""
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")
_SAME_RUN = ("--world_info=", "--master_addr=", "--master_port=")
"""Arguments that DeepSpeed's runner passes to pdsh, and pdsh to the launcher on each host."""
COMMAND_PID_VARIABLE = "LONGCTX_STARTER"
"""Environment variable with the process id of the ``longctx`` command that started this rank itself."""
_OURS = "longctx"
_WRAPPERS = 3
"""Maximum processes between a launcher and its rank, such as numactl or a shell script."""


@dataclass(frozen=True)
class Launcher:
    """Process that started this one, directly or indirectly."""

    process: psutil.Process
    label: str
    """Name for messages to the user."""
    words: tuple[str, ...]
    """Command line."""

    @property
    def is_ours(self) -> bool:
        """True for a ``longctx`` command, which waits for its ranks and prints no message after them."""
        return self.label == _OURS

    def __str__(self) -> str:
        return f"{self.label} (process {self.process.pid})"

    def is_gone(self) -> bool:
        """Return True if it has ended, even if its exit code has not been read yet."""
        try:
            return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True


def launcher_above() -> Launcher | None:
    """Return the process that started this one as a rank; None if a user did so, or if it has ended."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process().parents()[: _WRAPPERS + 1]:
            launcher = _as_launcher(process)
            if launcher is not None:
                return launcher
    return None


def find_launcher_chain() -> list[Launcher]:
    """Return all launchers that this rank depends on, its own first. Empty if a user started this process."""
    launcher = launcher_above()
    if launcher is None:
        return []
    found = [launcher]
    if _LAUNCHER in launcher.words:
        with contextlib.suppress(psutil.Error):
            above = _above(launcher.process.parents())
            if above is not None:
                found.append(above)
            if above is None or not _is_runner(above.words):
                found += _senders(launcher.words)
    return found


def was_orphaned(first_parent: int) -> bool:
    """Return True if the launcher ended before it could be found; ``first_parent`` is the parent at start."""
    now = os.getppid()
    is_rank = "RANK" in os.environ and any(
        name in os.environ for name in ("CROSS_SIZE", "TORCHELASTIC_RUN_ID", COMMAND_PID_VARIABLE)
    )
    # For a rank that a user started by hand, neither condition changes.
    return is_rank and launcher_above() is None and (now != first_parent or now == 1)


def watch_launcher_processes(processes: Sequence[Launcher], on_gone: Callable[[Launcher], None]) -> None:
    """Call ``on_gone`` once, in its own thread, when the first launcher ends."""
    if processes:
        threading.Thread(target=_watch, args=(processes, on_gone), name="launchers", daemon=True).start()


def _watch(processes: Sequence[Launcher], on_gone: Callable[[Launcher], None]) -> None:
    handles = {}
    for launcher in processes:
        # Older kernels, other systems and strict containers lack handles: poll instead.
        with contextlib.suppress(OSError, AttributeError):
            handles[os.pidfd_open(launcher.process.pid)] = launcher
    gone = None
    while gone is None:
        # Check all first: a process id may have been reused before its handle was opened.
        gone = next((launcher for launcher in processes if launcher.is_gone()), None)
        if gone is None and len(handles) == len(processes):
            _wait(list(handles))
        elif gone is None:
            time.sleep(_POLL_SECONDS)
    for handle in handles:
        os.close(handle)
    on_gone(gone)


def _wait(handles: Sequence[int]) -> None:
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    poll.poll()


def _as_launcher(process: psutil.Process) -> Launcher | None:
    words = _words(process)
    if os.environ.get(COMMAND_PID_VARIABLE) == str(process.pid):
        return Launcher(process, _OURS, words)
    if _LAUNCHER in words:
        return Launcher(process, "deepspeed's launcher", words)
    # Match only the interpreter's program and script: later arguments may contain any words.
    if any(word in _TORCHRUN or PurePath(word).name == "torchrun" for word in words[:4]):
        return Launcher(process, "torchrun", words)
    return None


def _above(chain: Sequence[psutil.Process]) -> Launcher | None:
    """Return the process above DeepSpeed's launcher: the local runner, or the ssh connection from a remote one."""
    for process in chain:
        words, name = _words(process), process.name()
        if _is_runner(words):
            return Launcher(process, "deepspeed's runner", words)
        if name.startswith("sshd"):
            return Launcher(process, "the deepspeed launcher's ssh connection", words)
        # ssh runs its command in a shell. An interactive shell may end before its child processes.
        if name not in _SHELLS or "-c" not in words or not any(_LAUNCHER in word for word in words):
            return None
    return None


def _senders(words: Sequence[str]) -> list[Launcher]:
    """Return the pdsh that started this launcher over ssh and the runner above it, if they are on this machine."""
    mark = [word for word in words if word.startswith(_SAME_RUN)]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            # The executable is called pdsh.bin if pdsh is a script.
            if not process.name().startswith(PDSH):
                continue
            given = _words(process)
            if not all(word in given for word in mark):
                continue
            found = [Launcher(process, PDSH, given)]
            runner = process.parent()
            if runner is not None and _is_runner(_words(runner)):
                found.append(Launcher(runner, "deepspeed's runner", _words(runner)))
            return found
    return []


def is_started_by_init(script: str) -> bool:
    """Return True if process 1 starts this script, as in a container: when it ends, the system kills all others."""
    with contextlib.suppress(psutil.Error):
        # A shell or minimal init that runs the launcher also has the script in its command line; a machine's init does
        # not.
        name = PurePath(script).name
        return name.endswith(".py") and any(name in word for word in _words(psutil.Process(1)))
    return False


def is_launcher_word(word: str) -> bool:
    """Return True if ``word`` is a program with which a user starts ranks."""
    return PurePath(word).name in _PROGRAMS


def _is_runner(words: Sequence[str]) -> bool:
    """Return True if this command line starts ranks through DeepSpeed."""
    return any(word == _RUNNER or PurePath(word).name in _PROGRAMS[:3] for word in words[:4])


def _words(process: psutil.Process) -> tuple[str, ...]:
    """Return the command line; empty if it is not readable or the process has ended."""
    try:
        return tuple(process.cmdline())
    except psutil.Error:
        return ()
