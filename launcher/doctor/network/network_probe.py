"""Network survey between hosts: reachable ports and selected interfaces, with one worker per host.

Phases: the first host listens at the ranks' rendezvous address; every host listens on gloo's interface; every host
tries all other hosts' ports; hosts with GPUs start NCCL. A failure on one host does not stop the survey on others, and
every phase has a time limit.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter

from launcher.doctor.check_result import Text
from launcher.doctor.network.interfaces import Adapter, Count, Interface
from launcher.doctor.network.nccl import NcclNetwork
from launcher.doctor.network.ports import SECONDS as PORT_SECONDS
from launcher.doctor.network.ports import new_word
from launcher.doctor.session import WorkerSession
from longctx.errors import ClusterError

START_SECONDS = 120.0
"""Limit for the first answer: Python and PyTorch start there, perhaps from a slow shared disk."""
_PHASE_SECONDS = 20.0
_NCCL_SECONDS = 90.0
"""Limit for NCCL to load and start; longer than its own timeout, so that NCCL gives up first."""

Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
"""IP address, not a name: other machines connect to it, and each would resolve a name separately."""
PortNumber = Annotated[int, Field(gt=0, lt=65536)]
Answer = TypeVar("Answer")


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """The network as seen by one host."""

    interface: Text
    """Interface that gloo selects."""
    address: Address
    port: PortNumber
    """Port at which it listens for other hosts."""
    interfaces: Sequence[Interface]
    adapters: Sequence[Adapter]
    nccl: NcclNetwork
    """Network predicted by NCCL's rules."""
    environment: Mapping[Text, Text]
    """Variables on this host that gloo and NCCL read."""
    num_gpus: Count
    machine: Text
    """Machine identifier, equal for two names that mean one machine."""


@dataclass(frozen=True, kw_only=True)
class NcclAnswer:
    """NCCL's answer on a host."""

    network: NcclNetwork | None
    fault: Text
    """Failure message, or empty."""


@dataclass(frozen=True, kw_only=True)
class Port:
    """Port that one host tries on another."""

    source: str
    target: str
    address: str
    number: int
    is_rendezvous: bool
    problem: str = ""
    """Reason why ``source`` does not reach it, or ""."""


@dataclass(kw_only=True)
class NetworkState:
    """Network state between hosts, named as in the hostfile."""

    hosts: Sequence[str]
    networks: Mapping[str, HostNetwork] = field(default_factory=dict)
    """Keyed by host; only hosts that answered."""
    nccl: dict[str, NcclNetwork] = field(default_factory=dict)
    """Network reported by NCCL on each host that ran it."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reason per host that dropped out."""
    rendezvous: tuple[str, int] | None = None
    blocked: list[Port] = field(default_factory=list)
    nccl_problem: str = ""
    """First fault that kept NCCL from starting, with its host; "" if it started or was not tried."""


def probe_network(sessions: Sequence[WorkerSession], *, port: int, over_ssh: bool) -> NetworkState:
    """Survey the network through one worker per host; the first session belongs to rank 0's host.

    ``port`` is the ranks' rendezvous port (0: any free one); ``over_ssh`` is True if hosts are other machines.
    """
    coordinator = _ProbeCoordinator(sessions)
    coordinator.find_rendezvous(port, over_ssh=over_ssh)
    if coordinator.state.rendezvous is not None:
        coordinator.listen()
        coordinator.try_ports()
        coordinator.ask_nccl()
    return coordinator.state


