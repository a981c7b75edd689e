"""NCCL's network choice: reported by NCCL if there are GPUs to run it on, otherwise predicted by its rules.

NCCL may hang if a port is blocked, and such a call cannot be cancelled. A daemon thread therefore makes it, so that the
process can exit without waiting.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher.doctor.check_result import Text, first_line
from launcher.doctor.network.interfaces import Adapter, Interface
from parallel.comm.process_groups import warm, world_group

START_SECONDS = 60.0
"""Limit for NCCL to load and connect its ranks."""
_STORE_SECONDS = 20.0

SOCKET, INFINIBAND = "Socket", "IB"
"""NCCL's names for its built-in transports between machines. Plug-ins have others, such as ``AWS Libfabric``."""

# Lines of NCCL 2.5 to 2.32: "... NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>"
_NETWORK = re.compile(r"NCCL INFO Using network (.+)")
_DEVICES = re.compile(r"NCCL INFO NET/(IB|Socket) ?: Using ?(.*)")
_DEVICE = re.compile(r"\[\d+\] ?([^\s\[\];,={}]+)")
_BOOTSTRAP = re.compile(r"NCCL INFO Bootstrap ?: Using (?:\[\d+\])?([^:\s]+):")
_OUT_OF_BAND = re.compile(r"; OOB ([^:\s]+):")


@dataclass(frozen=True, kw_only=True)
class NcclNetwork:
    """Network that NCCL uses between machines."""

    transport: Text
    """``IB``, ``Socket``, or a plug-in's name; empty if NCCL finds no network."""
    devices: tuple[Text, ...] = ()
    """``mlx5_0:1/IB``, or interfaces; empty for a plug-in."""
    bootstrap_interface: Text = ""
    """Interface over which NCCL's ranks rendezvous."""
    is_reported: bool = False
    """True if NCCL itself reported this network."""

    def describe(self) -> str:
        """Return a one-line description."""
        devices = ", ".join(self.devices)
        if self.transport == SOCKET:
            return f"TCP sockets over {devices}"
        text = f"{self.transport or 'no network'}"
        if devices:
            text += f" over {devices}"
        if self.bootstrap_interface:
            text += f", meeting over {self.bootstrap_interface}"
        return text


def parse_log(text: str) -> NcclNetwork | None:
    """Parse the network from NCCL's log (NCCL_DEBUG=INFO); None if NCCL did not get that far."""
    networks = _NETWORK.findall(text)
    if not networks:
        return None
    transport = networks[-1].strip()
    devices: tuple[str, ...] = ()
    bootstrap_interface = ""
    for kind, device_list in _DEVICES.findall(text):
        if kind == transport:
            chosen = device_list.partition(";")[0]
            # A socket's name is followed by its address, an adapter's by its port.
            devices = tuple(_without_address(name, kind) for name in _DEVICE.findall(chosen) if name != "RO")
    # All versions print Bootstrap; newer ones also print OOB, which overrides it. The last line counts.
    for pattern in (_BOOTSTRAP, _OUT_OF_BAND):
        if found := pattern.findall(text):
            bootstrap_interface = found[-1]
    return NcclNetwork(transport=transport, devices=devices, bootstrap_interface=bootstrap_interface, is_reported=True)


def predict_network(
    interfaces: Sequence[Interface], adapters: Sequence[Adapter], environment: Mapping[str, str] = os.environ
) -> NcclNetwork:
    """Predict the network from NCCL's documented rules and its source (misc/socket.cc, net_ib).

    Plug-ins (libnccl-net.so) are not covered.
    """
    names = socket_interfaces(interfaces, environment)
    bootstrap_interface = next(iter(names), "")
    active = [adapter for adapter in adapters if adapter.is_active and _is_chosen(adapter, environment)]
    # Any number except 0 disables InfiniBand.
    is_off = environment.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    wanted = environment.get("NCCL_NET", "")
    if active and bootstrap_interface and not is_off and wanted in ("", INFINIBAND):
        devices = tuple(f"{adapter.name}:{adapter.port}/{_kind(adapter)}" for adapter in active)
        return NcclNetwork(transport=INFINIBAND, devices=devices, bootstrap_interface=bootstrap_interface)
    if not names or wanted == INFINIBAND:
        return NcclNetwork(transport="")
    return NcclNetwork(transport=SOCKET, devices=tuple(names), bootstrap_interface=bootstrap_interface)


