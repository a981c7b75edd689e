"""A run's hostfile: find it, parse it strictly, and compare it with the ranks that were started.

The deepspeed launcher only warns about a missing hostfile and then runs on one machine. It also accepts host names that
a shell or ssh would read as options. Both are errors here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import psutil

from longctx.errors import ClusterError
from longctx.untrusted.strict_json import read_bounded, shown

# No leading dash: ssh would read such a host as an option.
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
# Characters that end a line in Python but not in deepspeed, and terminal control characters.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029]")
_MARK = "\ufeff"
_MOST_BYTES = 4 * 2**20
DEFAULT_HOSTFILE = Path("/job/hostfile")
"""Hostfile that the deepspeed command reads, without a message, if it is given no other."""
FILTERS = ("--include", "--exclude", "-i", "-e", "--num_nodes", "--num_gpus", "--num_accelerators")
"""deepspeed flags that start fewer ranks than the hostfile has slots."""
_MOST_SLOTS = 4096


def check_hostfile(setting: str, world_size: int, command: Sequence[str] | None = None) -> None:
    """Raise ClusterError unless ``run.hostfile`` is readable and its slots equal the number of ranks.

    ``setting`` is a path; "launcher" for the --hostfile in the deepspeed command that started this process (without
    one, the check is skipped); or "none". ``command`` is that command line, by default found among the parent
    processes.
    """
    if setting == "none":
        return
    if command is None:
        command = launcher_command()
    path = setting
    if setting == "launcher":
        path = flag_value(command, ("--hostfile", "-H"))
        if path is None and command and DEFAULT_HOSTFILE.is_file():
            path = str(DEFAULT_HOSTFILE)
    if path is None:
        return
    slots = read_hostfile(Path(path))
    # A filter starts fewer ranks on purpose.
    filtered = any(argument.split("=")[0] in FILTERS for argument in command)
    if not filtered and sum(slots.values()) != world_size:
        hosts = ", ".join(f"{host} slots={n}" for host, n in slots.items())
        raise ClusterError(
            f"{world_size} ranks were started, but {path} has {sum(slots.values())} slots ({hosts}).\n"
            "Start all of them, pick hosts with deepspeed's --include, start longctx train --ranks N on one machine, "
            "or pass --run.hostfile none."
        )


def read_hostfile(path: Path) -> dict[str, int]:
    """Parse the slots per host. Raise ClusterError with the line number if a line is not ``HOST slots=N``."""
    try:
        text = read_bounded(path, _MOST_BYTES).decode()
    except FileNotFoundError as error:
        raise ClusterError(
            f"hostfile {path} does not exist (looked in {Path.cwd()}); without it deepspeed would run only on this "
            "machine.\nGive an existing file to --hostfile; on one machine longctx train --ranks N needs no hostfile."
        ) from error
    except (OSError, ValueError) as error:
        raise ClusterError(f"hostfile {path} cannot be read: {error}.") from error
    if text.startswith(_MARK):
        raise ClusterError(
            f"hostfile {path} begins with a byte order mark, which deepspeed would read as part of the first host. "
            "Save it as UTF-8 without BOM."
        )
    slots: dict[str, int] = {}
    # Split lines as deepspeed does, also at Windows line ends.
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        control_char = _CONTROL.search(line)
        if control_char is not None:
            raise ClusterError(f"{path}:{number}: {shown(line)} contains the character {control_char[0]!r}. Remove it.")
        fields = line.split("#")[0].split()
        if not fields:
            continue
        host, count = _parse_line(fields, f"{path}:{number}: {shown(line.strip())}")
        if host in slots:
            raise ClusterError(f"{path}:{number}: host {host!r} is listed twice. Give it one line with all its slots.")
        slots[host] = count
    if not slots:
        raise ClusterError(f"hostfile {path} lists no host. Write one line per host, such as: localhost slots=2")
    return slots


def is_own_name(host: str, own_name: str) -> bool:
    """Return True if a host in a hostfile is this machine, ``own_name``, without a network query."""
    return host in ("localhost", own_name, own_name.partition(".")[0]) or host.startswith("127.")


def check_host_name(host: str) -> None:
    """Raise ClusterError unless ``host`` is a valid host name that a shell and ssh read literally."""
    if not _HOST.fullmatch(host):
        raise ClusterError(
            f"{host!r} is not a host name: use letters, digits, '.', '-' and '_', and a letter or digit at both ends."
        )


def launcher_command() -> list[str]:
    """Return the command line of the deepspeed launcher among this process's ancestors; empty without one."""
    try:
        for parent in psutil.Process().parents():
            command = parent.cmdline()
            # `deepspeed …`, `python /bin/deepspeed …` or `python -m deepspeed.launcher.runner …`.
            if any(Path(a).name in ("deepspeed", "ds") or a == "deepspeed.launcher.runner" for a in command[:4]):
                return _own_arguments(command)
    except psutil.Error:
        # A parent that has ended, or that may not be inspected, is not our launcher.
        pass
    return []


def _own_arguments(command: list[str]) -> list[str]:
    """Return the launcher's own arguments: everything before the script it starts."""
    for index, argument in enumerate(command):
        # The script is the first .py file that is not a flag's value; the program itself is at index 0 or 1.
        if argument.endswith(".py") and index > 1 and not command[index - 1].startswith("-"):
            return command[:index]
    return command


def flag_value(command: Sequence[str], names: tuple[str, ...]) -> str | None:
    """Return the value after a flag with one of these names, separated by a space or a ``=``; None without one."""
    for index, argument in enumerate(command):
        flag, _, value = argument.partition("=")
        if flag not in names:
            continue
        if value:
            return value
        if index + 1 < len(command):
            return command[index + 1]
        return None
    return None


def _parse_line(fields: list[str], where: str) -> tuple[str, int]:
    """Parse a line into host and slots. Raise ClusterError, with the place ``where``, if it is malformed."""
    match = None
    if len(fields) == 2 and _HOST.fullmatch(fields[0]):
        match = re.fullmatch(r"slots=([0-9]{1,6})", fields[1])
    if not match:
        raise ClusterError(
            f"{where} is not `HOST slots=N`; a host has letters, digits, '.', '-' and '_', and a letter or "
            "digit at both ends.\n"
            "Write for example: node-01 slots=8"
        )
    if not 1 <= int(match[1]) <= _MOST_SLOTS:
        raise ClusterError(f"{where}: slots must be between 1 and {_MOST_SLOTS}.")
    return fields[0], int(match[1])
