"""A survey of made-up hosts, and a stand-in for a worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from launcher.doctor.network.interfaces import Adapter, Interface
from launcher.doctor.network.nccl import NcclNetwork
from launcher.doctor.network.network_probe import HostNetwork, NetworkState
from launcher.doctor.session import WorkerSession, read_answer
from longctx.errors import ClusterError

ETH = Interface(name="eth0", addresses=("10.0.0.1",), megabits=25_000, mtu=9000)
SOCKETS = NcclNetwork(transport="Socket", devices=("eth0",), bootstrap_interface="eth0")
HCA = Adapter(name="mlx5_0", port=1, is_active=True, link="InfiniBand")


def network(number: int, **changes: Any) -> HostNetwork:
    """The network as host ``number`` sees it, some of it changed."""
    usual = HostNetwork(
        interface="eth0",
        address=f"10.0.0.{number}",
        port=40000 + number,
        interfaces=[ETH],
        adapters=[],
        nccl=SOCKETS,
        environment={},
        num_gpus=0,
        machine=f"machine {number}",
    )
    return replace(usual, **changes)


def survey_of(*networks: HostNetwork, **changes: Any) -> NetworkState:
    """A survey of hosts ``a``, ``b`` and on."""
    names = [chr(ord("a") + index) for index in range(len(networks))]
    usual = NetworkState(
        hosts=names,
        networks=dict(zip(names, networks, strict=True)),
        rendezvous=("10.0.0.1", 29500),
    )
    return replace(usual, **changes)


class Host(WorkerSession):
    """A worker that answers by a table; orders that it heard are in ``heard``."""

    def __init__(self, name: str, number: int, **answers: Callable[[dict[str, Any]], Any]) -> None:
        """``answers`` are those of unusual orders."""
        self.name, self._number, self._answers = name, number, answers
        self.heard: list[dict[str, Any]] = []

    def ask(self, seconds: float, kind: Any, **order: Any) -> Any:
        """As a session does."""
        assert 0 < seconds < 1000
        self.heard.append(order)
        answer = self._answers.get(order["do"], lambda order: getattr(self, f"_{order['do']}")(order))
        return read_answer(json.dumps(answer(order)), kind)

    def orders(self, kind: str) -> list[dict[str, Any]]:
        """The orders of one kind."""
        return [order for order in self.heard if order["do"] == kind]

    def _lead(self, order: dict[str, Any]) -> Any:
        return "10.0.0.1", order["port"] or 41234

    def _listen(self, order: dict[str, Any]) -> Any:
        return asdict(network(self._number))

    def _connect(self, order: dict[str, Any]) -> Any:
        return [""] * len(order["targets"])

    def _nccl(self, order: dict[str, Any]) -> Any:
        said = NcclNetwork(transport="IB", devices=("mlx5_0:1/IB",), bootstrap_interface="eth0", is_reported=True)
        return {"fault": "", "network": asdict(said)}


def stops(why: str) -> Callable[[dict[str, Any]], Any]:
    """An answer that is none."""

    def answer(order: dict[str, Any]) -> Any:
        raise ClusterError(why)

    return answer
