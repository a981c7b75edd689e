"""Start a worker for every host over ssh, or for every rank of this machine, and survey their network."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher.cluster.hostfile import check_host_name
from launcher.doctor.network.session import Session, close_all
from launcher.doctor.network.survey import Survey, survey
from launcher.doctor.remote import line_there, ssh_command
from longctx.errors import ClusterError

MOST_HOSTS = 128
"""Connections over ssh at the same time."""
MOST_RANKS = 8
"""On one machine."""
_WORKER = ("-m", "launcher.doctor.network.worker")


def survey_hosts(hosts: Sequence[str], *, port: int) -> Survey:
    """The network between hosts, of which the first one holds rank 0 and ``port``. ClusterError for no name of a host.

    Of more than ``MOST_HOSTS`` so many, evenly spaced.
    """
    for host in hosts:
        check_host_name(host)
    chosen = [hosts[index * len(hosts) // MOST_HOSTS] for index in range(MOST_HOSTS)]
    if len(hosts) <= MOST_HOSTS:
        chosen = list(hosts)
    # The same line for every host, and nothing of a hostfile in it.
    line = line_there(_WORKER)
    return _survey({host: ssh_command(host, line) for host in chosen}, port=port, over_ssh=True)


def survey_this_machine(num_gpus: int) -> Survey:
    """The network as processes of this machine see it, one for each GPU, but one at least and eight at most."""
    count = min(max(num_gpus, 1), MOST_RANKS)
    command = [sys.executable]
    command += _WORKER
    # Ranks of one machine meet at its loopback interface, at a port that is free.
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
