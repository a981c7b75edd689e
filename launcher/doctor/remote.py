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
from launcher.doctor.finding import Finding
from launcher.doctor.machine import Machine, Options
from launcher.doctor.session import Session
from longctx.errors import ClusterError, ConfigError

CONNECT_SECONDS = 5
ANSWER_SECONDS = 120.0
"""Limit for a host's answer: Python and PyTorch start there, perhaps from a slow shared disk."""
BY_HAND = "ssh -o BatchMode=yes HOST true"
"""Command for users to test ssh."""
WORKER = ("-m", "launcher.doctor.worker")
_SSH_FAILED = 255
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_REFERENCE = re.compile(r"(\$[A-Za-z_][A-Za-z0-9_]*|\$\{[A-Za-z_][A-Za-z0-9_]*\})")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A host's answer, with its clock offset from this machine."""

    machine: Machine
    seconds: float
    """From request to answer."""
    skew_seconds: float
    """Clock offset, positive if the host is ahead. The answer's transit, milliseconds on a local network, counts as
    behind."""


@dataclass(frozen=True, kw_only=True)
class NoAnswer:
    """Reason why a host has no usable answer, with advice."""

    why: str
    advice: str


def ask(host: str, options: Options, *, timeout: float = ANSWER_SECONDS) -> Answer | NoAnswer:
    """Check ``host`` over ssh with this machine's Python and folder. Raise ClusterError for an invalid host name."""
    command = ssh_command(host, line_there(WORKER))
    started = time.monotonic()
    try:
        session = Session(host, command)
    except ClusterError as error:
        return NoAnswer(why=str(error), advice="apt-get install openssh-client pdsh")
    order = {**asdict(options), "folder": os.fspath(options.folder.absolute())}
    try:
        machine = session.ask(timeout, TypeAdapter(Machine), do="examine", **order)
        heard, seconds = time.time(), time.monotonic() - started
    except ClusterError as error:
        return _no_answer(session, str(error), is_late=time.monotonic() - started >= timeout)
    finally:
        session.close()
    return Answer(machine=machine, seconds=seconds, skew_seconds=machine.facts.time - heard)


def _no_answer(session: Session, why: str, *, is_late: bool) -> NoAnswer:
    """Explain a worker's error or ssh's exit code."""
    # A timeout first: by then the worker may still run, and ssh has no exit code yet.
    if is_late:
        return NoAnswer(why=why, advice=f"Try by hand: {BY_HAND}")
    code = session.exit_code
    if code == _SSH_FAILED:
        said = session.last_words()
        return NoAnswer(why=f"ssh failed: {said}", advice=_advice_on_ssh(said))
    if code:
        # The remote shell could not enter the folder, or found no Python, or one without our packages.
        advice = f"The same folder and environment must be there: {Path.cwd()} and {sys.executable}"
        return NoAnswer(why=f"doctor does not run there: {session.last_words()}", advice=advice)
    return NoAnswer(why=why, advice="Does it run another version of longctx? Copy this machine's folder there")


_ADVICE_ON_SSH = {
    "Host key verification failed": "Accept its key once: ssh HOST true",
    "Could not resolve hostname": "This machine knows no such host: mend the hostfile, /etc/hosts or ~/.ssh/config",
    "Connection refused": "No ssh server listens there: systemctl start ssh, or give its port in ~/.ssh/config",
    "timed out": "The machine is down, or a firewall drops what is sent to it: ping HOST",
}
"""Advice by substring in ssh's message; without host names, so that hosts with the same problem share a line."""


def _advice_on_ssh(said: str) -> str:
    for part, advice in _ADVICE_ON_SSH.items():
        if part in said:
            return advice
    return f"ssh must work without a password: ssh-copy-id HOST; then {BY_HAND}"


def ssh_command(host: str, command: str) -> list[str]:
    """Return arguments that run ``command`` in a shell on ``host`` and never prompt for a password.

    They include pdsh's ssh options (PDSH_SSH_ARGS_APPEND). Raise ClusterError for an invalid host name.
    """
    check_host_name(host)
    more = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", *more, "--", host, command]


def line_there(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Return the shell line that starts this Python with ``words`` on a host, every word quoted.

    As deepspeed's pdsh does, it sets variables, enters this folder, and uses this Python.
    """
    before = exports(environment, environment_files())
    return f"{before}cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([sys.executable, *words])}"


# Variables that deepspeed's pdsh sets on every host before it starts ranks.


def check_environment_files(paths: Sequence[Path]) -> list[Finding]:
    """Report each line that is not an assignment, or has a part that a remote shell would run."""
    findings = []
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            try:
                check_assignment(line, f"{path}:{number}")
            except ConfigError as error:
                problem, _, advice = str(error).partition("\n")
                findings.append(Finding.of("environment", problem, advice, "fail"))
    return findings


def exports(environment: Mapping[str, str], paths: Sequence[Path]) -> str:
    """Return shell assignments, each ending in ``;``. Values may reference variables (`$PATH`) but run no command."""
    # Only those variables deepspeed passes on that affect a check.
    prefixes = ("PYTHON",)
    if torch.cuda.is_available():
        prefixes = ("PYTHON", "NCCL")
    handed_over = sorted(name for name in environment if name.startswith(prefixes))
    assigned = {name: _literal(environment[name]) for name in handed_over}
    for path in paths:
        for line in _lines(path):
            if match := _ASSIGNMENT.fullmatch(line.strip()):
                assigned[match[1]] = _expanding(match[2])
    return "".join(f"export {name}={value}; " for name, value in assigned.items() if name.isidentifier())


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _literal(value: str) -> str:
    """Quote a word so that a shell reads it literally."""
    return '"' + re.sub(r'([\\"`$])', r"\\\1", value) + '"'


def _expanding(value: str) -> str:
    """Quote a word but let the shell expand variable references, as deepspeed does."""
    parts = _REFERENCE.split(value)
    # Splitting by a group alternates text and references, starting with text.
    parts[::2] = [_literal(part)[1:-1] for part in parts[::2]]
    return '"' + "".join(parts) + '"'
