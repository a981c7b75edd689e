"""Asking another machine: ``doctor`` runs there over ssh, as pdsh would start ranks, and answers in JSON."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launcher.cluster.hostfile import check_host_name
from launcher.cluster.remote_shell import environment_files
from launcher.doctor.environment import exports
from launcher.doctor.finding import printable
from launcher.doctor.machine import Machine, Options, machine_from_json
from longctx.errors import ClusterError

CONNECT_SECONDS = 5
ANSWER_SECONDS = 120.0
"""How long a host may take: Python and PyTorch start there, perhaps from a slow shared disk."""
BY_HAND = "ssh -o BatchMode=yes HOST true"
"""The line that tells a user whether ssh works."""
_MOST_CHARACTERS = 2**20
_SSH_FAILED = 255


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a host said, and how its clock stands to ours."""

    machine: Machine
    seconds: float
    """From the question to the answer."""
    skew_seconds: float
    """How much its clock is ahead of ours. The way of the answer, milliseconds on a local network, counts as behind."""


@dataclass(frozen=True, kw_only=True)
class NoAnswer:
    """Why a host's answer cannot be used."""

    why: str
    advice: str


def ask(host: str, options: Options, *, timeout: float = ANSWER_SECONDS) -> Answer | NoAnswer:
    """Examine ``host`` over ssh, with this machine's Python and in this folder. ClusterError for no name of a host."""
    check_host_name(host)
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            ssh_command(host, remote_command(options)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        return NoAnswer(why="this machine has no ssh", advice="apt-get install openssh-client pdsh")
    said, heard, complaint = _listen(process, timeout)
    seconds = time.monotonic() - started
    if seconds >= timeout:
        return NoAnswer(why=f"no answer within {timeout:.0f} s", advice=f"Try by hand: {BY_HAND}")
    # 1 is what doctor ends with where a check failed: the answer says which.
    if process.returncode not in (0, 1) or not said:
        return _no_answer(process.returncode, complaint)
    try:
        machine = machine_from_json(json.loads(said))
    except (ValueError, OverflowError, RecursionError, ClusterError) as error:
        advice = "Does it run another version of longctx? Copy this machine's folder there"
        return NoAnswer(why=f"an answer that is none: {printable(str(error))}", advice=advice)
    return Answer(machine=machine, seconds=seconds, skew_seconds=machine.facts.time - heard)


def ssh_command(host: str, command: str) -> list[str]:
    """The words that start ``command`` in a shell of ``host``, without ever asking for a password.

    The variable by which pdsh is given options of ssh counts here too.
    """
    more = shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", *more, "--", host, command]


def remote_command(options: Options, environment: Mapping[str, str] = os.environ) -> str:
    """The line for a host's shell that examines it."""
    verb = ["doctor", "--local", "--json", "--folder", str(options.folder.absolute())]
    figures = ["--master-port", str(options.port), "--world-size", str(options.world_size)]
    if options.probe:
        figures += ["--probe", options.probe]
    return line_there(("-m", "launcher", *verb, *figures), environment)


def line_there(words: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """The line for a host's shell that starts this Python with ``words``: every word of it is quoted.

    As deepspeed's pdsh does, it sets variables (``environment.py``), goes to this folder, and takes this Python.
    """
    before = exports(environment, environment_files())
    return f"{before}cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([sys.executable, *words])}"


def _listen(process: subprocess.Popen[str], timeout: float) -> tuple[str, float, str]:
    """The JSON that it printed, when its first line came by our clock, and what it wrote to standard error."""
    assert process.stdout is not None
    assert process.stderr is not None
    complaint: list[str] = []
    reader = threading.Thread(target=_drain, args=(process.stderr, complaint), daemon=True)
    reader.start()
    watchdog = threading.Timer(timeout, process.kill)
    watchdog.start()
    try:
        heard = 0.0
        said: list[str] = []
        length = 0
        for line in process.stdout:
            # What a login script prints comes before our answer.
            if not said and line.rstrip() != "{":
                continue
            if not said:
                heard = time.time()
            said.append(line)
            length += len(line)
            # No answer of ours is so long, and it would all be kept in memory.
            if length > _MOST_CHARACTERS:
                process.kill()
                break
        process.wait()
    finally:
        watchdog.cancel()
        process.stdout.close()
    # A connection that ssh keeps for later (ControlPersist) keeps this stream open too.
    reader.join(1.0)
    if not reader.is_alive():
        process.stderr.close()
    return "".join(said), heard, "".join(complaint)


def _drain(stream: IO[str], lines: list[str]) -> None:
    """Keep the last lines of a stream, so that its writer never waits."""
    for line in stream:
        lines.append(line)
        del lines[:-20]


_ADVICE_ON_SSH = {
    "Host key verification failed": "Accept its key once: ssh HOST true",
    "Could not resolve hostname": "This machine knows no such host: mend the hostfile, /etc/hosts or ~/.ssh/config",
    "Connection refused": "No ssh server listens there: systemctl start ssh, or give its port in ~/.ssh/config",
    "timed out": "The machine is down, or a firewall drops what is sent to it: ping HOST",
}
"""What to do about a message of ssh, by a part of it. Without the host's name: hosts in one trouble share a line."""


def _advice_on_ssh(complaint: str) -> str:
    """What to do where ssh itself failed."""
    for part, advice in _ADVICE_ON_SSH.items():
        if part in complaint:
            return advice
    return f"ssh must work without a password: ssh-copy-id HOST; then {BY_HAND}"


def _no_answer(code: int, complaint: str) -> NoAnswer:
    """What ssh's exit code, or that of the shell there, means."""
    said = [printable(line) for line in complaint.splitlines() if line.strip()]
    why = f"exit code {code}"
    if said:
        why = said[-1]
    if code == _SSH_FAILED:
        return NoAnswer(why=f"ssh failed: {why}", advice=_advice_on_ssh(complaint))
    # The shell there could not change to the folder, or found no Python, or one without our packages.
    advice = f"The same folder and environment must be there: {Path.cwd()} and {sys.executable}"
    return NoAnswer(why=f"doctor does not run there: {why}", advice=advice)
