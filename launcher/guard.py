"""How a command ends: one screen and an exit code for what a user can mend, a traceback for what only we can."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

from longctx.errors import ConfigError, LongCtxError

log = logging.getLogger(__name__)

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out")


def run_guarded(action: Callable[[], None]) -> int:
    """Run ``action`` and return the exit code, having said why on standard error when it is not 0.

    Errors in what the user gave are raised on every rank alike, so rank 0 alone speaks of them.
    """
    try:
        action()
    except LongCtxError as error:
        if _rank() == 0:
            _say(f"{type(error).__name__}: {error}")
        log.error("%s", error)
        return WRONG_USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        if _rank() == 0:
            _say("Interrupted. Go on from the newest checkpoint with --run.resume latest.")
        return INTERRUPTED
    except Exception as error:
        if any(sign in str(error) for sign in _LOST_PEER):
            _say(f"rank {_rank()} lost contact with another rank and stops: {str(error).splitlines()[0]}")
            return FAILED
        _say(f"rank {_rank()} met an unexpected error; this is a fault of longctx:\n{traceback.format_exc()}")
        return FAILED
    return DONE


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _say(text: str) -> None:
    sys.stderr.write(f"\n{text}\n\n")
    sys.stderr.flush()
