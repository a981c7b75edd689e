"""A run's hosts that still answer, and a valid run on these hosts only."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launcher.config.config_sections import RunConfig
from launcher.config.run_config_rules import check_run
from launcher.doctor.remote import CONNECT_SECONDS, ssh_command
from longctx.errors import ConfigError, LongCtxError
from longctx.files import write_atomically

_AT_ONCE = 64
"""Concurrent ssh connections."""
_ANSWER_SECONDS = 3 * CONNECT_SECONDS


def offline_hosts(slots: Mapping[str, int], *, ask_one: bool = False) -> list[str]:
    """Return hosts that do not answer over ssh without a password.

    A single host needs no ssh, so it is only queried with ``ask_one``.
    """
    hosts = list(slots)
    if len(hosts) == 1 and not ask_one:
        return []
    with ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
        answers = list(pool.map(_answers, hosts))
    return [host for host, is_alive in zip(hosts, answers, strict=True) if not is_alive]


def suspected_ranks(record: Mapping[str, Any]) -> list[int]:
    """Return the ranks that an audit event identifies with certainty."""
    # A finding with several ranks does not show which of them was wrong.
    named = [result["ranks"][0] for result in record["findings"] if len(result["ranks"]) == 1]
    return sorted(set(named))


def hosts_of(ranks: Sequence[int], slots: Mapping[str, int], world_size: int) -> list[str]:
    """Map ranks to hosts by a hostfile's ``slots``; return "this machine" if ``slots`` are not this run's.

    Ranks are numbered through the hosts, slot by slot.
    """
    if ranks and sum(slots.values()) != world_size:
        return ["this machine"]
    host_of_rank = [host for host, count in slots.items() for _ in range(count)]
    return list(dict.fromkeys(host_of_rank[rank] for rank in ranks))


def trusted_hosts(
    slots: Mapping[str, int], failed_hosts: Sequence[str], config: RunConfig
) -> tuple[dict[str, int], list[str]]:
    """Split the hosts into trusted ones and excluded suspects; trust all if the others form no valid run."""
    left_out = [host for host in slots if host in failed_hosts]
    trusted = {host: count for host, count in slots.items() if host not in left_out}
    # A host that was wrong once is better than no run: an audit will report it again.
    if not largest_valid(trusted, config):
        return dict(slots), []
    return trusted, left_out


def largest_valid(slots: Mapping[str, int], config: RunConfig) -> dict[str, int]:
    """Return the first hosts, as many as the run's degrees and tokens per step allow; empty if no number does."""
    hosts = list(slots.items())
    for count in range(len(hosts), 0, -1):
        # In order: rank 0, which writes the run's files, stays on the first host.
        chosen = dict(hosts[:count])
        try:
            check_run(config, sum(chosen.values()))
        except ConfigError:
            continue
        return chosen
    return {}


def write_hostfile(path: Path, slots: Mapping[str, int]) -> None:
    """Write a hostfile atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(f"{host} slots={count}\n" for host, count in slots.items()).encode())


def _answers(host: str) -> bool:
    try:
        done = subprocess.run(
            # ``true`` has no effect: it only shows that a login without a password works.
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
        raise LongCtxError("this machine has no ssh, which checks the hosts: apt-get install openssh-client") from error
    return done.returncode == 0
