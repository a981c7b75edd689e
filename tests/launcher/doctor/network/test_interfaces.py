"""Interfaces and adapters of a machine, and the interface that gloo takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.doctor.network.interfaces import Interface, gloo_choice, read_adapters, read_interfaces
from longctx.errors import ClusterError

LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
ETH = Interface(name="eth0", addresses=("10.0.0.1", "fd00::1"))


def put_port(folder: Path, name: str, port: int, **files: str) -> None:
    """A port of an adapter, as the kernel shows it."""
    path = folder / name / "ports" / f"{port}"
    path.mkdir(parents=True)
    for file, text in files.items():
        (path / file).write_text(f"{text}\n")


def test_this_machine_has_a_loopback_with_its_old_address_first():
    (loopback,) = [interface for interface in read_interfaces() if interface.name == "lo"]
    assert loopback.addresses[0] == "127.0.0.1"
    assert loopback.is_up
    assert loopback.mtu > 0


def test_adapters_as_the_kernel_shows_them(tmp_path):
    put_port(tmp_path, "mlx5_0", 1, state="4: ACTIVE", link_layer="InfiniBand")
    put_port(tmp_path, "mlx5_1", 1, state="1: DOWN", link_layer="Ethernet")
    put_port(tmp_path, "mlx5_1", 2)
    (tmp_path / "mlx5_0" / "ports" / "other").mkdir()
    first, second, unreadable = read_adapters(tmp_path)
    assert (first.name, first.port, first.is_active, first.link) == ("mlx5_0", 1, True, "InfiniBand")
    assert (second.name, second.is_active, second.link) == ("mlx5_1", False, "Ethernet")
    assert (unreadable.port, unreadable.is_active, unreadable.link) == (2, False, "")


def test_no_adapters(tmp_path):
    assert read_adapters(tmp_path / "missing") == []


def test_gloo_takes_the_way_to_the_meeting_place():
    assert gloo_choice("127.0.0.1", [ETH, LO], {}) == ("lo", "127.0.0.1")


@pytest.mark.parametrize("named", ["eth0", "eth0,lo"])
def test_gloo_takes_what_the_user_names(named):
    assert gloo_choice("127.0.0.1", [LO, ETH], {"GLOO_SOCKET_IFNAME": named}) == ("eth0", "10.0.0.1")


def test_an_interface_that_is_not_there():
    with pytest.raises(ClusterError, match="GLOO_SOCKET_IFNAME=ib0 is not an interface there; available: lo, eth0"):
        gloo_choice("127.0.0.1", [LO, ETH], {"GLOO_SOCKET_IFNAME": "ib0"})
    with pytest.raises(ClusterError, match="no interface has a route to"):
        gloo_choice("127.0.0.1", [ETH], {})
