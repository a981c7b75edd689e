"""Check the network of a run and return the findings with the underlying survey."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.doctor.finding import Finding, worst
from launcher.doctor.hosts import Host
from launcher.doctor.network.findings import (
    finding_of_rates,
    findings_of_hosts,
    findings_of_machine,
    skipped,
    survey_to_json,
)
from launcher.doctor.network.survey import Survey, survey
from launcher.doctor.remote import WORKER, Answer, line_there, ssh_command
from launcher.doctor.session import Session, close_all
from longctx.errors import ClusterError

MOST_HOSTS = 128
"""Connections over ssh at the same time."""
MOST_RANKS = 8
"""On one machine."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Findings of a network, and the survey behind them."""

    findings: list[Finding]
    survey: Survey | None = None
    """None if the network was not looked at."""

    def to_json(self) -> dict[str, Any]:
        """Return the findings, their worst verdict, and the answers of the hosts."""
        findings = [asdict(finding) for finding in self.findings]
        told: dict[str, Any] = {"verdict": worst(self.findings), "findings": findings}
        if self.survey is not None:
            told |= survey_to_json(self.survey)
        return told


def check_hosts(hosts: Sequence[Host], *, port: int, hostfile: Path, num_ranks: int) -> Network:
    """Check the network between the hosts that answered over ssh; skip it if the hostfile's first host did not.

    ``num_ranks`` is the number of ranks of the ``hostfile``.
    """
    # A host that ssh does not reach already has a finding, and would keep the others waiting.
    names = [host.name for host in hosts if isinstance(host.answer, Answer)]
    if names[:1] != [hosts[0].name]:
        return Network(findings=[skipped(f"{hosts[0].name}, where ranks would meet, does not answer")])
    if len(names) < 2:
        return Network(findings=[skipped("no other host answers")])
    survey = survey_hosts(names, port=port)
    findings = findings_of_hosts(survey)
    if len(names) > MOST_HOSTS:
        value = f"looked at between {MOST_HOSTS} of {len(names)} hosts, evenly spaced"
        findings.append(Finding.of("network", value))
    launcher = f"mpirun --hostfile {shlex.quote(str(hostfile))} -np {num_ranks} "
    return Network(findings=[*findings, finding_of_rates(survey, launcher)], survey=survey)


def check_this_machine(num_gpus: int) -> Network:
    """Check NCCL's choice of network on this machine, and that the local ranks find each other."""
    survey = survey_this_machine(num_gpus)
    findings = findings_of_machine(survey)
    if num_gpus > 1:
        findings.append(finding_of_rates(survey))
    return Network(findings=findings, survey=survey)


def survey_hosts(hosts: Sequence[str], *, port: int) -> Survey:
    """Survey the network between hosts, the first of which holds rank 0 and ``port``.

    Of more than ``MOST_HOSTS`` hosts, evenly spaced ones are chosen. Raise ClusterError for an invalid host name.
    """
    chosen = [hosts[index * len(hosts) // MOST_HOSTS] for index in range(MOST_HOSTS)]
    if len(hosts) <= MOST_HOSTS:
        chosen = list(hosts)
    # The same line for every host, without any text from a hostfile.
    line = line_there(WORKER)
    return _survey({host: ssh_command(host, line) for host in chosen}, port=port, over_ssh=True)


def survey_this_machine(num_gpus: int) -> Survey:
    """Survey the network with processes on this machine: one per GPU, but at least one and at most eight."""
    count = min(max(num_gpus, 1), MOST_RANKS)
    command = [sys.executable, *WORKER]
    # Ranks of one machine meet at its loopback interface, at a free port.
    return _survey({f"rank {rank}": command for rank in range(count)}, port=0, over_ssh=False)


def _survey(commands: dict[str, Sequence[str]], *, port: int, over_ssh: bool) -> Survey:
    sessions: list[Session] = []
    try:
        for name, command in commands.items():
            sessions.append(Session(name, command))
        return survey(sessions, port=port, over_ssh=over_ssh)
    except ClusterError as error:
        # No worker can be started: there is no ssh here.
        return Survey(hosts=list(commands), silent=dict.fromkeys(commands, str(error)))
    finally:
        close_all(sessions)
