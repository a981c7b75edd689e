"""Check a run's network; return the results with the underlying survey."""

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
"""Limit on concurrent ssh connections."""
MOST_RANKS = 8
"""Limit on workers per machine."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network check results and the survey behind them."""

    findings: list[Finding]
    survey: Survey | None = None
    """Unset if the network was not surveyed."""

    def to_json(self) -> dict[str, Any]:
        """Return results, worst verdict and survey as plain values."""
        findings = [asdict(finding) for finding in self.findings]
        told: dict[str, Any] = {"verdict": worst(self.findings), "findings": findings}
        if self.survey is not None:
            told |= survey_to_json(self.survey)
        return told


def check_hosts(hosts: Sequence[Host], *, port: int, hostfile: Path, num_ranks: int) -> Network:
    """Check the network between hosts that answered over ssh; skip it if the hostfile's first host did not.

    ``num_ranks`` counts all ranks in ``hostfile``.
    """
    # Unreachable hosts already have a result and would only delay the others. The first host is required: ranks
    # rendezvous there.
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
    """Check NCCL's network choice on this machine, and that local ranks reach each other."""
    survey = survey_this_machine(num_gpus)
    findings = findings_of_machine(survey)
    if num_gpus > 1:
        findings.append(finding_of_rates(survey))
    return Network(findings=findings, survey=survey)


def survey_hosts(hosts: Sequence[str], *, port: int) -> Survey:
    """Survey the network between hosts; the first one runs rank 0 and listens at ``port``.

    Above ``MOST_HOSTS`` hosts, survey evenly spaced ones. Raise ClusterError for an invalid host name.
    """
    chosen = [hosts[index * len(hosts) // MOST_HOSTS] for index in range(MOST_HOSTS)]
    if len(hosts) <= MOST_HOSTS:
        chosen = list(hosts)
    # The same line for every host, so text from a hostfile never enters a remote shell.
    line = line_there(WORKER)
    return _survey({host: ssh_command(host, line) for host in chosen}, port=port, over_ssh=True)


def survey_this_machine(num_gpus: int) -> Survey:
    """Survey the network with processes on this machine: one per GPU, at least one and at most eight."""
    count = min(max(num_gpus, 1), MOST_RANKS)
    command = [sys.executable, *WORKER]
    # Local ranks rendezvous on the loopback interface, at a free port.
    return _survey({f"rank {rank}": command for rank in range(count)}, port=0, over_ssh=False)


def _survey(commands: dict[str, Sequence[str]], *, port: int, over_ssh: bool) -> Survey:
    sessions: list[Session] = []
    try:
        for name, command in commands.items():
            sessions.append(Session(name, command))
        return survey(sessions, port=port, over_ssh=over_ssh)
    except ClusterError as error:
        # This machine has no ssh, so no worker can start.
        return Survey(hosts=list(commands), silent=dict.fromkeys(commands, str(error)))
    finally:
        close_all(sessions)
