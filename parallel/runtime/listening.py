"""Host at which a run's ranks meet, and sockets that listen only there."""

from __future__ import annotations

import contextlib
import os
import random
import socket

from parallel.runtime.launched import environment_rank, ranks_of_machine

_MOST_WAITING = 4096
"""Connections that may arrive at once."""
_LOOPBACK = "127.0.0.1"
_OWN_PORTS = (10_000, 30_000)
"""Below those that systems give to outgoing connections."""


def is_agents_store() -> bool:
    """Return whether ranks meet in torchrun's own store, which outlives the ranks that it starts again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meeting_host() -> str:
    """Return the host at which ranks meet: ``MASTER_ADDR``, or the loopback if one launcher started all of them.

    A run on one machine then has no port that another machine can reach.
    """
    host = os.environ.get("MASTER_ADDR", _LOOPBACK)
    if is_agents_store() or not is_one_machine() or _is_loopback(host):
        return host
    return _LOOPBACK


def is_one_machine() -> bool:
    """Return whether one launcher started all ranks."""
    return ranks_of_machine() == environment_rank()[1]


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens only at the address of ``host``; ``port`` 0 is any free one.

    If no address of this machine is ``host``'s, as behind a load balancer, it listens on all of them.

    Raise OSError if the port is taken.
    """
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        assert kind == socket.SOCK_STREAM
        if _is_own(str(address[0]), family):
            return socket.create_server(address[:2], family=family, backlog=_MOST_WAITING)
    # The system may know IPv6 and have it switched off.
    with contextlib.suppress(OSError, ValueError):
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_MOST_WAITING)
    return socket.create_server(("", port), backlog=_MOST_WAITING)


def free_port() -> int:
    """Return a port of the loopback that nobody listens at now.

    Not one that the system chooses, which lies where outgoing connections get theirs: another program may have it
    before the ranks do.
    """
    while True:
        port = random.randrange(*_OWN_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_LOOPBACK, port))
            return port


def own_address(listener: socket.socket) -> tuple[str, int]:
    """Return the address at which a process of this machine reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    if host in ("::", "0.0.0.0"):
        host = _LOOPBACK
    return host, port


def _is_own(address: str, family: int) -> bool:
    """Return whether ``address`` is one of this machine: a socket can be bound to it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
