"""A worker process: encodes the parts that it is sent, one after the other, until nobody is left to send more.

A new interpreter and no fork of the parent, which has threads; and not ``multiprocessing``'s spawn, which would run the
user's script a second time.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from data_pipeline.prepare.duplicates.outcome import PartDecision
from data_pipeline.prepare.duplicates.signed import SignedRecord
from data_pipeline.prepare.parts.deal import Part
from data_pipeline.prepare.parts.record import PartRecord
from data_pipeline.prepare.parts.sign import sign_part
from data_pipeline.prepare.parts.work import Job, encode_part
from longctx.errors import LongCtxError
from longctx.tokenizer.contract import Tokenizer
from longctx.tokenizer.load import load_files

_SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker is told first."""

    job: Job
    threads: int
    """Threads of its tokenizer."""
    files: Mapping[str, bytes]
    """The tokenizer's files."""
    path: Path
    """Where they were read, for messages."""
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Order:
    """A part to encode, or to sign."""

    part: Part
    folder: Path
    signs: bool = False
    """Whether its texts are only hashed, to be compared."""
    decision: PartDecision | None = None
    """Which of its documents stay; None where nobody looked for duplicates."""

    @property
    def done(self) -> str:
        """What the worker does with it, in the past, for messages."""
        if self.signs:
            return "compared"
        return "encoded"


@dataclass(frozen=True, kw_only=True)
class Advanced:
    """How far the part is."""

    documents: int
    text_bytes: int
    bytes_read: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Why the worker ends: an error of the user's, or the traceback of one of ours."""

    error: LongCtxError | None
    traceback: str


Report = Advanced | PartRecord | SignedRecord | Failed


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
            known = None
            if isinstance(error, LongCtxError):
                known = error
            _send(connection, Failed(error=known, traceback="".join(traceback.format_exception(error))))


def _work(connection: Connection) -> None:
    """Do order after order."""
    setup: Setup = _receive(connection)
    job, reporter = setup.job, _Reporter(connection)
    tokenizer = None
    while True:
        order: Order = _receive(connection)
        if order.signs:
            signed = sign_part(order.part, order.folder, read_as=job.read_as, rule=job.duplicates, advance=reporter)
            _send(connection, signed)
            continue
        # Not before it is needed: a pass that hashes texts has none.
        if tokenizer is None:
            tokenizer = _tokenizer(setup)
        record = encode_part(
            order.part, order.folder, job=job, tokenizer=tokenizer, advance=reporter, decision=order.decision
        )
        _send(connection, record)


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


def _tokenizer(setup: Setup) -> Tokenizer:
    """The parent's tokenizer, made from its files."""
    # From the files in memory: those on disk may have been replaced since the parent read them.
    tokenizer = load_files(setup.files, setup.path)
    assert tokenizer.fingerprint == setup.fingerprint
    tokenizer.threads = setup.threads
    return tokenizer


class _Reporter:
    """Tells the parent how far the part is, now and then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._due = 0.0

    def __call__(self, documents: int, text_bytes: int, bytes_read: int) -> None:
        now = time.monotonic()
        # A message for each of a million short documents would cost more than encoding them.
        if now >= self._due:
            self._due = now + _SECONDS_BETWEEN_REPORTS
            _send(self._connection, Advanced(documents=documents, text_bytes=text_bytes, bytes_read=bytes_read))


def _end_with_parent(handle: int) -> None:
    """End this process when the parent has closed its end, however it ended."""
    poll = select.poll()
    # No event is asked for: a closed connection is always told.
    poll.register(handle, 0)
    poll.poll()
    os._exit(1)
