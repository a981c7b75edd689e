"""Write a rank's last words once its launchers have ended: ``python speaker.py SECONDS PROCESS …``, the words on stdin.

Launchers write command lines and tracebacks when a rank ends with an error, below the rank's own words. A separate
process, detached from the rank that started it, waits for the launcher's end and speaks then. It imports little: it is
started when memory may be short, and while the rank waits for it.
"""

from __future__ import annotations

import os
import select
import sys
import time

_POLL_SECONDS = 0.05


def main() -> None:
    """Detach, wait for the processes to end, and write the words."""
    deadline = time.monotonic() + float(sys.argv[1])
    processes, words = [int(word) for word in sys.argv[2:]], sys.stdin.buffer.read()
    # Twice removed from the rank: a launcher that ends its ranks waits for all processes that they have started.
    if os.fork():
        os._exit(0)
    os.setsid()
    for process in processes:
        wait_for_end(process, deadline)
    os.write(2, words)


def wait_for_end(process: int, deadline: float) -> None:
    """Return when a process has ended, or at the deadline of the monotonic clock."""
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(process), select.POLLIN)
        poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):
        # A system without process handles.
        while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:  # noqa: PTH110
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
