"""A machine that was examined, and a stand-in for the ssh program."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.doctor.check_result import CheckResult
from launcher.doctor.machine_checks import MachineInfo, MachineReport
from launcher.doctor.session import MARK

FACTS = MachineInfo(
    name="node-01",
    time=1000.0,
    python="3.12.1",
    executable="/venv/bin/python",
    code="0123456789abcdef",
    packages={"torch": "2.13.0", "deepspeed": "0.19.8", "flash-attn": None},
    cuda="13.0",
    driver="580.10",
    gpus=["H100"] * 8,
    folder="/shared/runs",
)


def machine(*findings: CheckResult, **facts: Any) -> MachineReport:
    """``DOCUMENT_DTYPE``, some of them changed."""
    return MachineReport(facts=replace(FACTS, **facts), findings=list(findings))


def answering(file: Path, **facts: Any) -> str:
    """What a shell does that answers one order, kept in ``orders`` beside ``file``, with this machine."""
    file.write_text(f"{MARK}{json.dumps(machine(**facts).to_json())}\n")
    return f"head -n 1 >> {file.with_name('orders')}; cat {file}"


def put_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A program of this name that does ``script`` instead; returns the file to which it writes its arguments.

    Hosts that time out, refuse or talk nonsense are not to be had from a real server.
    """
    program, arguments = folder / "ssh", folder / "arguments"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {arguments}\nfor last; do :; done\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return arguments
