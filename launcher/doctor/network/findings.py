"""Findings of a survey of the network: what is blocked, or other than one would want, and what to do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.doctor.finding import Finding
from launcher.doctor.network.interface_findings import (
    finding_of_gloo,
    finding_of_nccl,
    finding_of_nccl_here,
    findings_of_variables,
    nccl_of,
)
from launcher.doctor.network.survey import Port, Survey
from launcher.doctor.network.words import names_of

_OPEN = "open TCP between the hosts, the port at which ranks meet and all of net.ipv4.ip_local_port_range"


def skipped(why: str) -> Finding:
    """Return the finding that the network was not looked at."""
    return Finding(check="network", verdict="ok", value=f"not looked at: {why}")


def findings_of_hosts(survey: Survey, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """What is found of the network between the hosts of a hostfile; ``environment`` is that of this machine."""
    # What explains the others stands first: a host that is not there, a wrong interface, a blocked port, NCCL.
    findings = _silent(survey) + findings_of_variables(survey, environment)
    findings += finding_of_gloo(survey) + finding_of_nccl(survey)
    return findings + _ports(survey) + _nccl_problem(survey)


def findings_of_machine(survey: Survey) -> list[Finding]:
    """What is found of the network that NCCL takes from this machine, and of NCCL between its GPUs."""
    return _silent(survey) + finding_of_nccl_here(survey) + _blocked(survey) + _nccl_problem(survey)


def finding_of_rates(survey: Survey, launcher: str = "") -> Finding:
    """Return the finding that rates are not measured, with the command that does.

    ``launcher`` begins the command if there is a rank a process; without it one process has all GPUs of this machine.
    """
    num_gpus = max((network.num_gpus for network in survey.networks.values()), default=0)
    # A hop of the ring is what sendrecv_perf does: every rank sends to the next one, all at once.
    value = f"not measured. nccl-tests do: {launcher}./build/sendrecv_perf -b 1M -e 1G -f 4 -g {num_gpus}"
    if launcher:
        value = f"not measured. nccl-tests (make MPI=1) do: {launcher}./build/sendrecv_perf -b 1M -e 1G -f 4 -g 1"
    if not num_gpus:
        value = "not measured. Without GPUs iperf3 does: `iperf3 -s` on one host, `iperf3 -c HOST -P 4` on another"
    return Finding(check="rates", verdict="ok", value=value)


def survey_to_json(survey: Survey) -> dict[str, Any]:
    """All hosts and all ports that are blocked, as plain values."""
    return {
        "meeting_place": survey.meeting_place,
        "interfaces": {name: network.interface for name, network in survey.networks.items()},
        "nccl": {
            name: {"network": nccl_of(survey, name).describe(), "was_asked": name in survey.nccl}
            for name in survey.networks
        },
        "blocked": [
            {"from": port.source, "to": port.target, "port": port.number, "problem": port.problem}
            for port in survey.blocked
        ],
    }


def _nccl_problem(survey: Survey) -> list[Finding]:
    """A failure if NCCL did not start between GPUs."""
    if not survey.nccl_problem:
        return []
    advice = "See the other findings first; then NCCL_DEBUG=INFO in .deepspeed_env says more"
    return [Finding(check="NCCL", verdict="fail", value=survey.nccl_problem, advice=advice)]


def _silent(survey: Survey) -> list[Finding]:
    """A failure for each reason for which hosts took no part."""
    findings = []
    # Hosts in one trouble share a line; dict.fromkeys keeps the order in which the troubles came.
    for why in dict.fromkeys(survey.silent.values()):
        names = names_of([name for name, said in survey.silent.items() if said == why])
        advice = f"Nothing is known of the network of {names}: see its other findings, then try again"
        findings.append(Finding(check="network", verdict="fail", value=f"{names}: {why}", advice=advice))
    return findings


def _ports(survey: Survey) -> list[Finding]:
    """Which hosts do not reach each other, or that all do."""
    if findings := _blocked(survey):
        return findings
    # A host that says nothing may reach nobody.
    if survey.meeting_place is None or survey.silent or len(survey.networks) < len(survey.hosts):
        return []
    address, number = survey.meeting_place
    value = f"every host reaches {address}:{number}, and a free port of every other"
    return [Finding(check="ports", verdict="ok", value=value)]


def _blocked(survey: Survey) -> list[Finding]:
    """A failure for all ports that are blocked alike."""
    groups: dict[tuple[bool, str], list[Port]] = {}
    for port in survey.blocked:
        groups.setdefault((port.is_meeting_place, port.problem), []).append(port)
    findings = []
    for (is_meeting_place, problem), ports in groups.items():
        what, advice = "where gloo listens", _port_advice(problem)
        if is_meeting_place:
            what = "where ranks meet"
            advice += "; or give deepspeed another address of the first host: --master_addr"
        value = f"{names_of(_who_misses_whom(ports, survey))}, {what}: {problem}"
        findings.append(Finding(check="ports", verdict="fail", value=value, advice=advice))
    return findings


def _who_misses_whom(ports: Sequence[Port], survey: Survey) -> list[str]:
    """A phrase for each host that reaches nobody, or whom nobody reaches, and for each other pair."""
    pairs = {(port.source, port.target): f"{port.address}:{port.number}" for port in ports}
    alone = _hosts_apart(pairs, list(survey.networks))
    phrases = [f"{name} and the other {len(survey.networks) - 1} hosts do not reach each other" for name in alone]
    for (source, target), place in pairs.items():
        if source in alone or target in alone:
            continue
        if (target, source) not in pairs:
            phrases.append(f"{source} does not reach {target} ({place})")
        # The other way round has its turn too: of both, one is told.
        elif source < target:
            phrases.append(f"{source} and {target} do not reach each other ({place}, {pairs[target, source]})")
    return phrases


def _hosts_apart(pairs: Mapping[tuple[str, str], str], names: Sequence[str]) -> list[str]:
    """The hosts that reach no other, and that no other reaches, where there are more than two."""
    if len(names) < 3:
        return []
    return [
        name
        for name in names
        if all((name, other) in pairs and (other, name) in pairs for other in names if other != name)
    ]


def _port_advice(problem: str) -> str:
    if "no answer" in problem or "no word" in problem:
        return f"A firewall drops what is sent: {_OPEN}"
    if "refused" in problem:
        return f"A firewall refuses, or the address is another machine's: {_OPEN}"
    if "another program" in problem:
        return "The address is another machine's, or is forwarded: look at `hostname -I` and /etc/hosts there"
    return "There is no way to that network: look at `ip route get ADDRESS`, or name another interface"
