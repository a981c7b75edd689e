"""Check the network of a run: the findings, and all that was asked."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
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
from launcher.doctor.network.start import MOST_HOSTS, survey_hosts, survey_this_machine
from launcher.doctor.network.survey import Survey
from launcher.doctor.remote import Answer


@dataclass(frozen=True, kw_only=True)
class Network:
    """What was found of a network, and the survey behind it."""

    findings: list[Finding]
    survey: Survey | None = None
    """None if the network was not looked at."""

    def to_json(self) -> dict[str, Any]:
        """Findings, their worst verdict, and what hosts answered."""
        told: dict[str, Any] = {
            "verdict": worst(self.findings),
            "findings": [finding.to_json() for finding in self.findings],
        }
        if self.survey is not None:
            told |= survey_to_json(self.survey)
        return told


def check_hosts(hosts: Sequence[Host], *, port: int, hostfile: Path, num_ranks: int) -> Network:
    """Check the network between the hosts that answered over ssh; the first host of the hostfile must be one of them.

    ``num_ranks`` are those of the ``hostfile``.
    """
    # A host that ssh does not reach has a finding of its own, and would keep the others waiting.
    names = [host.name for host in hosts if isinstance(host.answer, Answer)]
    if names[:1] != [hosts[0].name]:
        return Network(findings=[skipped(f"{hosts[0].name}, where ranks would meet, does not answer")])
    if len(names) < 2:
        return Network(findings=[skipped("no other host answers")])
    survey = survey_hosts(names, port=port)
    findings = findings_of_hosts(survey)
    if len(names) > MOST_HOSTS:
        value = f"looked at between {MOST_HOSTS} of {len(names)} hosts, evenly spaced"
        findings.append(Finding(check="network", verdict="ok", value=value))
    launcher = f"mpirun --hostfile {shlex.quote(str(hostfile))} -np {num_ranks} "
    return Network(findings=[*findings, finding_of_rates(survey, launcher)], survey=survey)


def check_this_machine(num_gpus: int) -> Network:
    """Check which network NCCL takes from this machine, and that its ranks find each other here."""
    survey = survey_this_machine(num_gpus)
    findings = findings_of_machine(survey)
    if num_gpus > 1:
        findings.append(finding_of_rates(survey))
    return Network(findings=findings, survey=survey)
