"""A run's folder: it belongs to one process at a time, and a log that cannot be written ends no run.

A run that has taken all its steps changes nothing in it when it is started once more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.run_folder import HOLDER_FILE, LOGS, _LogFile, hold_folder, start_logging
from launcher.wording import ONLY_IN_FILE
from longctx.errors import ClusterError
from tests.launcher.workers import run, train


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
    with pytest.raises(ClusterError, match=rf"is in use by another run: process {held} on .* since"):
        hold_folder(tmp_path, wait_seconds=0.25)
    said = capfd.readouterr().err
    assert said.count("Waiting up to 0 s for it to end.") == 1, "at once, and once"
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
            assert said == "Log lines are missing from /dev/full: errno 28. The run continues.\n"
            break
    else:
        pytest.fail("nothing was said")
    handler.handle(logging.LogRecord("launcher.training", 20, "", 0, "a line", (), None))
    assert capsys.readouterr().out == ""


def test_details_are_in_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / LOGS).mkdir()
    loggers = [logging.getLogger(name) for name in ("launcher", "parallel", "data_pipeline", "longctx", "__main__")]
    before = [(logger.level, logger.propagate, logger.handlers) for logger in loggers]
    try:
        start_logging(tmp_path, 0)
        logging.getLogger("launcher.training.start").info("for a person")
        logging.getLogger("launcher.training.start").info("for the file", extra={ONLY_IN_FILE: True})
        logging.getLogger("longctx.kernels.attention.kernel_selection").info("the kernel")
        logging.getLogger("longctx.kernels.attention.kernel_selection").warning("a slow kernel")
    finally:
        for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
            logger.level, logger.propagate, logger.handlers = level, propagate, handlers
    assert capsys.readouterr().out.split("\n") == ["for a person", "a slow kernel", ""]
    lines = (tmp_path / LOGS / "rank_0.log").read_text().splitlines()
    assert [line.rsplit(": ", 1)[1] for line in lines] == [
        "for a person",
        "for the file",
        "the kernel",
        "a slow kernel",
    ]


SHORT = {"train.steps": 2, "parallel.context": 1, "validation.every_steps": 2}


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """When each file was last written and what it holds, but for logs, which say that there is nothing to do."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "logs" not in path.parts)
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def finish_and_start_again(shards: Path, output: Path) -> None:
    train(shards, output, SHORT)
    before = files_of(output)
    assert "config.toml" in before
    # Fewer steps than were taken, and other settings than they were taken with.
    for changed in ({}, {"train.steps": 1}, {"train.lr": 1e-3}):
        train(shards, output, {**SHORT, "run.resume": "latest", **changed})
        assert files_of(output) == before, changed
    log = (output / "logs" / "rank_0.log").read_text()
    assert log.count("Nothing to do: the run is at step 2 of") == 3


def test_nothing_is_written_when_nothing_is_to_be_done(shards, tmp_path):
    run(finish_and_start_again, 1, shards, tmp_path / "run")
