"""What a host answers of its network, as values of known types: another machine wrote it."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.doctor.finding import printable
from launcher.doctor.network.interfaces import Adapter, Interface
from launcher.doctor.network.nccl import NcclNetwork
from longctx.errors import ClusterError

_LARGEST_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """The network as one host sees it."""

    interface: str
    """The one that gloo takes."""
    address: str
    port: int
    """Where it listens for the other hosts."""
    interfaces: Sequence[Interface]
    adapters: Sequence[Adapter]
    nccl: NcclNetwork
    """What NCCL would take, by its rules."""
    environment: Mapping[str, str]
    """The variables there that gloo and NCCL read."""
    num_gpus: int
    machine: str
    """Equal for two names of one machine."""


def network_from_json(value: Mapping[str, Any]) -> HostNetwork:
    """What ``worker.py`` answers to "listen". ClusterError where it is anything else."""
    environment = _object(value, "environment")
    # Field by field: a dictionary that is handed on whole would let another machine choose what is set here.
    return HostNetwork(
        interface=text_from_json(value, "interface"),
        address=_address(value),
        port=_port(value),
        interfaces=[_interface(item) for item in _list(value, "interfaces")],
        adapters=[_adapter(item) for item in _list(value, "adapters")],
        nccl=nccl_from_json(value.get("nccl")),
        environment={printable(str(name)): printable(str(text)) for name, text in environment.items()},
        num_gpus=_count(value, "num_gpus"),
        machine=text_from_json(value, "machine"),
    )


def place_from_json(value: Mapping[str, Any]) -> tuple[str, int]:
    """An address and a port. ClusterError where it is anything else."""
    return _address(value), _port(value)


def problems_from_json(value: Mapping[str, Any]) -> list[str]:
    """A line of text for each port that was tried. ClusterError where it is anything else."""
    return [printable(str(line)) for line in _list(value, "problems")]


def nccl_from_json(value: Any) -> NcclNetwork:
    """NCCL's network. ClusterError where it is anything else."""
    if not isinstance(value, dict):
        raise ClusterError("it says nothing of NCCL")
    return NcclNetwork(
        transport=text_from_json(value, "transport"),
        devices=tuple(printable(str(name)) for name in _list(value, "devices")),
        meets_at=text_from_json(value, "meets_at"),
        was_asked=value.get("was_asked") is True,
    )


def _interface(item: Any) -> Interface:
    if not isinstance(item, dict):
        raise ClusterError("an interface that is none")
    return Interface(
        name=text_from_json(item, "name"),
        addresses=tuple(printable(str(address)) for address in _list(item, "addresses")),
        is_up=item.get("is_up") is True,
        megabits=_count(item, "megabits"),
        mtu=_count(item, "mtu"),
    )


def _adapter(item: Any) -> Adapter:
    if not isinstance(item, dict):
        raise ClusterError("an adapter that is none")
    return Adapter(
        name=text_from_json(item, "name"),
        port=_count(item, "port"),
        is_active=item.get("is_active") is True,
        link=text_from_json(item, "link"),
        rate=text_from_json(item, "rate"),
    )


def _address(value: Mapping[str, Any]) -> str:
    """An IP address: other machines are going to connect to it."""
    # No name: that would be looked up on each host anew, and may be found elsewhere.
    try:
        return str(ipaddress.ip_address(text_from_json(value, "address")))
    except ValueError as error:
        raise ClusterError("its address is none") from error


def _port(value: Mapping[str, Any]) -> int:
    port = _count(value, "port")
    if not 0 < port <= _LARGEST_PORT:
        raise ClusterError("its port is none")
    return port


def _count(value: Mapping[str, Any], name: str) -> int:
    count = value.get(name)
    # True is an int to Python.
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ClusterError(f"its {name} is no number")
    return count


def text_from_json(value: Mapping[str, Any], name: str) -> str:
    """A field that is text, of which only printable characters are kept. ClusterError where it is none."""
    text = value.get(name)
    if not isinstance(text, str):
        raise ClusterError(f"its {name} is no text")
    return printable(text)


def _list(value: Mapping[str, Any], name: str) -> list[Any]:
    items = value.get(name)
    if not isinstance(items, list):
        raise ClusterError(f"its {name} is no list")
    return items


def _object(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    items = value.get(name)
    if not isinstance(items, dict):
        raise ClusterError(f"its {name} is none")
    return items
