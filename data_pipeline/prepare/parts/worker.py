"""A worker process: encodes the parts that it is sent, one after the other, until nobody is left to send more.

A new interpreter and no fork of the parent, which has threads; and not ``multiprocessing``'s spawn, which would run the
user's script a second time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from data_pipeline.prepare.parts.order import Advanced, Failed, Order, Report, Setup, Sparing, carry_out

_SECONDS_BETWEEN_REPORTS = 0.2


class _ParentGoneError(Exception):
    """Nobody reads our reports any more.

    No ``OSError``, as the broken pipe is: between the writing of files that would pass for a failing disk.
    """


def command(handle: int) -> list[str]:
    """The command line of a worker whose end of the connection is the open file ``handle``."""
    boot = "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    boot += "from data_pipeline.prepare.parts.worker import main; main(int(sys.argv[1]))"
    return [sys.executable, "-c", boot, str(handle), json.dumps(sys.path)]


def main(handle: int) -> None:
    """Work until the other end of the connection is closed."""
    connection = Connection(handle)
    threading.Thread(target=_end_with_parent, args=(handle,), daemon=True).start()
    # Half a part has no record and counts for nothing.
    with contextlib.suppress(_ParentGoneError):
        try:
            _work(connection)
        except _ParentGoneError:
            raise
        except BaseException as error:
            _send(connection, Failed.of(error))


def _work(connection: Connection) -> None:
    """Do order after order."""
    setup: Setup = _receive(connection)
    # Not loaded before it is needed: a pass that hashes texts has none.
    tokenizer = functools.cache(setup.load_tokenizer)

    def report(documents: int, text_bytes: int, bytes_read: int) -> None:
        _send(connection, Advanced(documents=documents, text_bytes=text_bytes, bytes_read=bytes_read))

    advance = Sparing(report, _SECONDS_BETWEEN_REPORTS)
    while True:
        order: Order = _receive(connection)
        _send(connection, carry_out(order, job=setup.job, tokenizer=tokenizer, advance=advance))


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError) as ended:
        raise _ParentGoneError from ended


def _send(connection: Connection, report: Report) -> None:
    try:
        connection.send(report)
    except (BrokenPipeError, ConnectionResetError) as ended:
        raise _ParentGoneError from ended


def _end_with_parent(handle: int) -> None:
    """End this process when the parent has closed its end, however it ended."""
    poll = select.poll()
    # No event is asked for: a closed connection is always told.
    poll.register(handle, 0)
    poll.poll()
    os._exit(1)
