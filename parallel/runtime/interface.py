"""Network interface that gloo listens at."""

from __future__ import annotations

import os
import socket

import psutil

from parallel.runtime.listening import meeting_host

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Variable by which a user names the interface, and by which gloo hears of it."""


def choose_gloo_interface() -> None:
    """Name the interface that routes to the ranks' meeting host, unless the user named one.

    By default gloo advertises the address of the host's name, which on many machines is 127.0.0.1 and unreachable
    from the others.
    """
    if os.environ.get(INTERFACE_VARIABLE) or "MASTER_ADDR" not in os.environ:
        return
    name = interface_towards(meeting_host())
    if name is not None:
        os.environ[INTERFACE_VARIABLE] = name


def interface_towards(address: str) -> str | None:
    """Return the interface from which this machine sends to ``address``; None if the system has no route."""
    family = socket.AF_INET
    if ":" in address:
        family = socket.AF_INET6
    try:
        # Connecting a UDP socket sends nothing; the system only chooses the route, and with it the own address.
        with socket.socket(family, socket.SOCK_DGRAM) as s:
            s.connect((address, 9))
            own = s.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        # The loopback has all of 127.0.0.0/8, and names one address of it.
        is_loopback = own.startswith("127.") and name == "lo"
        own_addresses = [a.address for a in addresses if a.family == family]
        if own in own_addresses or (is_loopback and own_addresses):
            return name
    return None
