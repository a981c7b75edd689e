"""Says a rank's last words once its launcher has ended: ``python speaker.py PROCESS SECONDS``, the words on stdin.

Launchers write command lines and tracebacks when a rank ends with an error, below what the rank has said. A process of
its own, detached from the rank that started it, waits for the launcher's end and speaks then. It imports little: it is
started when memory may be short, and somebody waits for it.
"""

from __future__ import annotations

import os
import select
import sys
import time

_POLL_SECONDS = 0.05


def main() -> None:
    """Detach, wait for the process to end, write."""
    process, seconds, words = int(sys.argv[1]), float(sys.argv[2]), sys.stdin.buffer.read()
    # Twice removed from the rank: a launcher that ends its ranks waits for all that they have started.
    if os.fork():
        os._exit(0)
    os.setsid()
    wait_for_end(process, seconds)
    os.write(2, words)


def wait_for_end(process: int, seconds: float) -> None:
    """Return when a process has ended, or after so many seconds."""
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(process), select.POLLIN)
        poll.poll(seconds * 1000)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):
        # A system without process handles.
        deadline = time.monotonic() + seconds
        while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:  # noqa: PTH110
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
