"""This machine's network interfaces and RDMA adapters, and gloo's interface choice."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field

from launcher.doctor.check_result import Text
from longctx.errors import ClusterError
from parallel.runtime.interface import INTERFACE_VARIABLE, interface_towards

_INFINIBAND = Path("/sys/class/infiniband")
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "lxc", "podman", "kube")
"""Name prefixes for interfaces that lead to containers on the same machine."""


Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Network interface."""

    name: Text
    addresses: tuple[Text, ...]
    """IPv4 and IPv6 addresses; link-local ones without their interface suffix."""
    is_up: bool = True
    megabits: Count = 0
    """Speed reported by the driver; 0 if it reports none."""
    mtu: Count = 0


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """RDMA adapter port; NCCL calls it HCA."""

    name: Text
    port: Count
    is_active: bool
    link: Text
    """``InfiniBand``, or ``Ethernet`` for RoCE."""


def read_interfaces() -> list[Interface]:
    """Return this machine's interfaces that have an address."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        # IPv4 first: ranks rendezvous at these addresses.
        known = tuple(
            address.address.partition("%")[0]
            for family in (socket.AF_INET, socket.AF_INET6)
            for address in addresses
            if address.family == family
        )
        state = states.get(name)
        if known and state is not None:
            found.append(Interface(name=name, addresses=known, is_up=state.isup, megabits=state.speed, mtu=state.mtu))
    return found


def read_adapters(folder: Path = _INFINIBAND) -> list[Adapter]:
    """Return this machine's RDMA adapter ports; empty if ``folder`` does not exist."""
    found = []
    for path in sorted(folder.glob("*/ports/*")):
        # Ports are numbered from 1. Skip other names, in case the kernel's layout grows.
        if not path.name.isdigit():
            continue
        found.append(
            Adapter(
                name=path.parent.parent.name,
                port=int(path.name),
                # The file contains for example "4: ACTIVE".
                is_active="ACTIVE" in _read(path / "state"),
                link=_read(path / "link_layer"),
            )
        )
    return found


def gloo_choice(
    master: str, interfaces: Sequence[Interface], environment: Mapping[str, str] = os.environ
) -> tuple[str, str]:
    """Return name and address of the interface gloo selects if ranks rendezvous at ``master``.

    Raise ClusterError if GLOO_SOCKET_IFNAME names no local interface, or no interface leads to ``master``.
    """
    named = environment.get(INTERFACE_VARIABLE, "")
    # gloo alternates between several interfaces; the first one represents them.
    name = named.split(",")[0] or interface_towards(master)
    for interface in interfaces:
        if interface.name == name:
            return interface.name, interface.addresses[0]
    names = ", ".join(interface.name for interface in interfaces)
    if named:
        raise ClusterError(f"{INTERFACE_VARIABLE}={named} is not an interface there; available: {names}")
    raise ClusterError(f"no interface has a route to {master}; available: {names}")


def is_loopback(name: str) -> bool:
    """Return whether an interface reaches only its own machine."""
    return name == "lo" or (name.startswith("lo") and name[2:].isdigit())


def is_virtual(name: str) -> bool:
    """Return whether an interface leads to containers or virtual machines on its own machine."""
    return name.startswith(_VIRTUAL)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
