"""Orders to a worker, and every way in which an answer may be none."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from launcher.doctor.network.network_check import probe_hosts
from launcher.doctor.session import MARK, WorkerSession, close_all
from longctx.errors import ClusterError
from tests.launcher.doctor.samples import put_ssh

ANY = TypeAdapter(dict[str, Any])


def worker(script: str) -> WorkerSession:
    """A Python program in the place of the worker."""
    return WorkerSession("node-01", [sys.executable, "-u", "-c", f"import sys, time\n{script}"])


@pytest.fixture
def session(request) -> Iterator[WorkerSession]:
    made = worker(request.param)
    yield made
    made.close()


ECHO = f"""
print("Welcome!")
for line in sys.stdin:
    print("noise"); print({MARK!r} + '{{"heard": ' + line.strip() + '}}')
"""


@pytest.mark.parametrize("session", [ECHO], indirect=True)
def test_answers_among_the_noise_of_a_login_script(session):
    for number in range(3):
        assert session.ask(30, ANY, do="x", number=number) == {"heard": {"do": "x", "number": number}}


@pytest.mark.parametrize(
    ("session", "said"),
    [
        ("sys.exit('Permission denied (publickey).')", "it ended: Permission denied"),
        ("sys.exit(7)", "it ended: exit code 7"),
        (f"input(); print({MARK!r} + 'x')", "an invalid answer"),
        (f"input(); print({MARK!r} + '[1]')", "an invalid answer"),
        (f"input(); print({MARK!r} + '[' * 9999)", "an invalid answer"),
        (f"""input(); print({MARK!r} + '{{"problem": "no \\\\u001b[2Jway"}}')""", r"no  \[2Jway|no \[2Jway"),
    ],
    indirect=["session"],
)
def test_answers_that_are_none(session, said):
    with pytest.raises(ClusterError, match=said):
        session.ask(30, ANY, do="x")
    # What comes after it is told too, and does not hang.
    with pytest.raises(ClusterError):
        session.ask(1, ANY, do="x")


def test_a_worker_that_does_not_end_is_ended():
    stubborn = worker("time.sleep(600)")
    started = time.monotonic()
    close_all([stubborn])
    assert time.monotonic() - started < 30
    assert stubborn._process.returncode is not None


def test_no_ssh_at_all_is_told_of_every_host(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    survey = probe_hosts(["node-01", "node-02"], port=0)
    assert survey.failures == dict.fromkeys(["node-01", "node-02"], "this machine has no ssh")


def test_more_hosts_than_connections_are_a_sample(tmp_path, monkeypatch):
    put_ssh(tmp_path, monkeypatch, "exit 255")
    monkeypatch.setattr("launcher.doctor.network.network_check.MOST_HOSTS", 3)
    survey = probe_hosts([f"node-{number}" for number in range(8)], port=0)
    assert survey.hosts == ["node-0", "node-2", "node-5"]
