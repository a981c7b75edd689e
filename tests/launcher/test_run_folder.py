"""A run's folder: it belongs to one process at a time, and a log that cannot be written ends no run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.run_folder import HOLDER_FILE, LOGS, _LogFile, hold_folder
from longctx.errors import ClusterError


@pytest.fixture
def held(tmp_path: Path) -> Iterator[int]:
    """A process that has the folder; it does nothing else."""
    (tmp_path / LOGS).mkdir()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        hold_folder(tmp_path)
        os.write(write, b"x")
        signal.pause()
        os._exit(0)
    os.read(read, 1)
    yield child
    # Gone already where the test has ended it.
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(read)
    os.close(write)


def test_a_folder_belongs_to_one_process_until_that_ends(held: int, tmp_path: Path, capfd):
    with pytest.raises(ClusterError, match=rf"belongs to a run that is under way: process {held} on .* since"):
        hold_folder(tmp_path, wait_seconds=0.25)
    said = capfd.readouterr().err
    assert said.count("Waiting 0 s at most for it to end.") == 1, "at once, and once"
    assert f"process {held} on" in said
    os.kill(held, signal.SIGKILL)
    os.waitpid(held, 0)
    hold_folder(tmp_path, wait_seconds=5.0)
    assert f"process {os.getpid()} on" in (tmp_path / LOGS / HOLDER_FILE).read_text()
    # The same process may go on in it, as tests and `resume` within one do.
    hold_folder(tmp_path, wait_seconds=0.0)


def test_a_start_waits_for_the_run_before_it(held: int, tmp_path: Path):
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(held, signal.SIGKILL))
        signal.pause()
        os._exit(0)
    hold_folder(tmp_path, wait_seconds=20.0)
    for process in (child, held):
        os.waitpid(process, 0)


def test_where_a_file_system_has_no_locks_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / LOGS).mkdir()

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.lockf", refuse)
    hold_folder(tmp_path, wait_seconds=0.0)


def test_a_full_log_is_said_once(capsys: pytest.CaptureFixture[str]):
    handler = _LogFile("/dev/full")
    for name, level in (("launcher.cluster.exit", 40), ("launcher.training", 20), ("launcher.training", 20)):
        # What ends a run is said by itself, below everything.
        handler.handle(logging.LogRecord(name, level, "", 0, "a line", (), None))
        said = capsys.readouterr().out
        if name == "launcher.cluster.exit":
            assert said == ""
        elif said:
            assert said == "Lines are missing from /dev/full: errno 28. The run goes on.\n"
            break
    else:
        pytest.fail("nothing was said")
    handler.handle(logging.LogRecord("launcher.training", 20, "", 0, "a line", (), None))
    assert capsys.readouterr().out == ""
