"""The report's part on the plan: the newest one, what was measured, what a folder without one shows."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.report.planned import bytes_by_kind, planned_section
from launcher.report.run import Run

BYTES = {
    **{"weights": 10, "gradients": 20, "optimizer": 30, "process": 5},
    **{"gathered": 1, "reduction": 2, "kept": 40, "passing": 7},
    **{"kept_on_host": 1000, "kept_on_disk": 1000, "after_backward": 20, "optimizer_step": 0},
}
PLAN: dict[str, Any] = {
    **{"kind": "event", "event": "plan", "step": 0, "hardware": "a device", "bytes": BYTES, "peak_bytes": 115},
    **{"step_seconds": 2.0, "seconds": {"products": 1.5, "attention": 0.5, "hops": 0.0}},
}
CHECKED = {
    **{"kind": "event", "event": "plan_checked", "step": 9, "peak_bytes": 100, "peak_error": 0.15},
    **{"step_seconds": 2.5, "seconds_error": -0.2},
}


def run(*records: dict[str, Any]) -> Run:
    return Run(name="run", records=list(records), config_text="", config={}, environment={}, num_discarded=0)


def test_a_folder_without_a_plan_has_no_part_on_it():
    assert planned_section(run({"kind": "event", "event": "resume", "step": 3})) == []


def test_planned_and_measured_stand_side_by_side():
    (section,) = planned_section(run(PLAN, CHECKED))
    assert section.table is not None
    rows = [tuple(row) for row in section.table.rows]
    assert [row[3] for row in rows] == ["+15.0%", "-20.0%"]
    assert rows[1][1:3] == ("2 s", "2.5 s")
    assert "measured" in str(section.picture)


def test_a_plan_that_is_newer_than_the_comparison_stands_alone():
    (section,) = planned_section(run(PLAN, CHECKED, {**PLAN, "step": 12}))
    assert section.table is not None
    assert all(row[3] == "–" for row in section.table.rows)
    assert "not come to its end" in section.caption


def test_a_gpu_without_profile_has_no_seconds():
    plan = {name: value for name, value in PLAN.items() if name not in ("seconds", "step_seconds")}
    (section,) = planned_section(run(plan))
    assert section.table is not None
    assert len(section.table.rows) == 1
    assert "No profile" in section.caption


@pytest.mark.parametrize(("changed", "peak"), [({}, 115), ({"after_backward": 60}, 125), ({"optimizer_step": 70}, 135)])
def test_the_bars_add_up_to_the_peak(changed, peak):
    assert sum(bytes_by_kind({**BYTES, **changed}).values()) == peak
