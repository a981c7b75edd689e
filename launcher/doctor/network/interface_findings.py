"""Findings of the interfaces that gloo and NCCL take on every host."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from launcher.doctor.finding import Finding, Verdict
from launcher.doctor.network.answers import HostNetwork
from launcher.doctor.network.interfaces import is_loopback, is_virtual
from launcher.doctor.network.nccl import INFINIBAND, SOCKET, NcclNetwork
from launcher.doctor.network.survey import Survey
from launcher.doctor.network.words import by_value, names_of
from parallel.runtime.interface import INTERFACE_VARIABLE

_VARIABLES = (INTERFACE_VARIABLE, "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_DISABLE", "NCCL_NET")
_IN_FILE = "a line of ~/.deepspeed_env"


def findings_of_variables(survey: Survey, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Variables of ``environment``, this machine's, that deepspeed does not hand over to the hosts."""
    findings = []
    for variable in _VARIABLES:
        value = environment.get(variable)
        without = [name for name, network in survey.networks.items() if network.environment.get(variable) != value]
        if value is not None and without:
            text = f"{variable}={value} is set here, and not on {names_of(without)}"
            advice = f"deepspeed does not hand it over: make it {_IN_FILE}"
            findings.append(Finding(check="environment", verdict="warn", value=text, advice=advice))
    return findings


def finding_of_gloo(survey: Survey) -> list[Finding]:
    """The interface that gloo takes on every host: no finding where no host answers."""
    networks = survey.networks
    if not networks or survey.meeting_place is None:
        return []
    reason = f"the way to {survey.meeting_place[0]}"
    if named := [name for name, network in networks.items() if INTERFACE_VARIABLE in network.environment]:
        reason = f"{INTERFACE_VARIABLE} on {names_of(named)}"
    value = f"{by_value({name: _described(network) for name, network in networks.items()})} ({reason})"
    advice = ""
    # Two names of one machine reach each other by any interface.
    if _num_machines(survey) > 1:
        advice = interface_advice([network.interface for network in networks.values()], INTERFACE_VARIABLE)
        advice = advice or _mtu_advice(networks)
    verdict: Verdict = "ok"
    if advice:
        verdict = "warn"
    return [Finding(check="gloo interface", verdict=verdict, value=value, advice=advice)]


def interface_advice(names: Iterable[str], variable: str) -> str:
    """What to do about the interfaces of all hosts; "" where there is nothing."""
    names = list(names)
    example = f"name the one that leads to the other hosts, {variable}=eth0 for example, in {_IN_FILE}"
    if any(is_loopback(name) for name in names):
        return f"A loopback interface reaches no other machine: {example}"
    if any(is_virtual(name) for name in names):
        return f"An interface of containers leads to its own machine only: {example}"
    if len(set(names)) > 1:
        return f"Interfaces differ, perhaps networks too: {example}"
    return ""


def finding_of_nccl(survey: Survey) -> list[Finding]:
    """What NCCL takes, or would take, on every host: no finding where no host answers."""
    networks = {name: nccl_of(survey, name) for name in survey.networks}
    if not networks:
        return []
    value = f"{by_value({name: network.describe() for name, network in networks.items()})} ({_source(networks)})"
    advice = ""
    verdict: Verdict = "ok"
    # Without GPUs no run depends on it, and two names of one machine reach each other by any interface.
    has_gpus = any(network.num_gpus for network in survey.networks.values())
    if has_gpus and _num_machines(survey) > 1:
        advice = _nccl_advice(survey, networks)
    if advice:
        verdict = "warn"
    if advice and any(not network.transport for network in networks.values()):
        verdict = "fail"
    return [Finding(check="NCCL network", verdict=verdict, value=value, advice=advice)]


def finding_of_nccl_here(survey: Survey) -> list[Finding]:
    """What NCCL takes, or would take, from this machine to others: ranks of the survey are all on this machine."""
    for name in survey.networks:
        network = nccl_of(survey, name)
        value = f"{network.describe()} to other machines ({_source({name: network})})"
        return [Finding(check="NCCL network", verdict="ok", value=value)]
    return []


def nccl_of(survey: Survey, name: str) -> NcclNetwork:
    """What NCCL said on a host, else what its rules say."""
    return survey.nccl.get(name, survey.networks[name].nccl)


def _num_machines(survey: Survey) -> int:
    """How many machines the hosts are."""
    return len({network.machine for network in survey.networks.values()})


def _source(networks: Mapping[str, NcclNetwork]) -> str:
    """How it is known."""
    asked = [name for name, network in networks.items() if network.was_asked]
    if not asked:
        return "by its rules: without a GPU it was not asked"
    if len(asked) < len(networks):
        return f"NCCL says so on {names_of(asked)}, elsewhere by its rules"
    return "NCCL says so"


def _nccl_advice(survey: Survey, networks: Mapping[str, NcclNetwork]) -> str:
    """What to do about NCCL's choice; "" where there is nothing."""
    if none := [name for name, network in networks.items() if not network.transport]:
        return f"NCCL finds no network on {names_of(none)}: look at NCCL_SOCKET_IFNAME, NCCL_IB_HCA and NCCL_NET there"
    transports = {network.transport for network in networks.values()}
    if len(transports) > 1:
        return "Hosts differ, and NCCL does not start so: the same adapters, drivers and NCCL_ variables on all"
    if unused := [name for name in networks if transports == {SOCKET} and _has_adapter(survey.networks[name])]:
        return (
            f"NCCL leaves out active RDMA adapters of {names_of(unused)}: look at NCCL_IB_DISABLE and NCCL_IB_HCA, "
            "and that a container sees /dev/infiniband"
        )
    if transports == {INFINIBAND} and len({network.devices for network in networks.values()}) > 1:
        return "Adapters differ between hosts: name those of one fabric with NCCL_IB_HCA"
    return interface_advice(
        [network.meets_at or next(iter(network.devices), "") for network in networks.values()], "NCCL_SOCKET_IFNAME"
    )


def _has_adapter(network: HostNetwork) -> bool:
    return any(adapter.is_active for adapter in network.adapters)


def _described(network: HostNetwork) -> str:
    """The interface that gloo takes, with its speed and MTU where its driver tells them."""
    for interface in network.interfaces:
        if interface.name == network.interface:
            speed = ""
            if interface.megabits:
                speed = f"{interface.megabits / 1000:g} Gbit/s, "
            return f"{interface.name} ({speed}MTU {interface.mtu})"
    return network.interface


def _mtu_advice(networks: Mapping[str, HostNetwork]) -> str:
    """What to do where the MTUs of gloo's interfaces differ."""
    sizes = {
        interface.mtu
        for network in networks.values()
        for interface in network.interfaces
        if interface.name == network.interface
    }
    if len(sizes) < 2:
        return ""
    return f"Large packets may get lost where the MTU differs: ip link set IFACE mtu {min(sizes)} on all"
