"""Session with a local or remote worker: orders, and answers within a time limit."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, Queue
from typing import IO, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from launcher.doctor.check_result import sanitize_line
from longctx.errors import ClusterError

MARK = "longctx-doctor "
"""Prefix for answer lines; login scripts print others."""
_END_SECONDS = 2.0
_LONGEST_LINE = 2**22
_LAST_LINES = 20

Answer = TypeVar("Answer")


class WorkerSession:
    """Worker process, connected by its standard input and output."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        """Start ``command``; results call the worker ``name``. Raise ClusterError if the program does not exist."""
        self.name = name
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                list(command), stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace"
            )
        except FileNotFoundError as error:
            raise ClusterError(f"this machine has no {command[0]}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        # Bounded: a worker with endless output cannot fill the memory.
        self._answers: Queue[str | None] = Queue(maxsize=2)
        self._stderr_lines: deque[str] = deque(maxlen=_LAST_LINES)
        # Threads drain both streams: a full pipe would block the worker.
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._drain_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def ask(self, seconds: float, kind: TypeAdapter[Answer], **request: Any) -> Answer:
        """Send an order and return its answer. Raise ClusterError if it is invalid or takes longer than ``seconds``."""
        try:
            self._stdin.write(f"{json.dumps(request)}\n")
            self._stdin.flush()
            line = self._answers.get(timeout=max(seconds, 0.0))
        except Empty as error:
            raise ClusterError(f"no answer within {seconds:.0f} s") from error
        except OSError:
            # The worker has exited already: report this like an exit during the wait.
            line = None
        if line is None:
            raise ClusterError(f"it ended: {self.last_error_line()}")
        return read_answer(line, kind)

    @property
    def exit_code(self) -> int | None:
        """The worker's exit code; None while it runs."""
        return self._process.poll()

    def close(self) -> None:
        """End the worker by closing its standard input; kill it if it keeps running."""
        # Closing flushes, and fails if data cannot be sent.
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # A persistent ssh connection (ControlPersist) keeps these streams open: do not wait for their end.
        for reader in self._readers:
            reader.join(1.0)

    def _read(self, stream: IO[str]) -> None:
        """Queue answer lines until the stream ends."""
        while line := stream.readline(_LONGEST_LINE):
            if line.startswith(MARK):
                self._answers.put(line.removeprefix(MARK))
        self._answers.put(None)

    def _drain_stderr(self, stream: IO[str]) -> None:
        """Keep the last lines from standard error, and drain it so that the writer never blocks."""
        while line := stream.readline(_LONGEST_LINE):
            self._stderr_lines.append(line)

    def last_error_line(self) -> str:
        """Wait briefly for the worker to exit; return its last line on standard error, or its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._readers[1].join(1.0)
        lines = [sanitize_line(line) for line in list(self._stderr_lines) if line.strip()]
        if lines:
            return lines[-1]
        return f"exit code {self._process.returncode}"


def read_answer(line: str, kind: TypeAdapter[Answer]) -> Answer:
    """Parse an answer from a JSON line. Raise ClusterError if it is malformed or reports a problem."""
    try:
        value = from_json(line)
        if isinstance(value, dict) and value.get("problem"):
            raise ClusterError(sanitize_line(str(value["problem"])))
        # Strictly, field by field: another machine, or another longctx version, wrote it.
        return kind.validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ClusterError(sanitize_line(f"an invalid answer: {where}: {first['msg']}")) from error
    except ValueError as error:
        raise ClusterError("an invalid answer") from error


def close_all(sessions: Sequence[WorkerSession]) -> None:
    """Close all sessions concurrently."""
    threads = [threading.Thread(target=session.close, daemon=True) for session in sessions]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 3 * _END_SECONDS
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