class _ProbeCoordinator:
    """Survey coordinator: sends orders to the workers phase by phase and records their answers."""

    def __init__(self, sessions: Sequence[WorkerSession]) -> None:
        self._sessions = {session.name: session for session in sessions}
        self._names, self._word = list(self._sessions), new_word()
        self.state = NetworkState(hosts=self._names)

    def ask(
        self, requests: Mapping[str, dict[str, Any]], seconds: float, kind: TypeAdapter[Answer]
    ) -> dict[str, Answer]:
        """Send orders concurrently and return the answers; from then on skip hosts that did not answer."""

        def ask(name: str) -> Answer | ClusterError:
            try:
                return self._sessions[name].ask(seconds, kind, **requests[name])
            except ClusterError as error:
                return error

        names = [name for name in requests if name not in self.state.failures]
        answers: dict[str, Answer] = {}
        # One thread per host, however many: NCCL's ranks wait for one another.
        with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
            for name, answer in zip(names, pool.map(ask, names), strict=True):
                if isinstance(answer, ClusterError):
                    self.state.failures[name] = str(answer)
                else:
                    answers[name] = answer
        return answers

    def find_rendezvous(self, port: int, *, over_ssh: bool) -> None:
        """Record the ranks' rendezvous address, where the first host starts to listen."""
        first = self._names[0]
        request = {"do": "lead", "port": port, "word": self._word, "over_ssh": over_ssh}
        answers = self.ask({first: request}, START_SECONDS, TypeAdapter(tuple[Address, PortNumber]))
        self.state.rendezvous = answers.get(first)

    def listen(self) -> None:
        """Make every host listen on gloo's interface and report its network."""
        assert self.state.rendezvous is not None
        request = {"do": "listen", "master": self.state.rendezvous[0], "word": self._word}
        # For all hosts except the first this is the first order, so the limit includes startup.
        seconds = START_SECONDS + _PHASE_SECONDS
        self.state.networks = self.ask(dict.fromkeys(self._names, request), seconds, TypeAdapter(HostNetwork))

    def try_ports(self) -> None:
        """Make every host try all other hosts' ports."""
        ports = {name: self._ports_for(name) for name in self.state.networks}
        requests = {
            name: {"do": "connect", "word": self._word, "targets": [[port.address, port.number] for port in targets]}
            for name, targets in ports.items()
        }
        # A worker tries 64 ports at a time.
        seconds = _PHASE_SECONDS + 2 * PORT_SECONDS * (1 + len(self._names) // 64)
        for name, problems in self.ask(requests, seconds, TypeAdapter(list[Text])).items():
            if len(problems) != len(ports[name]):
                self.state.failures[name] = "it did not report every requested port"
                continue
            for port, problem in zip(ports[name], problems, strict=True):
                if problem:
                    self.state.blocked.append(replace(port, problem=problem))

    def _ports_for(self, name: str) -> list[Port]:
        """Return the ports a host tries: the rendezvous on another host, and gloo's port on every other host."""
        assert self.state.rendezvous is not None
        places = [
            (other, network.address, network.port, False)
            for other, network in self.state.networks.items()
            if other != name
        ]
        if name != self._names[0]:
            places.insert(0, (self._names[0], *self.state.rendezvous, True))
        return [
            Port(source=name, target=target, address=address, number=number, is_rendezvous=is_rendezvous)
            for target, address, number, is_rendezvous in places
        ]

    def ask_nccl(self) -> None:
        """Start NCCL on all hosts with GPUs together, and record the selected networks."""
        networks = self.state.networks
        gpus = _gpus(networks, [name for name in networks if name not in self.state.failures])
        names = list(gpus)
        if not names:
            return
        is_partitioned = any({port.source, port.target} <= set(names) for port in self.state.blocked)
        if is_partitioned:
            # NCCL would wait forever for an unreachable peer.
            self.state.nccl_problem = "not started together: hosts do not reach each other"
        # Ranks rendezvous at the first GPU host's listening port, which all others have reached.
        store = (networks[names[0]].address, networks[names[0]].port)
        requests = {}
        for rank, name in enumerate(names):
            requests[name] = {"do": "nccl", "rank": rank, "world_size": len(names), "gpu": gpus[name], "store": store}
            # Started alone, each still reports the network it would select.
            if is_partitioned:
                requests[name] |= {"rank": 0, "world_size": 1}
        for name, answer in self.ask(requests, _NCCL_SECONDS, TypeAdapter(NcclAnswer)).items():
            if answer.network is not None:
                self.state.nccl[name] = answer.network
            if answer.fault and not self.state.nccl_problem:
                self.state.nccl_problem = f"{name}: {answer.fault}"


def _gpus(networks: Mapping[str, HostNetwork], members: Sequence[str]) -> dict[str, int]:
    """Assign a GPU index to each host that has one free; two names for one machine get different GPUs."""
    taken: dict[str, int] = {}
    gpus: dict[str, int] = {}
    for name in members:
        network = networks[name]
        number = taken.get(network.machine, 0)
        # NCCL rejects two ranks on one GPU.
        if number < network.num_gpus:
            taken[network.machine] = number + 1
            gpus[name] = number
    return gpus
