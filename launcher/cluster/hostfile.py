"""The hostfile a run was started with: found, read strictly, and held against the ranks that really came up.

The deepspeed launcher warns about a missing hostfile and then runs on one machine, and takes host names that a shell or
ssh would read as options; both are errors here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import psutil

from longctx.errors import ClusterError

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_FILTERS = ("--include", "--exclude", "-i", "-e", "--num_nodes", "--num_gpus", "--num_accelerators")
_MOST_SLOTS = 4096


def check_hostfile(setting: str, world_size: int, command: Sequence[str] | None = None) -> None:
    """Raise unless ``run.hostfile`` is readable and has as many slots as there are ranks.

    ``setting`` is a path, "launcher" for the --hostfile of the deepspeed command that started this process (nothing
    is checked when there was none), or "none". ``command`` is that command line, by default found among the parent
    processes.
    """
    if setting == "none":
        return
    command = launcher_command() if command is None else command
    path = _flag_value(command, ("--hostfile", "-H")) if setting == "launcher" else setting
    if path is None:
        return
    slots = read_hostfile(Path(path))
    filtered = any(word.split("=")[0] in _FILTERS for word in command)
    if not filtered and sum(slots.values()) != world_size:
        hosts = ", ".join(f"{host} slots={n}" for host, n in slots.items())
        raise ClusterError(
            f"{world_size} ranks were started, but {path} has {sum(slots.values())} slots ({hosts}).\n"
            "Start all of them, pick hosts with deepspeed's --include, or pass --run.hostfile none."
        )


def read_hostfile(path: Path) -> dict[str, int]:
    """Slots of each host; ClusterError names the line that is not ``HOST slots=N``."""
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise ClusterError(
            f"hostfile {path} does not exist (looked in {Path.cwd()}); without it the launcher would run on this "
            "machine alone.\nGive an existing file to deepspeed --hostfile, or pass --run.hostfile none."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"hostfile {path} cannot be read: {error}.") from error
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        host, count = _parse_line(words, f"{path}:{number}: {line.strip()!r}")
        if host in slots:
            raise ClusterError(
                f"{path}:{number}: host {host!r} stands there twice. Give it one line with all its slots."
            )
        slots[host] = count
    if not slots:
        raise ClusterError(f"hostfile {path} names no host. Write one line a host, such as: localhost slots=2")
    return slots


def launcher_command() -> list[str]:
    """Command line of the deepspeed launcher among this process's ancestors; empty when there is none."""
    try:
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            if any(Path(w).name in ("deepspeed", "ds") or w == "deepspeed.launcher.runner" for w in words[:4]):
                return _own_arguments(words)
    except psutil.Error:
        pass
    return []


def _own_arguments(words: list[str]) -> list[str]:
    """The launcher's own words: everything before the script it starts."""
    for index, word in enumerate(words):
        if word.endswith(".py") and index > 1 and not words[index - 1].startswith("-"):
            return words[:index]
    return words


def _flag_value(command: Sequence[str], names: tuple[str, ...]) -> str | None:
    for index, word in enumerate(command):
        flag, _, value = word.partition("=")
        if flag in names:
            return value or (command[index + 1] if index + 1 < len(command) else None)
    return None


def _parse_line(words: list[str], place: str) -> tuple[str, int]:
    match = re.fullmatch(r"slots=(\d{1,6})", words[1]) if len(words) == 2 else None
    if not match or not _HOST.fullmatch(words[0]):
        raise ClusterError(
            f"{place} is not `HOST slots=N`; a host is letters, digits, dots and dashes, and starts with no dash.\n"
            "Write for example: node-01 slots=8"
        )
    if not 1 <= int(match[1]) <= _MOST_SLOTS:
        raise ClusterError(f"{place}: slots must lie between 1 and {_MOST_SLOTS}.")
    return words[0], int(match[1])