def socket_interfaces(interfaces: Sequence[Interface], environment: Mapping[str, str]) -> list[str]:
    """Return NCCL's socket interfaces: those in NCCL_SOCKET_IFNAME, or the first kind that exists."""
    names = [interface.name for interface in interfaces if interface.is_up]
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    if wanted:
        return list(filter(name_filter(wanted), names))
    # ncclFindInterfaces' order: IP over InfiniBand, real interfaces, and only then machine-local ones.
    for rule in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        if found := list(filter(name_filter(rule), names)):
            return found
    return []


def name_filter(rule: str) -> Callable[[str], bool]:
    """Return a predicate for NCCL's name notation: comma-separated prefixes, exact with ``=``, negated with ``^``."""
    is_excluding = rule.startswith("^")
    rule = rule.removeprefix("^")
    is_exact = rule.startswith("=")
    parts = [part for part in rule.removeprefix("=").split(",") if part]

    def fits(name: str) -> bool:
        matches = any(name == part or (not is_exact and name.startswith(part)) for part in parts)
        return matches != is_excluding

    return fits


def _is_chosen(adapter: Adapter, environment: Mapping[str, str]) -> bool:
    """Return whether NCCL_IB_HCA allows a port; a name in it may end in a port number."""
    rule = environment.get("NCCL_IB_HCA", "")
    if not rule:
        return True
    # "^" and "=" precede the full list, not each name.
    marks = rule[: len(rule) - len(rule.lstrip("^="))]
    chosen = []
    for part in rule[len(marks) :].split(","):
        name, _, port = part.partition(":")
        if not port or port == str(adapter.port):
            chosen.append(name)
    return name_filter(marks + ",".join(chosen))(adapter.name)


def _kind(adapter: Adapter) -> str:
    if adapter.link == "Ethernet":
        return "RoCE"
    return INFINIBAND


def _without_address(name: str, kind: str) -> str:
    if kind == SOCKET:
        return name.partition(":")[0]
    return name


def call_nccl(*, rank: int, world_size: int, gpu: int, store: tuple[str, int]) -> dict[str, Any]:
    """Run a tiny NCCL collective on a GPU; return the reported network and any fault as plain values.

    The ``world_size`` ranks, each with its own GPU, rendezvous at ``store``, the first rank's address and port.
    """
    fault = ""

    def work() -> None:
        nonlocal fault
        try:
            _start_nccl(rank, world_size, torch.device("cuda", gpu), store)
        except Exception as error:
            # Library errors too: their message is the only information.
            fault = first_line(error)

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "nccl"
        # NCCL reads these at first use. The user's own debug output goes to this file too, and is not needed.
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
        thread = threading.Thread(target=work, name="nccl", daemon=True)
        thread.start()
        thread.join(START_SECONDS)
        if thread.is_alive():
            fault = f"NCCL hangs: its ranks did not connect within {START_SECONDS:.0f} s"
        network = None
        if log.exists():
            network = parse_log(log.read_text(errors="replace"))
    return {"fault": fault, "network": network and asdict(network)}


def _start_nccl(rank: int, world_size: int, device: torch.device, place: tuple[str, int]) -> None:
    # The current device is per thread.
    torch.cuda.set_device(device)
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        timeout = timedelta(seconds=_STORE_SECONDS)
        # Do not wait for workers: a missing rank must not block those that arrive.
        store = dist.TCPStore(*place, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    timeout = timedelta(seconds=START_SECONDS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=timeout)
    warm(world_group())
    # The collective is only queued so far; NCCL may still be connecting its ranks.
    torch.cuda.synchronize(device)
