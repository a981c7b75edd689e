"""Check a run's network; return the results with the underlying survey."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.doctor.check_result import CheckResult, worst
from launcher.doctor.host_checks import Host
from launcher.doctor.network.network_probe import NetworkState, probe_network
from launcher.doctor.network.network_results import (
    bandwidth_result,
    host_network_results,
    machine_network_results,
    skipped_result,
    state_to_json,
)
from launcher.doctor.remote import WORKER, HostAnswer, remote_command_line, ssh_command
from launcher.doctor.session import WorkerSession, close_all
from longctx.errors import ClusterError

MOST_HOSTS = 128
"""Limit on concurrent ssh connections."""
MOST_RANKS = 8
"""Limit on workers per machine."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Network check results and the survey behind them."""

    results: list[CheckResult]
    state: NetworkState | None = None
    """Unset if the network was not surveyed."""

    def to_json(self) -> dict[str, Any]:
        """Return results, worst verdict and survey as plain values."""
        results = [asdict(result) for result in self.results]
        values: dict[str, Any] = {"verdict": worst(self.results), "findings": results}
        if self.state is not None:
            values |= state_to_json(self.state)
        return values


def check_hosts(hosts: Sequence[Host], *, port: int, hostfile: Path, num_ranks: int) -> Network:
    """Check the network between hosts that answered over ssh; skip it if the hostfile's first host did not.

    ``num_ranks`` counts all ranks in ``hostfile``.
    """
    # Unreachable hosts already have a result and would only delay the others. The first host is required: ranks
    # rendezvous there.
    names = [host.name for host in hosts if isinstance(host.answer, HostAnswer)]
    if names[:1] != [hosts[0].name]:
        return Network(results=[skipped_result(f"{hosts[0].name}, the rendezvous host, does not answer")])
    if len(names) < 2:
        return Network(results=[skipped_result("no other host answers")])
    state = probe_hosts(names, port=port)
    results = host_network_results(state)
    if len(names) > MOST_HOSTS:
        value = f"checked between {MOST_HOSTS} of {len(names)} hosts, evenly spaced"
        results.append(CheckResult.of("network", value))
    launcher = f"mpirun --hostfile {shlex.quote(str(hostfile))} -np {num_ranks} "
    return Network(results=[*results, bandwidth_result(state, launcher)], state=state)


def check_this_machine(num_gpus: int) -> Network:
    """Check NCCL's network choice on this machine, and that local ranks reach each other."""
    state = probe_this_machine(num_gpus)
    results = machine_network_results(state)
    if num_gpus > 1:
        results.append(bandwidth_result(state))
    return Network(results=results, state=state)


def probe_hosts(hosts: Sequence[str], *, port: int) -> NetworkState:
    """Survey the network between hosts; the first one runs rank 0 and listens at ``port``.

    Above ``MOST_HOSTS`` hosts, survey evenly spaced ones. Raise ClusterError for an invalid host name.
    """
    chosen = [hosts[index * len(hosts) // MOST_HOSTS] for index in range(MOST_HOSTS)]
    if len(hosts) <= MOST_HOSTS:
        chosen = list(hosts)
    # The same line for every host, so text from a hostfile never enters a remote shell.
    line = remote_command_line(WORKER)
    return _probe({host: ssh_command(host, line) for host in chosen}, port=port, over_ssh=True)


def probe_this_machine(num_gpus: int) -> NetworkState:
    """Survey the network with processes on this machine: one per GPU, at least one and at most eight."""
    count = min(max(num_gpus, 1), MOST_RANKS)
    command = [sys.executable, *WORKER]
    # Local ranks rendezvous on the loopback interface, at a free port.
    return _probe({f"rank {rank}": command for rank in range(count)}, port=0, over_ssh=False)


def _probe(commands: dict[str, Sequence[str]], *, port: int, over_ssh: bool) -> NetworkState:
    sessions: list[WorkerSession] = []
    try:
        for name, command in commands.items():
            sessions.append(WorkerSession(name, command))
        return probe_network(sessions, port=port, over_ssh=over_ssh)
    except ClusterError as error:
        # This machine has no ssh, so no worker can start.
        return NetworkState(hosts=list(commands), failures=dict.fromkeys(commands, str(error)))
    finally:
        close_all(sessions)
