"""Ports that answer, refuse, stay silent or belong to somebody else; every attempt ends in time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from launcher.doctor.network.ports import Listener, new_word, try_port, try_ports

WORD = new_word()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener("127.0.0.1", 0, WORD)
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A port at which nobody accepts."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen(0)
        yield made


def port_of(server: socket.socket) -> int:
    return server.getsockname()[1]


def test_a_port_that_answers(listener):
    # Several times, and at the same time.
    assert try_ports([("127.0.0.1", listener.port)] * 5, WORD) == [""] * 5
    assert try_ports([], WORD) == []


def test_a_port_at_which_nobody_listens(listener):
    listener.close()
    assert try_port("127.0.0.1", listener.port, WORD) == "connection refused"
    # The port is free at once.
    again = Listener("", listener.port, WORD)
    assert try_port("127.0.0.1", again.port, WORD) == ""
    again.close()


def test_a_socket_that_never_answers_ends_in_time(server):
    started = time.monotonic()
    assert try_port("127.0.0.1", port_of(server), WORD, seconds=0.3) == "connected, and no word within 0.3 s"
    assert time.monotonic() - started < 10


def test_a_port_whose_packets_are_dropped_ends_in_time(server):
    """A queue that is full drops who knocks, as a firewall does."""
    waiting = [socket.socket() for _ in range(4)]
    for client in waiting:
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port_of(server)))
    started = time.monotonic()
    assert try_port("127.0.0.1", port_of(server), WORD, seconds=0.3) == "no answer within 0.3 s"
    assert time.monotonic() - started < 10
    for client in waiting:
        client.close()


def test_another_program_at_the_port():
    other = Listener("127.0.0.1", 0, "SSH-2.0-OpenSSH_9.6")
    assert try_port("127.0.0.1", other.port, WORD) == "another program answers"
    other.close()


def test_a_network_that_is_not_there():
    # An address of a documentation network with an interface that does not exist.
    assert try_port("fe80::1%no-such", 9, WORD) not in ("", "connection refused")


def test_a_listener_at_the_new_loopback():
    try:
        made = Listener("::1", 0, WORD)
    except OSError:
        pytest.skip("no IPv6 here")
    assert try_port("::1", made.port, WORD) == ""
    made.close()
