"""Look at the network between hosts: who reaches whom, and by what. A worker a host; this process asks them all.

The order of things: the first host listens where ranks would meet; every host listens where gloo would; every host
tries the ports of all others; those that reach the meeting place meet, and start NCCL if they have GPUs. What one host
cannot do keeps no other host from being asked, and everything ends in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.doctor.network.answers import (
    HostNetwork,
    nccl_from_json,
    network_from_json,
    place_from_json,
    problems_from_json,
    text_from_json,
)
from launcher.doctor.network.nccl import NcclNetwork
from launcher.doctor.network.panel import Panel
from launcher.doctor.network.ports import SECONDS as PORT_SECONDS
from launcher.doctor.network.ports import new_word
from launcher.doctor.network.session import Session

START_SECONDS = 120.0
"""How long the first answer may take: Python and PyTorch start there, perhaps from a slow shared disk."""
_LOOK_SECONDS = 20.0
_MEET_SECONDS = 30.0
_NCCL_SECONDS = 90.0
"""For NCCL to load and to start, and a little more: it gives up by itself before that."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port that one host tries on another."""

    source: str
    target: str
    address: str
    number: int
    is_meeting_place: bool
    problem: str = ""
    """Why ``source`` does not reach it; "" where it does."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What is known of the network between hosts, which are named as in the hostfile."""

    hosts: Sequence[str]
    networks: Mapping[str, HostNetwork] = field(default_factory=dict)
    """Of the hosts that answered."""
    nccl: Mapping[str, NcclNetwork] = field(default_factory=dict)
    """What NCCL said, of the hosts on which it was asked."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Of the hosts that took no part to the end, why."""
    meeting_place: tuple[str, int] | None = None
    blocked: Sequence[Port] = ()
    nccl_problem: str = ""
    """What kept NCCL from starting, and on which host; "" if nothing did, or nobody asked it."""


def survey(sessions: Sequence[Session], *, port: int, over_ssh: bool) -> Survey:
    """All that these workers, the first host's first, can find out.

    ``port`` is where ranks would meet (0: any); ``over_ssh`` says that hosts are other machines.
    """
    surveyor = _Surveyor(sessions)
    place = surveyor.find_meeting_place(port, over_ssh=over_ssh)
    if place is not None:
        surveyor.look_around(place)
        surveyor.try_ports(place)
        members = surveyor.meet(place)
        surveyor.ask_nccl(members)
    return surveyor.result(place)


class _Surveyor:
    """Asks workers, phase by phase, and notes what they say."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._panel = Panel(sessions)
        self._names, self._word = [session.name for session in sessions], new_word()
        self._networks: dict[str, HostNetwork] = {}
        self._nccl: dict[str, NcclNetwork] = {}
        self._blocked: list[Port] = []
        self._nccl_problem = ""

    def result(self, place: tuple[str, int] | None) -> Survey:
        """What was noted."""
        return Survey(
            hosts=self._names,
            networks=self._networks,
            nccl=self._nccl,
            silent=self._panel.silent,
            meeting_place=place,
            blocked=self._blocked,
            nccl_problem=self._nccl_problem,
        )

    def find_meeting_place(self, port: int, *, over_ssh: bool) -> tuple[str, int] | None:
        """Where ranks of a run would meet: an address of the first host, which listens there now."""
        order = {"do": "lead", "port": port, "word": self._word, "over_ssh": over_ssh}
        first = self._names[0]
        return self._panel.ask({first: order}, START_SECONDS, place_from_json).get(first)

    def look_around(self, place: tuple[str, int]) -> None:
        """Every host listens where gloo would, and tells of its network."""
        order = {"do": "listen", "master": place[0], "word": self._word}
        # Those that start slowly have had no order before this one.
        seconds = START_SECONDS + _LOOK_SECONDS
        self._networks = self._panel.ask(dict.fromkeys(self._names, order), seconds, network_from_json)

    def try_ports(self, place: tuple[str, int]) -> None:
        """Every host tries the ports of all others."""
        ports = {name: self._ports_for(name, place) for name in self._networks}
        orders = {
            name: {"do": "connect", "word": self._word, "targets": [[port.address, port.number] for port in tried]}
            for name, tried in ports.items()
        }
        # A worker tries 64 at a time.
        seconds = _LOOK_SECONDS + 2 * PORT_SECONDS * (1 + len(self._names) // 64)
        for name, problems in self._panel.ask(orders, seconds, problems_from_json).items():
            if len(problems) != len(ports[name]):
                self._panel.silent[name] = "it does not tell of every port that it was to try"
                continue
            for port, problem in zip(ports[name], problems, strict=True):
                if problem:
                    self._blocked.append(replace(port, problem=problem))

    def _ports_for(self, name: str, place: tuple[str, int]) -> list[Port]:
        """What a host tries: where ranks meet, and where gloo would listen on every other host."""
        first = self._names[0]
        ports = []
        if name != first:
            ports.append(Port(source=name, target=first, address=place[0], number=place[1], is_meeting_place=True))
        for other, network in self._networks.items():
            if other != name:
                ports.append(
                    Port(
                        source=name,
                        target=other,
                        address=network.address,
                        number=network.port,
                        is_meeting_place=False,
                    )
                )
        return ports

    def meet(self, place: tuple[str, int]) -> list[str]:
        """The hosts that have met, the first host first; none where that one is missing."""
        first = self._names[0]
        order = {"do": "meet", "master": place}
        # The first one makes the store that the others look for.
        if not self._panel.ask({first: {**order, "leads": True}}, _MEET_SECONDS, bool):
            return []
        locked_out = {port.source for port in self._blocked if port.is_meeting_place}
        others = {
            name: {**order, "leads": False} for name in self._networks if name != first and name not in locked_out
        }
        met = [first]
        met += self._panel.ask(others, _MEET_SECONDS, bool)
        return met

    def ask_nccl(self, members: Sequence[str]) -> None:
        """Start NCCL on all hosts with GPUs together, and note which network it takes."""
        gpus = _gpus(self._networks, [name for name in members if name not in self._panel.silent])
        names = list(gpus)
        if not names:
            return
        is_apart = any({port.source, port.target} <= set(names) for port in self._blocked)
        if is_apart:
            # It would wait for them for ever.
            self._nccl_problem = "not started together: hosts do not reach each other"
        orders = {}
        for rank, name in enumerate(names):
            orders[name] = {"do": "nccl", "rank": rank, "world_size": len(names), "gpu": gpus[name]}
            # Each alone still says which network it would take.
            if is_apart:
                orders[name] |= {"rank": 0, "world_size": 1}
        for name, (network, problem) in self._panel.ask(orders, _NCCL_SECONDS, _nccl_answer).items():
            if network is not None:
                self._nccl[name] = network
            if problem and not self._nccl_problem:
                self._nccl_problem = f"{name}: {problem}"


def _gpus(networks: Mapping[str, HostNetwork], members: Sequence[str]) -> dict[str, int]:
    """The hosts that have a GPU, and which one each takes: two names of one machine take two."""
    taken: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for name in members:
        network = networks[name]
        number = taken.get(network.machine, 0)
        # NCCL refuses two ranks on one GPU.
        if number < network.num_gpus:
            taken[network.machine] = number + 1
            gpus[name] = number
    return gpus


def _nccl_answer(value: dict[str, Any]) -> tuple[NcclNetwork | None, str]:
    """NCCL's network, and what went wrong."""
    network = None
    if value.get("network") is not None:
        network = nccl_from_json(value["network"])
    return network, text_from_json(value, "problem")
