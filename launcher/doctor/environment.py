"""The variables that deepspeed's pdsh sets on every host before it starts ranks there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from launcher.cluster.remote_shell import check_assignment
from launcher.doctor.finding import Finding
from longctx.errors import ConfigError

_PREFIX, _PREFIX_WITH_GPUS = "PYTHON", "NCCL"
"""Of what deepspeed hands over by itself, all that a check depends on: the second where this machine has GPUs."""
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_REFERENCE = re.compile(r"(\$[A-Za-z_][A-Za-z0-9_]*|\$\{[A-Za-z_][A-Za-z0-9_]*\})")


def check_environment_files(paths: Sequence[Path]) -> list[Finding]:
    """Return a finding for each line that is no assignment, or of which a shell on another host would run a part."""
    findings = []
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            try:
                check_assignment(line, f"{path}:{number}")
            except ConfigError as error:
                problem, _, advice = str(error).partition("\n")
                findings.append(Finding(check="environment", verdict="fail", value=problem, advice=advice))
    return findings


def exports(environment: Mapping[str, str], paths: Sequence[Path]) -> str:
    """Assignments for a shell, each ending in ``;``. Values may refer to variables there (`$PATH`), and run nothing."""
    prefixes = [_PREFIX]
    if torch.cuda.is_available():
        prefixes.append(_PREFIX_WITH_GPUS)
    handed_over = sorted(name for name in environment if name.startswith(tuple(prefixes)))
    assigned = {name: _literal(environment[name]) for name in handed_over}
    for path in paths:
        for line in _lines(path):
            if match := _ASSIGNMENT.fullmatch(line.strip()):
                assigned[match[1]] = _expanding(match[2])
    return "".join(f"export {name}={value}; " for name, value in assigned.items() if name.isidentifier())


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _literal(value: str) -> str:
    """A word that a shell reads as it is."""
    return '"' + re.sub(r'([\\"`$])', r"\\\1", value) + '"'


def _expanding(value: str) -> str:
    """The same with references to variables left to the shell, as deepspeed leaves them."""
    parts = _REFERENCE.split(value)
    # Every second part is a reference.
    parts[::2] = [_literal(part)[1:-1] for part in parts[::2]]
    return '"' + "".join(parts) + '"'
