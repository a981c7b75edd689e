"""Print a rank's last message, read from stdin, after its launchers have ended.

    python last_message_printer.py SECONDS PROCESS …

When a rank ends with an error, launchers print command lines and tracebacks below the rank's own message. A separate
process, detached from the rank that started it, waits for the launcher to end and prints then. It imports little:
memory may be short when it starts, and the rank waits for it.
"""

from __future__ import annotations

import os
import select
import sys
import time

_POLL_SECONDS = 0.05


def main() -> None:
    """Detach, wait for the processes to end, and print the message."""
    deadline = time.monotonic() + float(sys.argv[1])
    processes, words = [int(word) for word in sys.argv[2:]], sys.stdin.buffer.read()
    # Fork, to become a grandchild of the rank: a launcher that ends its ranks waits for all their child processes.
    if os.fork():
        os._exit(0)
    os.setsid()
    for process in processes:
        wait_for_end(process, deadline)
    os.write(2, words)


def wait_for_end(process: int, deadline: float) -> None:
    """Return when a process has ended, or at the deadline (monotonic clock)."""
    try:
        poll = select.poll()
        poll.register(os.pidfd_open(process), select.POLLIN)
        poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
    except ProcessLookupError:
        return
    except (OSError, AttributeError):
        # A system without process handles: poll.
        while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:  # noqa: PTH110
            time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    main()
