"""How a command ends: one screen and an exit code for what a user can mend, a traceback for what only we can."""

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
log.addHandler(logging.NullHandler())  # without a run folder there is no log: stay silent instead of saying it twice

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

HEAD_START_SECONDS = 10.0
"""How long a silent rank waits for rank 0 to speak: the launcher ends all ranks as soon as one has failed."""


_GO_ON = "Interrupted. Go on from the newest checkpoint with --run.resume latest."


def run_guarded(action: Callable[[], int | None], *, interrupted: str = _GO_ON) -> int:
    """Run ``action`` and return the exit code (its own, if it returns one), having said why when it raised.

    Errors in what the user gave are raised on every rank alike, so rank 0 alone speaks of them. ``interrupted`` is
    said after Ctrl-C.
    """
    try:
        return action() or DONE
    except LongCtxError as error:
        _say_once(f"{type(error).__name__}: {error}")
        return WRONG_USAGE if isinstance(error, ConfigError) else FAILED
    except SystemExit as ending:  # the command line's reader has said why
        if ending.code:
            _say_once("")
        return ending.code if isinstance(ending.code, int) else FAILED if ending.code else DONE
    except KeyboardInterrupt:
        if _rank() == 0:
            _say(interrupted)
        return INTERRUPTED
    except Exception as error:
        _say(_explain(error))
        return FAILED


def _explain(error: Exception) -> str:
    """What to say of an error that one rank met by itself."""
    who = f"rank {_rank()}"
    if any(sign in str(error) for sign in _LOST_PEER):
        return f"{who} lost contact with another rank and stops: {str(error).splitlines()[0]}"
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return f"{who} could not write: {error}.\nFree some space, then go on with --run.resume latest."
    return f"{who} met an unexpected error; this is a fault of longctx:\n{traceback.format_exc()}"


def _say_once(text: str) -> None:
    """Rank 0 speaks; the others leave it the time to."""
    if _rank() == 0:
        _say(text)
    else:
        if text:
            log.error("%s", text)
        time.sleep(HEAD_START_SECONDS)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _say(text: str) -> None:
    if text:
        sys.stderr.write(f"\n{text}\n\n")
        sys.stderr.flush()
        log.error("%s", text)
