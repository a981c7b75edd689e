"""The guard of a rank that is alone on its machine: it ends a stopped one, and only once the run is over."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from parallel.runtime.watch.stopped_rank_guard import is_connected, is_stopped
from tests.helpers import REPOSITORY

SECONDS = 30.0
_RANK = """
import socket, sys, time
from parallel.runtime.watch.stopped_rank_guard import start_guard
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])), source_address=("127.0.0.2", 0))
start_guard(0.2, int(sys.argv[1]))
print("ready", flush=True)
line.recv(1)
"""


@pytest.fixture
def hub() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.slow
def test_a_stopped_rank_is_let_go_on_when_the_run_is_over_and_not_before(hub):
    port = hub.getsockname()[1]
    command = [sys.executable, "-c", _RANK, str(port)]
    rank = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        line, _ = hub.accept()
        (guard,) = psutil.Process(rank.pid).children()
        rank.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        assert is_stopped(rank.pid)
        assert is_connected(port), "the run goes on: somebody has stopped it for a while"
        line.close()
        # It goes on, reads that the hub is gone, and ends by itself.
        assert rank.wait(SECONDS) == 0
        guard.wait(SECONDS)
    finally:
        rank.kill()
        rank.wait()


def test_a_connection_within_one_machine_is_nobody_elses(hub):
    port = hub.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        assert not is_connected(port)
    with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)):
        assert is_connected(port)
