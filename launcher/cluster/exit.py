"""Exit of a command: one screen of text and an exit code for a user's mistake, a traceback for a bug of ours.

With several ranks the first failure of any rank ends all of them (``parallel/runtime/watch/``), and its message is the
one that the user reads.
"""

from __future__ import annotations

import errno
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from launcher.cluster.stop_request import Signalled, end_for
from longctx.errors import ConfigError, LongCtxError
from longctx_train import FIRST_PARENT
from parallel.runtime.launched import environment_rank
from parallel.runtime.launcher_processes import Launcher, find_launcher_chain, was_orphaned, watch_launcher_processes
from parallel.runtime.watch.current import active_watch, set_stop_text, stop_watch
from parallel.runtime.watch.ending_signals import signal_text
from parallel.runtime.watch.failure import Failure
from parallel.runtime.watch.last_message import end_process, print_last_message, use_terminal_of_user
from parallel.runtime.watch.rank_watch import RankWatch, text_of
from parallel.runtime.watch.rank_watch import log as watch_log

log = logging.getLogger(__name__)
# Without a run folder there is no log file: Python would print each error a second time.
log.addHandler(logging.NullHandler())

DONE, FAILED, USAGE_ERROR, NOT_IN_STORE, STOPPED, ABORTED = 0, 1, 2, 74, 75, 130
"""By sysexits.h: STOPPED is a temporary failure (the run was asked to stop, has saved, and can go on), NOT_IN_STORE one
of input and output (the run is done, and its last checkpoint is here and not in its store)."""
# Messages of gloo, NCCL and the rendezvous store when another rank has ended.
_PEER_ERRORS = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out"),
    *("remote process exited", "ncclRemoteError", "failed to recv"),
)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DISK_GONE = (errno.EROFS, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ENXIO)
"""A file system that was unmounted, removed, or made read-only, as the system does when a disk fails."""

HEAD_START_SECONDS = 10.0
"""How long a silent rank waits for rank 0 to report: the launcher ends all ranks as soon as one has failed."""

BACKGROUND = "longctx-background "
"""How the names of daemon threads begin whose libraries may wait for them, without a limit, when Python exits."""

_FIRST_FAILURE_SECONDS = 3.0
"""How long a rank that lost contact with another one waits to hear why."""

_GO_ON = "Interrupted. Resume from the newest checkpoint with --run.resume latest."


def is_for_console(record: logging.LogRecord) -> bool:
    """Return whether a console shows this record; final error messages go to standard error, once for all ranks."""
    return record.name not in (__name__, watch_log.name)


def end_orphaned(launcher: Launcher | str) -> None:
    """End the process because its launcher is gone. For scripts that have no state to save."""
    end_for(f"ClusterError: {launcher} is gone, so rank {_rank()} ended too.")


def run_script(
    action: Callable[[], int | None],
    *,
    abort_message: str = _GO_ON,
    on_orphaned: Callable[[Launcher | str], None] = end_orphaned,
) -> NoReturn:
    """Call ``action`` and end this process with its exit code. Every script that runs over ranks calls this.

    ``on_orphaned`` is called in a thread once the launcher, or the launcher's parent, is gone.
    """
    if was_orphaned(FIRST_PARENT):
        on_orphaned("this rank's launcher")
    ancestors = find_launcher_chain()
    use_terminal_of_user(ancestors)
    watch_launcher_processes(ancestors, on_orphaned)
    code = run_to_exit_code(action, abort_message=abort_message)
    if code == DONE:
        stop_watch()
        if not any(thread.name.startswith(BACKGROUND) for thread in threading.enumerate()):
            sys.exit(DONE)
    # Not sys.exit: leaving the process group, or a busy GPU, may wait forever for other ranks.
    member = active_watch()
    if member is not None:
        member.end(code)
    end_process(code)


def end_stopped(text: str) -> int:
    """Report a requested stop on rank 0 and return the exit code. The ranks have already disconnected."""
    if _rank() == 0:
        _report(text)
    return STOPPED


def run_to_exit_code(action: Callable[[], int | None], *, abort_message: str = _GO_ON) -> int:
    """Call ``action`` and return the exit code: its own if it returns one. If it raises, report the error.

    Errors in the user's input are raised on every rank, so only rank 0 reports them. ``abort_message`` is printed after
    Ctrl-C. With several ranks a failure of this one ends all of them, and this one ends with the code of the first
    failure.
    """
    set_stop_text(abort_message)
    try:
        try:
            return action() or DONE
        except BaseException as error:
            member = active_watch()
            if member is not None:
                member.take_over()
            return _end(_failure_of(error, abort_message))
    except KeyboardInterrupt:
        # Raised while an error was reported: by the user, or by the watch because another rank failed.
        member = active_watch()
        if member is None or member.line.first is None:
            return ABORTED
        return member.line.first.code or ABORTED


