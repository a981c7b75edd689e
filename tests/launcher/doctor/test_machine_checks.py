"""What a machine tells of itself, and what is taken from another one's answer."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from pydantic import TypeAdapter

from launcher.doctor.check_result import CheckResult
from launcher.doctor.machine_checks import CheckOptions, MachineReport, check_machine
from launcher.doctor.session import read_answer
from longctx.errors import ClusterError
from tests.launcher.doctor.samples import machine

LITTLE = CheckResult(check="folder", verdict="warn", value="1 GiB", advice="more")


def taken(value: Any) -> MachineReport:
    """What is made of another machine's answer."""
    return read_answer(json.dumps(value), TypeAdapter(MachineReport))


def answer(**facts: Any) -> dict[str, Any]:
    """A machine's JSON with some facts replaced by anything."""
    told = machine(LITTLE).to_json()
    told["facts"].update(facts)
    return told


def test_a_machine_survives_the_way():
    told = machine(LITTLE)
    assert taken(told.to_json()) == told


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"facts": {}, "findings": []},
        answer(time=True),
        answer(python=3.12),
        answer(packages=["torch"]),
        answer(probe=1),
        {**answer(), "findings": [{**asdict(LITTLE), "verdict": "splendid"}]},
    ],
    ids=repr,
)
def test_anything_else_is_refused(value):
    with pytest.raises(ClusterError):
        taken(value)


def test_no_control_character_reaches_the_terminal():
    evil = "\x1b]0;title\x07red\nsecond line\u202e"
    told = {**answer(python=evil, gpus=[evil]), "findings": [{**asdict(LITTLE), "value": evil * 100}]}
    found = taken(told)
    shown = [found.facts.python, *found.facts.gpus, found.findings[0].value]
    assert all(text.isprintable() for text in shown)
    assert len(found.findings[0].value) < 500


def test_examining_leaves_nothing_and_reads_no_probe_unasked(tmp_path):
    found = check_machine(CheckOptions(folder=tmp_path / "runs", port=0))
    assert found.facts.probe is None
    assert found.facts.folder == str(tmp_path)
    checks = [finding.check for finding in found.findings]
    assert len(checks) == len(set(checks)), "a machine without trouble has one line a check"
    assert "master port" not in checks
    assert not list(tmp_path.iterdir())
