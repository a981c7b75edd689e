"""How a command ends: one screen and an exit code for a user's mistake, a traceback for a fault of ours."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable

from longctx.errors import ConfigError, LongCtxError

log = logging.getLogger(__name__)
# Without a run folder there is no log file: Python would print each error a second time.
log.addHandler(logging.NullHandler())

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
# What gloo and NCCL say when another rank has ended.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

HEAD_START_SECONDS = 10.0
"""How long a silent rank waits for rank 0 to report: the launcher ends all ranks as soon as one has failed."""

_GO_ON = "Interrupted. Go on from the newest checkpoint with --run.resume latest."


def run_to_exit_code(action: Callable[[], int | None], *, interrupted: str = _GO_ON) -> int:
    """Run ``action`` and return the exit code: its own, if it returns one. When it raises, report why.

    Errors in what the user gave are raised on every rank alike, so rank 0 alone reports them. ``interrupted`` is
    printed after Ctrl-C.
    """
    try:
        return action() or DONE
    except ConfigError as error:
        _report_on_rank_0(f"{type(error).__name__}: {error}")
        return WRONG_USAGE
    except LongCtxError as error:
        _report_on_rank_0(f"{type(error).__name__}: {error}")
        return FAILED
    except SystemExit as ending:
        return _code_of(ending)
    except KeyboardInterrupt:
        # Every rank gets the signal; one message is enough.
        if _rank() == 0:
            _report(interrupted)
        return INTERRUPTED
    except Exception as error:
        # This rank alone may have met it, so it cannot leave the report to rank 0.
        _report(_explain(error))
        return FAILED


def _code_of(ending: SystemExit) -> int:
    """The exit code of a SystemExit; tyro has printed why."""
    if not ending.code:
        return DONE
    _report_on_rank_0("")
    if isinstance(ending.code, int):
        return ending.code
    return FAILED


def _explain(error: Exception) -> str:
    """The report of an error that one rank met by itself."""
    who = f"rank {_rank()}"
    # Not the cause: the rank that ended first has the cause in its own report.
    if any(sign in str(error) for sign in _LOST_PEER):
        return f"{who} lost contact with another rank and stops: {str(error).splitlines()[0]}"
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"{who} could not write: {error}.\nFree some space, then go on with --run.resume latest."
    return f"{who} met an unexpected error; this is a fault of longctx:\n{traceback.format_exc()}"


def _report_on_rank_0(text: str) -> None:
    """Report on rank 0; on the others, wait until it has done so."""
    if _rank() == 0:
        _report(text)
        return
    if text:
        log.error("%s", text)
    # The deepspeed launcher ends every rank as soon as one has failed: a faster rank would cut rank 0 off.
    time.sleep(HEAD_START_SECONDS)


def _rank() -> int:
    """The rank as torchrun and deepspeed give it: there may be no process group any more, or not yet."""
    return int(os.environ.get("RANK", "0"))


def _report(text: str) -> None:
    """Write to standard error and to the log; nothing where ``text`` is empty."""
    if text:
        sys.stderr.write(f"\n{text}\n\n")
        sys.stderr.flush()
        log.error("%s", text)
