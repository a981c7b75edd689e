"""NCCL's choice of network: read from its own log, and by its rules. Calls are made with gloo in NCCL's place."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from launcher.doctor.network import nccl
from launcher.doctor.network.interfaces import Adapter, Interface
from launcher.doctor.network.nccl import call_nccl, parse_log, predict_network
from tests.helpers import run_distributed

# The forms of lines are those of logs that users of NCCL 2.4 to 2.26 have shown in its issues; names are made up.
OLD_SOCKETS = """\
node-1:17:17 [0] NCCL INFO Bootstrap : Using [0]ens3:10.0.0.1<0>
node-1:17:17 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).
node-1:17:17 [0] NCCL INFO NET/IB : No device found.
node-1:17:17 [0] NCCL INFO NET/Socket : Using [0]ens3:10.0.0.1<0> [1]virbr0:10.0.1.1<0>
node-1:17:17 [0] NCCL INFO Using network Socket
"""
ADAPTERS = """\
node-1:17:17 [0] NCCL INFO Bootstrap : Using bond0:10.0.0.1<0>
NCCL version 2.19.3+cuda12.3
node-1:17:21 [0] NCCL INFO NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/IB [RO]; OOB enp1:10.0.0.1<0>
node-1:17:21 [0] NCCL INFO Using non-device net plugin version 0
node-1:17:21 [0] NCCL INFO Using network IB
"""
MERGED = """\
node-1:17:21 [0] NCCL INFO NET/IB : Using [0]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB} [1]mlx5_2:1/IB ; OOB eth0:10.0.0.1<0>
node-1:17:21 [0] NCCL INFO Using network IB
"""
NEWER = """\
node-1:17:17 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
node-1:17:21 [0] NCCL INFO NET/IB : No device found.
node-1:17:21 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>
node-1:17:21 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
node-1:17:21 [0] NCCL INFO Initialized NET plugin Socket
node-1:17:21 [0] NCCL INFO Using network Socket
"""
PLUG_IN = """\
node-1:17:17 [0] NCCL INFO Bootstrap : Using ens32:10.0.0.1<0>
node-1:17:21 [0] NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)
node-1:17:21 [0] NCCL INFO Using network AWS Libfabric
"""


@pytest.mark.parametrize(
    ("log", "transport", "devices", "meets_at"),
    [
        (OLD_SOCKETS, "Socket", ("ens3", "virbr0"), "ens3"),
        (ADAPTERS, "IB", ("mlx5_10:1/RoCE", "mlx5_11:1/IB"), "enp1"),
        (MERGED, "IB", ("mlx5_0:1/IB", "mlx5_1:1/IB", "mlx5_2:1/IB"), "eth0"),
        (NEWER, "Socket", ("eth0",), "eth0"),
        (PLUG_IN, "AWS Libfabric", (), "ens32"),
    ],
    ids=["sockets", "adapters", "merged", "newer", "plug-in"],
)
def test_what_nccl_says(log, transport, devices, meets_at):
    network = parse_log(log)
    assert network is not None
    assert (network.transport, network.devices, network.bootstrap_interface) == (transport, devices, meets_at)
    assert network.is_reported


@pytest.mark.parametrize("log", ["", "NCCL version 2.19.3\n", OLD_SOCKETS.partition("Using network")[0]])
def test_nccl_that_got_no_further(log):
    assert parse_log(log) is None


def interfaces(*names: str) -> list[Interface]:
    return [Interface(name=name, addresses=("10.0.0.1",)) for name in names]


ALL = interfaces("lo", "docker0", "virbr0", "eth0", "ib0")
HCA = [
    Adapter(name="mlx5_0", port=1, is_active=True, link="InfiniBand"),
    Adapter(name="mlx5_1", port=1, is_active=False, link="InfiniBand"),
    Adapter(name="mlx5_10", port=2, is_active=True, link="Ethernet"),
]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (ALL, ("ib0",)),
        (ALL[:4], ("eth0",)),
        (ALL[:3], ("docker0",)),
        (interfaces("lo", "virbr0"), ("lo",)),
        (interfaces("lo", "eth0", "eth1"), ("eth0", "eth1")),
        ([Interface(name="eth0", addresses=("10.0.0.1",), is_up=False), *ALL[:1]], ("lo",)),
    ],
)
def test_interfaces_by_nccl_s_order(names, chosen):
    network = predict_network(names, [], {})
    assert (network.transport, network.devices, network.is_reported) == ("Socket", chosen, False)


@pytest.mark.parametrize(
    ("rule", "chosen"),
    [
        ("eth", ("eth0",)),
        ("^docker,lo", ("virbr0", "eth0", "ib0")),
        ("=eth", ()),
        ("=eth0,ib0", ("eth0", "ib0")),
        ("^=eth0", ("lo", "docker0", "virbr0", "ib0")),
    ],
)
def test_interfaces_that_the_user_names(rule, chosen):
    network = predict_network(ALL, [], {"NCCL_SOCKET_IFNAME": rule})
    assert network.devices == chosen
    assert network.transport == ("Socket" if chosen else "")


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, ("mlx5_0:1/IB", "mlx5_10:2/RoCE")),
        ({"NCCL_IB_HCA": "mlx5_1"}, ("mlx5_10:2/RoCE",)),
        ({"NCCL_IB_HCA": "=mlx5_0"}, ("mlx5_0:1/IB",)),
        ({"NCCL_IB_HCA": "^mlx5_10"}, ("mlx5_0:1/IB",)),
        ({"NCCL_IB_HCA": "mlx5_10:2"}, ("mlx5_10:2/RoCE",)),
    ],
)
def test_adapters_that_are_active_and_named(environment, chosen):
    network = predict_network(ALL, HCA, environment)
    assert (network.transport, network.devices, network.bootstrap_interface) == ("IB", chosen, "ib0")


@pytest.mark.parametrize(
    "environment",
    [{"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}, {"NCCL_IB_HCA": "=mlx5"}, {"NCCL_IB_HCA": "mlx5_10:1"}],
)
def test_adapters_that_are_left_out(environment):
    assert predict_network(ALL, HCA, environment).transport == "Socket"


def test_no_network():
    assert predict_network([], [], {}).describe() == "no network"
    assert predict_network(ALL, [], {"NCCL_NET": "IB"}).transport == ""


def speaking(*args, **options) -> None:
    """NCCL that starts, and writes its log where it was told to."""
    assert os.environ["NCCL_DEBUG"] == "INFO"
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(ADAPTERS)


def failing(*args, **options) -> None:
    speaking()
    raise RuntimeError("NCCL error: Duplicate GPU detected\nstack")


def hanging(*args, **options) -> None:
    threading.Event().wait(3)


def call(start, world_size: int, port: int) -> dict:
    """A call in a process of a test, whose gloo group stands for NCCL's, which ``start`` starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", start)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(nccl, "START_SECONDS", 0.3 if start is hanging else 60.0)
        return call_nccl(rank=dist.get_rank(), world_size=world_size, gpu=0, store=("127.0.0.1", port))


def check_calls(world_size: int, port: int) -> None:
    told = call(speaking, world_size, port)
    assert told["fault"] == ""
    assert (told["network"]["transport"], told["network"]["is_reported"]) == ("IB", True)
    if world_size > 1:
        return
    told = call(failing, world_size, port)
    assert told["fault"] == "NCCL error: Duplicate GPU detected"
    assert told["network"]["devices"] == ("mlx5_10:1/RoCE", "mlx5_11:1/IB"), "what it said before is kept"
    # Without a GPU PyTorch itself says so.
    told = call_nccl(rank=0, world_size=1, gpu=0, store=("", 0))
    assert told["fault"]
    assert told["network"] is None
    # Nobody waits for a call that hangs.
    assert call(hanging, world_size, port)["fault"].startswith("NCCL hangs: its ranks did not connect")


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_a_call_says(world_size):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_distributed(check_calls, world_size, world_size, port)
