"""The hosts of a run that still answer, and a run on them alone."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launcher.config.check import check_run
from launcher.config.sections import RunConfig
from launcher.doctor.remote import CONNECT_SECONDS, ssh_command
from longctx.errors import ConfigError, LongCtxError
from longctx.files import write_atomically

_AT_ONCE = 64
"""Connections over ssh at the same time."""
_ANSWER_SECONDS = 3 * CONNECT_SECONDS


def silent_hosts(slots: Mapping[str, int]) -> list[str]:
    """Those that do not answer over ssh without a password; none of a file with one host, which needs no ssh."""
    hosts = list(slots)
    if len(hosts) == 1:
        return []
    with ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
        answers = list(pool.map(_answers, hosts))
    return [host for host, answered in zip(hosts, answers, strict=True) if not answered]


def suspected_ranks(record: Mapping[str, Any]) -> list[int]:
    """The ranks that an audit's event names with certainty; none of a finding that leaves it open."""
    named = [finding["ranks"][0] for finding in record["findings"] if len(finding["ranks"]) == 1]
    return sorted(set(named))


def hosts_of(ranks: Sequence[int], slots: Mapping[str, int], world_size: int) -> list[str]:
    """The hosts of these ranks by a hostfile's ``slots``; of a run without one, or on other hosts, "this machine".

    Ranks are counted through the hosts, slot by slot.
    """
    if ranks and sum(slots.values()) != world_size:
        return ["this machine"]
    places = [host for host, count in slots.items() for _ in range(count)]
    return list(dict.fromkeys(places[rank] for rank in ranks))


def trusted_hosts(
    slots: Mapping[str, int], suspects: Sequence[str], config: RunConfig
) -> tuple[dict[str, int], list[str]]:
    """The hosts without those that computed a wrong number, and these; all where the others make no valid run."""
    left_out = [host for host in slots if host in suspects]
    trusted = {host: count for host, count in slots.items() if host not in left_out}
    # Better a host that was wrong once than no run: an audit will say so again.
    if not largest_valid(trusted, config):
        return dict(slots), []
    return trusted, left_out


def largest_valid(slots: Mapping[str, int], config: RunConfig) -> dict[str, int]:
    """The first of these hosts, as many as the run's degrees and its tokens a step allow; none where no number does."""
    hosts = list(slots.items())
    for count in range(len(hosts), 0, -1):
        # In their order: rank 0, which writes the run's files, stays on the first one.
        chosen = dict(hosts[:count])
        try:
            check_run(config, sum(chosen.values()))
        except ConfigError:
            continue
        return chosen
    return {}


def write_hostfile(path: Path, slots: Mapping[str, int]) -> None:
    """Write a hostfile, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{host} slots={count}\n" for host, count in slots.items()).encode())


def _answers(host: str) -> bool:
    try:
        done = subprocess.run(
            ssh_command(host, "true"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    except FileNotFoundError as error:
        raise LongCtxError(
            "this machine has no ssh, by which the hosts are asked: apt-get install openssh-client"
        ) from error
    return done.returncode == 0