def _failure_of(error: BaseException, abort_message: str) -> Failure:
    """Return the failure for an error: message, exit code, and whether every rank is about to end with the same one."""
    if isinstance(error, LongCtxError):
        code = FAILED
        if isinstance(error, ConfigError):
            code = USAGE_ERROR
        return _failure(
            code, f"{type(error).__name__}: {error}", on_all_ranks=True, follows=_is_peer_error(error.__cause__)
        )
    if isinstance(error, SystemExit):
        # tyro has printed why.
        return _failure(_code_of(error), "", on_all_ranks=True)
    if isinstance(error, Signalled):
        return _failure(128 + error.number, signal_text(error.number), on_all_ranks=False)
    if isinstance(error, KeyboardInterrupt):
        # Every rank gets the signal; one message is enough.
        return _failure(ABORTED, abort_message, on_all_ranks=True)
    # Possibly an error of this rank alone, so it cannot leave the report to rank 0.
    return _failure(FAILED, _local_report(error), on_all_ranks=False, follows=_is_peer_error(error))


def _failure(code: int, text: str, *, on_all_ranks: bool, follows: bool = False) -> Failure:
    """Return a failure of this rank, or the other rank's failure that it ``follows`` from, if received in time."""
    member = active_watch()
    if follows and member is not None:
        # A lost connection shows within milliseconds, but news of the rank that failed first takes longer.
        first = member.line.wait(_FIRST_FAILURE_SECONDS)
        if first is not None:
            return first
    return Failure(rank=_rank(), code=code, text=text, is_shared=on_all_ranks)


def _end(failure: Failure) -> int:
    """Report a failure to the other ranks, then to the user; return the exit code."""
    member = active_watch()
    if failure.code == DONE:
        return DONE
    if member is None:
        # Alone, or before ranks have met. The deepspeed launcher ends every rank as soon as one has failed.
        if _rank() == 0 or not failure.is_shared:
            _report(failure.text)
        else:
            _log(failure.text)
            time.sleep(HEAD_START_SECONDS)
        return failure.code
    first = member.line.announce(failure)
    if first.rank == _rank() or (first.is_shared and failure.is_shared):
        _report_together(member, failure)
    elif first.is_shared and _rank() == 0:
        # Another rank met an error that all ranks should meet, and this rank met a different one instead.
        _report_together(member, first)
    return first.code


def _report_together(member: RankWatch, failure: Failure) -> None:
    """Report the failure if this is the reporting rank; otherwise wait until rank 0 has reported it."""
    if not failure.is_shared:
        _report(failure.text)
    elif _rank() == 0 and not member.may_report():
        # The watch has reported already: this rank was late.
        _log(failure.text)
    elif _rank() == 0:
        _report(text_of(failure, _rank()))
        member.line.reported()
    else:
        _log(failure.text)
        if not member.line.wait_reported(HEAD_START_SECONDS):
            _report(failure.text)


def _code_of(ending: SystemExit) -> int:
    if not ending.code:
        return DONE
    if isinstance(ending.code, int):
        return ending.code
    return FAILED


def _is_peer_error(error: BaseException | None) -> bool:
    """Return whether this is an error that gloo or NCCL raises when another rank has ended."""
    return error is not None and any(sign in str(error) for sign in _PEER_ERRORS)


def _local_report(error: BaseException) -> str:
    """Return the report of an error that may be this rank's alone."""
    who = f"rank {_rank()}"
    # Not the cause: the rank that ended first has the cause in its own report.
    if _is_peer_error(error):
        return f"{who} lost contact with another rank and stops: {str(error).splitlines()[0]}"
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"{who} could not write: {error}.\nFree some space, then resume with --run.resume latest."
    if isinstance(error, OSError) and error.errno == errno.EIO:
        return f"{who} hit a disk error: {error}.\nUse another disk, then resume with --run.resume latest."
    if isinstance(error, OSError) and error.errno in _DISK_GONE:
        return (
            f"{who} can no longer write: {error}.\n"
            "Its folder or file system was removed, unmounted or made read-only. Fix that, then resume with "
            "--run.resume latest."
        )
    trace = "".join(traceback.format_exception(error))
    return f"{who} hit an unexpected error; this is a bug in longctx:\n{trace}"


def _rank() -> int:
    """Return the rank from torchrun's or deepspeed's environment: the process group may not exist yet, or any more."""
    return environment_rank()[0]


def _report(text: str) -> None:
    """Write ``text`` to standard error and to the log, unless it is empty."""
    if text:
        print_last_message(text)
        _log(text)


def _log(text: str) -> None:
    if text:
        log.error("%s", text)
