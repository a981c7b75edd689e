"""Check another machine through a worker that ``doctor`` starts over ssh, as pdsh would start ranks."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter

from launcher.cluster.hostfile import check_host_name
from launcher.cluster.remote_shell import check_assignment, environment_files
from launcher.doctor.check_result import CheckResult
from launcher.doctor.machine_checks import CheckOptions, MachineReport
from launcher.doctor.session import WorkerSession
from longctx.errors import ClusterError, ConfigError

CONNECT_SECONDS = 5
ANSWER_SECONDS = 120.0
"""Limit for a host's answer: Python and PyTorch start there, perhaps from a slow shared disk."""
SSH_TEST_COMMAND = "ssh -o BatchMode=yes HOST true"
"""Command for users to test ssh."""
WORKER = ("-m", "launcher.doctor.doctor_worker")
_SSH_FAILED = 255
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_REFERENCE = re.compile(r"(\$[A-Za-z_][A-Za-z0-9_]*|\$\{[A-Za-z_][A-Za-z0-9_]*\})")


@dataclass(frozen=True, kw_only=True)
class HostAnswer:
    """A host's answer, with its clock offset from this machine."""

    machine: MachineReport
    seconds: float
    """From request to answer."""
    skew_seconds: float
    """Clock offset, positive if the host is ahead. The answer's transit, milliseconds on a local network, counts as
    behind."""


@dataclass(frozen=True, kw_only=True)
class NoAnswer:
    """Reason why a host has no usable answer, with advice."""

    why: str
    hint: str


def ask(host: str, options: CheckOptions, *, timeout: float = ANSWER_SECONDS) -> HostAnswer | NoAnswer:
    """Check ``host`` over ssh with this machine's Python and folder. Raise ClusterError for an invalid host name."""
    command = ssh_command(host, remote_command_line(WORKER))
    started = time.monotonic()
    try:
        session = WorkerSession(host, command)
    except ClusterError as error:
        return NoAnswer(why=str(error), hint="apt-get install openssh-client pdsh")
    request = {**asdict(options), "folder": os.fspath(options.folder.absolute())}
    try:
        machine = session.ask(timeout, TypeAdapter(MachineReport), do="examine", **request)
        received, seconds = time.time(), time.monotonic() - started
    except ClusterError as error:
        return _no_answer(session, str(error), timed_out=time.monotonic() - started >= timeout)
    finally:
        session.close()
    return HostAnswer(machine=machine, seconds=seconds, skew_seconds=machine.facts.time - received)


def _no_answer(session: WorkerSession, why: str, *, timed_out: bool) -> NoAnswer:
    """Explain a worker's error or ssh's exit code."""
    # A timeout first: by then the worker may still run, and ssh has no exit code yet.
    if timed_out:
        return NoAnswer(why=why, hint=f"Try by hand: {SSH_TEST_COMMAND}")
    code = session.exit_code
    if code == _SSH_FAILED:
        message = session.last_error_line()
        return NoAnswer(why=f"ssh failed: {message}", hint=_ssh_hint(message))
    if code:
        # The remote shell could not enter the folder, or found no Python, or one without our packages.
        hint = f"The same folder and environment must be there: {Path.cwd()} and {sys.executable}"
        return NoAnswer(why=f"doctor does not run there: {session.last_error_line()}", hint=hint)
    return NoAnswer(why=why, hint="Does it run another version of longctx? Copy this machine's folder there")


_SSH_HINTS = {
    "Host key verification failed": "Accept its key once: ssh HOST true",
    "Could not resolve hostname": "This machine cannot resolve the host: fix the hostfile, /etc/hosts or ~/.ssh/config",
    "Connection refused": "No ssh server listens there: systemctl start ssh, or set its port in ~/.ssh/config",
    "timed out": "The machine is down, or a firewall drops its packets: ping HOST",
}
"""Advice by substring in ssh's message; without host names, so that hosts with the same problem share a line."""


def _ssh_hint(message: str) -> str:
    for part, hint in _SSH_HINTS.items():
        if part in message:
            return hint
    return f"ssh must work without a password: ssh-copy-id HOST; then {SSH_TEST_COMMAND}"


def ssh_command(host: str, command: str) -> list[str]:
    """Return arguments that run ``command`` in a shell on ``host`` and never prompt for a password.

    They include pdsh's ssh options (PDSH_SSH_ARGS_APPEND). Raise ClusterError for an invalid host name.
    """
    check_host_name(host)
    ssh_options = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", *ssh_options, "--", host, command]


def remote_command_line(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the shell line that starts this Python with ``words`` on a host, every word quoted.

    As deepspeed's pdsh does, it sets variables, enters this folder, and uses this Python.
    """
    before = exports(environment, environment_files())
    return f"{before}cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([sys.executable, *words])}"


# Variables that deepspeed's pdsh sets on every host before it starts ranks.


def check_environment_files(paths: Sequence[Path]) -> list[CheckResult]:
    """Report each line that is not an assignment, or has a part that a remote shell would run."""
    results = []
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            try:
                check_assignment(line, f"{path}:{number}")
            except ConfigError as error:
                problem, _, hint = str(error).partition("\n")
                results.append(CheckResult.of("environment", problem, hint, "fail"))
    return results


def exports(environment: Mapping[str, str], paths: Sequence[Path]) -> str:
    """Return shell assignments, each ending in ``;``. Values may reference variables (`$PATH`) but run no command."""
    # Only those variables deepspeed passes on that affect a check.
    prefixes = ("PYTHON",)
    if torch.cuda.is_available():
        prefixes = ("PYTHON", "NCCL")
    forwarded = sorted(name for name in environment if name.startswith(prefixes))
    assigned = {name: _token_text(environment[name]) for name in forwarded}
    for path in paths:
        for line in _lines(path):
            if match := _ASSIGNMENT.fullmatch(line.strip()):
                assigned[match[1]] = _expanding(match[2])
    return "".join(f"export {name}={value}; " for name, value in assigned.items() if name.isidentifier())


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _token_text(value: str) -> str:
    """Quote a word so that a shell reads it literally."""
    return '"' + re.sub(r'([\\"`$])', r"\\\1", value) + '"'


def _expanding(value: str) -> str:
    """Quote a word but let the shell expand variable references, as deepspeed does."""
    parts = _REFERENCE.split(value)
    # Splitting by a group alternates text and references, starting with text.
    parts[::2] = [_token_text(part)[1:-1] for part in parts[::2]]
    return '"' + "".join(parts) + '"'
