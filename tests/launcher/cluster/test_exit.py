"""How a command ends: exit code, one screen, said once."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from launcher.cluster import exit as exit_module
from launcher.cluster.exit import ABORTED, DONE, FAILED, USAGE_ERROR, run_to_exit_code
from launcher.run_folder import LOGS, start_logging
from longctx.errors import CheckpointError, ClusterError, ConfigError, DataError


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch):
    monkeypatch.setattr(exit_module, "HEAD_START_SECONDS", 0.0)


@pytest.fixture
def logs(tmp_path, _own_handlers):
    """A run's log folder that the log is written to."""
    (tmp_path / LOGS).mkdir()
    return tmp_path / LOGS


def raising(error: BaseException):
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x=1 must be 2."), USAGE_ERROR),
        (DataError("no data"), FAILED),
        (ClusterError("no host"), FAILED),
        (CheckpointError("no checkpoint"), FAILED),
    ],
)
def test_what_a_user_can_mend_is_said_once_without_a_traceback(error, code, capfd):
    assert run_to_exit_code(raising(error)) == code
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"\n{type(error).__name__}: {error}\n\n")


def test_rank_0_alone_speaks_of_what_all_ranks_raise_and_the_others_leave_it_the_time(capfd, monkeypatch):
    """The launcher ends every rank once one has ended badly: a silent rank that ends first would gag rank 0."""
    waited = []
    monkeypatch.setattr(exit_module.time, "sleep", waited.append)
    monkeypatch.setattr(exit_module, "HEAD_START_SECONDS", 7.0)
    for rank, expected, said in (("0", [], "\nConfigError: x\n\n"), ("1", [7.0, 7.0], "")):
        monkeypatch.setenv("RANK", rank)
        assert run_to_exit_code(raising(ConfigError("x"))) == run_to_exit_code(lambda: sys.exit(2)) == USAGE_ERROR
        assert waited == expected
        assert capfd.readouterr() == ("", said)


def test_with_a_run_folder_the_console_hears_once_and_the_log_of_every_rank_has_it(capfd, logs, monkeypatch):
    for rank in (0, 1):
        start_logging(logs.parent, rank)
        monkeypatch.setenv("RANK", str(rank))
        run_to_exit_code(raising(DataError("the shard is damaged")))
    out, err = capfd.readouterr()
    assert (out + err).count("the shard is damaged") == 1
    for rank in (0, 1):
        assert "the shard is damaged" in (logs / f"rank_{rank}.log").read_text()


def test_help_and_wrong_flags_keep_their_codes(capfd):
    ends = (lambda: None, lambda: sys.exit(0), lambda: sys.exit(), lambda: sys.exit(2), lambda: sys.exit("why"))
    assert [run_to_exit_code(end) for end in ends] == [DONE, DONE, DONE, USAGE_ERROR, FAILED]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_lost_peer_is_one_line_on_the_rank_that_lost_it(rank, capfd, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    error = RuntimeError("[gloo/transport/tcp/pair.cc:535] Connection closed by peer [127.0.0.1]:1234\nmore")
    assert run_to_exit_code(raising(error)) == FAILED
    said = capfd.readouterr().err
    assert f"rank {rank} lost contact with another rank and stops" in said
    assert "Traceback" not in said
    assert "more" not in said


@pytest.mark.parametrize("number", [errno.EROFS, errno.ESTALE])
def test_a_disk_that_is_gone_is_no_fault_of_ours(number, capfd):
    assert run_to_exit_code(raising(OSError(number, os.strerror(number), "metrics.jsonl"))) == FAILED
    err = capfd.readouterr().err
    assert f"rank 0 can no longer write: [Errno {number}]" in err
    assert "--run.resume latest" in err
    assert "Traceback" not in err


def test_our_own_faults_show_their_traceback_and_rank(capfd, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert run_to_exit_code(raising(KeyError("oops"))) == FAILED
    said = capfd.readouterr().err
    assert "rank 3 hit an unexpected error; this is a bug in longctx" in said
    assert "Traceback" in said
    assert "KeyError: 'oops'" in said


def test_an_interrupt(capfd):
    assert run_to_exit_code(raising(KeyboardInterrupt())) == ABORTED
    assert "--run.resume latest" in capfd.readouterr().err
