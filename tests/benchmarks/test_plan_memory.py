"""The eleven runs of ``benchmarks.plan_memory``: they plan, they differ, and what was saved adds up."""

from __future__ import annotations

import json

import pytest

from benchmarks.machine import KINDS, RESULTS
from benchmarks.plan_memory import BOUND, CASES
from benchmarks.plan_runs import planned
from launcher.plan.hardware import load_hardware
from launcher.plan.zero_bytes import StepBytes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_plans_and_is_more_than_its_program(case):
    run = planned(case, load_hardware("cpu"))
    for rank in run.ranks:
        assert rank.bytes.peak > 2 * rank.bytes.process


@pytest.mark.parametrize("kind", KINDS)
def test_saved_errors_are_those_of_the_saved_bytes(kind):
    path = RESULTS / kind / "plan_memory.json"
    if not path.exists():
        pytest.skip("not measured on this kind of processor")
    rows = json.loads(path.read_text())["rows"]
    # A case that is newer than the file has no figure there.
    names = [row["name"] for row in rows]
    assert names == [case.name for case in CASES if case.name in names]
    assert len(names) >= 10
    assert [bound["case"] for bound in json.loads(path.read_text())["bounds"]] == names
    for row in rows:
        assert row["error"] == pytest.approx(row["planned_bytes"] / row["measured_bytes"] - 1)
        assert row["planned_bytes"] == StepBytes(**row["parts"]).peak + row.get("copy_bytes", 0)
        assert abs(row["error"]) <= BOUND
