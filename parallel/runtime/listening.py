"""Rendezvous host, and sockets that listen only there."""

from __future__ import annotations

import contextlib
import os
import random
import socket

from parallel.runtime.launched import environment_rank, ranks_of_machine

_MOST_WAITING = 4096
"""Backlog: connections that may arrive at once."""
_LOOPBACK = "127.0.0.1"
_OWN_PORTS = (10_000, 30_000)
"""Below the range that systems use for outgoing connections."""


def is_agents_store() -> bool:
    """Return True if ranks rendezvous in torchrun's own store, which outlives restarted ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def rendezvous_host() -> str:
    """Return the rendezvous host: ``MASTER_ADDR``, or the loopback if one launcher started all ranks.

    A run on one machine then has no port that another machine can reach.
    """
    host = os.environ.get("MASTER_ADDR", _LOOPBACK)
    if is_agents_store() or not is_one_machine() or _is_loopback(host):
        return host
    return _LOOPBACK


def is_one_machine() -> bool:
    """Return True if one launcher started all ranks."""
    return ranks_of_machine() == environment_rank()[1]


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens only at the address of ``host``; ``port`` 0 picks a free one.

    If ``host`` resolves to no address on this machine, as behind a load balancer, listen on all of them. Raise OSError
    if the port is taken.
    """
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        assert kind == socket.SOCK_STREAM
        if _is_own(str(address[0]), family):
            return socket.create_server(address[:2], family=family, backlog=_MOST_WAITING)
    # The system may support IPv6 but have it disabled.
    with contextlib.suppress(OSError, ValueError):
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_MOST_WAITING)
    return socket.create_server(("", port), backlog=_MOST_WAITING)


def free_port() -> int:
    """Return a currently free port on the loopback.

    Ports chosen by the system are in the range for outgoing connections, so another program could take one before the
    ranks bind it.
    """
    while True:
        port = random.randrange(*_OWN_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((_LOOPBACK, port))
            return port


def own_address(listener: socket.socket) -> tuple[str, int]:
    """Return the address at which a local process reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    if host in ("::", "0.0.0.0"):
        host = _LOOPBACK
    return host, port


def _is_own(address: str, family: int) -> bool:
    """Return True if ``address`` belongs to this machine, i.e. a socket can bind to it."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
