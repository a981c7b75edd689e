"""Worker process: carries out orders sequentially until its parent closes the connection.

It is a new interpreter: a fork would copy a parent with threads, and a ``multiprocessing`` spawn would run the user's
script a second time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
from multiprocessing.connection import Connection

from data_pipeline.prepare.parts.node import NodeWorker

_SECONDS_BETWEEN_REPORTS = 0.2


def worker_command(handle: int) -> list[str]:
    """Return a worker's command line; ``handle`` is the open file of its end of the connection."""
    startup = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    startup += "from data_pipeline.prepare.parts.worker import main; main(int(sys.argv[1]))"
    return [sys.executable, "-c", startup, str(handle), json.dumps(sys.path)]


def main(handle: int) -> None:
    """Work until the other end of the connection is closed."""
    connection = Connection(handle)
    threading.Thread(target=_end_with_parent, args=(handle,), daemon=True).start()
    # The parent is gone. An unfinished source part has no record and is discarded.
    with contextlib.suppress(EOFError, ConnectionError):
        worker = NodeWorker(connection.recv(), _SECONDS_BETWEEN_REPORTS)
        while True:
            for report in worker.carry_out(connection.recv()):
                connection.send(report)


def _end_with_parent(handle: int) -> None:
    """End this process when the parent has closed its end, even if the parent was killed."""
    poll = select.poll()
    # Request no event: a closed connection is always reported.
    poll.register(handle, 0)
    poll.poll()
    os._exit(1)
