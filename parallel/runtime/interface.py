"""Network interface for gloo."""

from __future__ import annotations

import os
import socket

import psutil

from parallel.runtime.listening import rendezvous_host

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Set by the user to choose the interface; gloo reads it."""


def choose_gloo_interface() -> None:
    """Set the interface that routes to the rendezvous host, unless the user has set one.

    By default gloo advertises the address of the machine's hostname, which on many machines is 127.0.0.1 and not
    reachable from others.
    """
    if os.environ.get(INTERFACE_VARIABLE) or "MASTER_ADDR" not in os.environ:
        return
    name = interface_towards(rendezvous_host())
    if name is not None:
        os.environ[INTERFACE_VARIABLE] = name


def interface_towards(address: str) -> str | None:
    """Return the interface from which this machine sends to ``address``; None without a route."""
    family = socket.AF_INET
    if ":" in address:
        family = socket.AF_INET6
    try:
        # Connecting a UDP socket sends no packet: the system only selects the route, and with it the local address.
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((address, 9))
            own = s.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # The loopback covers 127.0.0.0/8 but lists one address.
        is_loopback = own.startswith("127.") and name == "lo"
        own_addresses = [a.address for a in addresses if a.family == family]
        if own in own_addresses or (is_loopback and own_addresses):
            return name
    return None
