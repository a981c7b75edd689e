"""Survey of the network between hosts: reachable ports and the interfaces used, by one worker per host.

The order: the first host listens at the meeting place of the ranks; every host listens at gloo's interface; every host
tries the ports of all others; those with GPUs start NCCL. A failure on one host does not stop the survey of the others,
and every phase has a time limit.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter

from launcher.doctor.finding import Text
from launcher.doctor.network.interfaces import Adapter, Count, Interface
from launcher.doctor.network.nccl import NcclNetwork
from launcher.doctor.network.ports import SECONDS as PORT_SECONDS
from launcher.doctor.network.ports import new_word
from launcher.doctor.session import Session
from longctx.errors import ClusterError

START_SECONDS = 120.0
"""How long the first answer may take: Python and PyTorch start there, perhaps from a slow shared disk."""
_LOOK_SECONDS = 20.0
_NCCL_SECONDS = 90.0
"""For NCCL to load and to start, and a little more: it gives up by itself before that."""

Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
"""An IP address, since other machines are going to connect to it: each host would look a name up anew."""
PortNumber = Annotated[int, Field(gt=0, lt=65536)]
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """Network as seen by one host."""

    interface: Text
    """The one that gloo takes."""
    address: Address
    port: PortNumber
    """Where it listens for the other hosts."""
    interfaces: Sequence[Interface]
    adapters: Sequence[Adapter]
    nccl: NcclNetwork
    """What NCCL would take, by its rules."""
    environment: Mapping[Text, Text]
    """The variables there that gloo and NCCL read."""
    num_gpus: Count
    machine: Text
    """Equal for two names of one machine."""


@dataclass(frozen=True, kw_only=True)
class NcclAnswer:
    """Answer of NCCL on a host."""

    network: NcclNetwork | None
    fault: Text
    """What went wrong; empty if nothing did."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """Port that one host tries on another."""

    source: str
    target: str
    address: str
    number: int
    is_meeting_place: bool
    problem: str = ""
    """Why ``source`` does not reach it; "" where it does."""


@dataclass(kw_only=True)
class Survey:
    """State of the network between hosts, named as in the hostfile."""

    hosts: Sequence[str]
    networks: Mapping[str, HostNetwork] = field(default_factory=dict)
    """Of the hosts that answered."""
    nccl: dict[str, NcclNetwork] = field(default_factory=dict)
    """What NCCL said, of the hosts on which it was asked."""
    silent: dict[str, str] = field(default_factory=dict)
    """Of the hosts that took no part to the end, why."""
    meeting_place: tuple[str, int] | None = None
    blocked: list[Port] = field(default_factory=list)
    nccl_problem: str = ""
    """What kept NCCL from starting, and on which host; "" if nothing did, or nobody asked it."""


def survey(sessions: Sequence[Session], *, port: int, over_ssh: bool) -> Survey:
    """Survey the network with these workers, the first host's first.

    ``port`` is the port at which ranks would meet (0: any); ``over_ssh`` is True if hosts are other machines.
    """
    surveyor = _Surveyor(sessions)
    surveyor.find_meeting_place(port, over_ssh=over_ssh)
    if surveyor.found.meeting_place is not None:
        surveyor.look_around()
        surveyor.try_ports()
        surveyor.ask_nccl()
    return surveyor.found


class _Surveyor:
    """Conductor of a survey: sends orders to the workers phase by phase and records the answers."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._sessions = {session.name: session for session in sessions}
        self._names, self._word = list(self._sessions), new_word()
        self.found = Survey(hosts=self._names)

    def ask(self, orders: Mapping[str, dict[str, Any]], seconds: float, kind: TypeAdapter[Answer]) -> dict[str, Answer]:
        """Send orders to hosts at the same time; one that does not answer is marked silent and not asked again."""

        def ask(name: str) -> Answer | ClusterError:
            try:
                return self._sessions[name].ask(seconds, kind, **orders[name])
            except ClusterError as error:
                return error

        names = [name for name in orders if name not in self.found.silent]
        answers: dict[str, Answer] = {}
        # One thread per host, regardless of their number: NCCL's ranks wait for one another.
        with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
            for name, answer in zip(names, pool.map(ask, names), strict=True):
                if isinstance(answer, ClusterError):
                    self.found.silent[name] = str(answer)
                else:
                    answers[name] = answer
        return answers

    def find_meeting_place(self, port: int, *, over_ssh: bool) -> None:
        """Record the meeting place of a run's ranks: an address of the first host, which starts to listen there."""
        first = self._names[0]
        order = {"do": "lead", "port": port, "word": self._word, "over_ssh": over_ssh}
        places = self.ask({first: order}, START_SECONDS, TypeAdapter(tuple[Address, PortNumber]))
        self.found.meeting_place = places.get(first)

    def look_around(self) -> None:
        """Let every host listen at gloo's interface and report its network."""
        assert self.found.meeting_place is not None
        order = {"do": "listen", "master": self.found.meeting_place[0], "word": self._word}
        # For all hosts but the first this is the first order, so it includes their start.
        seconds = START_SECONDS + _LOOK_SECONDS
        self.found.networks = self.ask(dict.fromkeys(self._names, order), seconds, TypeAdapter(HostNetwork))

    def try_ports(self) -> None:
        """Let every host try the ports of all others."""
        ports = {name: self._ports_for(name) for name in self.found.networks}
        orders = {
            name: {"do": "connect", "word": self._word, "targets": [[port.address, port.number] for port in tried]}
            for name, tried in ports.items()
        }
        # A worker tries 64 at a time.
        seconds = _LOOK_SECONDS + 2 * PORT_SECONDS * (1 + len(self._names) // 64)
        for name, problems in self.ask(orders, seconds, TypeAdapter(list[Text])).items():
            if len(problems) != len(ports[name]):
                self.found.silent[name] = "it does not tell of every port that it was to try"
                continue
            for port, problem in zip(ports[name], problems, strict=True):
                if problem:
                    self.found.blocked.append(replace(port, problem=problem))

    def _ports_for(self, name: str) -> list[Port]:
        """Return the ports that a host tries: the meeting place, and gloo's port on every other host."""
        assert self.found.meeting_place is not None
        places = [
            (other, network.address, network.port, False)
            for other, network in self.found.networks.items()
            if other != name
        ]
        if name != self._names[0]:
            places.insert(0, (self._names[0], *self.found.meeting_place, True))
        return [
            Port(source=name, target=target, address=address, number=number, is_meeting_place=is_meeting_place)
            for target, address, number, is_meeting_place in places
        ]

    def ask_nccl(self) -> None:
        """Start NCCL on all hosts with GPUs together, and record the network it takes."""
        networks = self.found.networks
        gpus = _gpus(networks, [name for name in networks if name not in self.found.silent])
        names = list(gpus)
        if not names:
            return
        is_apart = any({port.source, port.target} <= set(names) for port in self.found.blocked)
        if is_apart:
            # NCCL would wait for them forever.
            self.found.nccl_problem = "not started together: hosts do not reach each other"
        # They meet at the first host's listening port, which all others have reached.
        store = (networks[names[0]].address, networks[names[0]].port)
        orders = {}
        for rank, name in enumerate(names):
            orders[name] = {"do": "nccl", "rank": rank, "world_size": len(names), "gpu": gpus[name], "store": store}
            # Started alone, each still reports the network it would take.
            if is_apart:
                orders[name] |= {"rank": 0, "world_size": 1}
        for name, answer in self.ask(orders, _NCCL_SECONDS, TypeAdapter(NcclAnswer)).items():
            if answer.network is not None:
                self.found.nccl[name] = answer.network
            if answer.fault and not self.found.nccl_problem:
                self.found.nccl_problem = f"{name}: {answer.fault}"


def _gpus(networks: Mapping[str, HostNetwork], members: Sequence[str]) -> dict[str, int]:
    """Return the hosts that have a GPU, each with a GPU index: two names of one machine take two different GPUs."""
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
