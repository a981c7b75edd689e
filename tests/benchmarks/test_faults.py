"""Rows of the fault suite: kept by tests, refused where a run did not recover, and made into a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import FaultRow, FaultRows

ROW = FaultRow(
    group="process",
    kind="a kill",
    injected="of rank 1",
    seen="ClusterError: rank 1 | died",
    seconds=0.04,
    steps_lost=1,
    beyond_checkpoint=0,
    equal=True,
)


@pytest.mark.parametrize(
    ("changed", "said"), [({"equal": False}, "not those of an undisturbed run"), ({"beyond_checkpoint": 2}, "2 steps")]
)
def test_a_run_that_has_not_recovered_fails_its_test(tmp_path: Path, changed: dict, said: str):
    for path in (None, tmp_path / "rows"):
        with pytest.raises(AssertionError, match=said):
            FaultRows(path).add(replace(ROW, **changed))
    with pytest.raises(AssertionError):
        replace(ROW, seen="")
    with pytest.raises(AssertionError):
        replace(ROW, group="else")
