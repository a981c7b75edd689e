"""Rows of the fault suite: kept by tests, refused where a run did not recover, and made into a table."""

from __future__ import annotations

import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks import faults
from tests.faults import FaultRow, FaultRows, read_rows, verdict

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


def test_rows_are_kept_by_group_and_kind_and_the_last_one_counts(tmp_path: Path):
    rows = FaultRows(tmp_path / "rows")
    for row in (replace(ROW, group="files"), ROW, replace(ROW, seconds=7.0), replace(ROW, kind="a halt")):
        rows.add(row)
    found = read_rows(tmp_path / "rows")
    assert [(row.group, row.kind, row.seconds) for row in found] == [
        ("process", "a halt", 0.04),
        ("process", "a kill", 7.0),
        ("files", "a kill", 0.04),
    ]
    assert read_rows(tmp_path / "none") == []


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


def test_a_verdict_is_one_line_without_what_differs(tmp_path: Path):
    text = f"before\n2026-11-25 22:30:01,123 ERROR launcher.x: {tmp_path}/a of process 812 on {socket.gethostname()} "
    text += "at 127.0.0.1:29500\nafter"
    assert verdict(text, "812", {tmp_path: "RUN"}) == "RUN/a of process N on HOST at 127.0.0.1:PORT"
    with pytest.raises(AssertionError, match="stands on 0 lines"):
        verdict(text, "nowhere")
    with pytest.raises(AssertionError, match="stands on 2 lines"):
        verdict("one word\nanother word", "word")
    assert verdict("word " * 99, "word").endswith(" …")


def test_new_rows_replace_older_ones_and_the_table_has_them_all():
    before = [{**asdict(ROW), "date": "2026-01-01"}, {**asdict(replace(ROW, kind="a halt")), "date": "2026-01-01"}]
    rows = faults.merged(before, [replace(ROW, seconds=2.0, steps_lost=3)])
    assert [(row["kind"], row["seconds"]) for row in rows] == [("a halt", 0.04), ("a kill", 2.0)]
    assert rows[0]["date"] == "2026-01-01" < rows[1]["date"]
    head, lines = faults.table({"rows": rows})
    assert lines == [
        ["process", "**a halt**: of rank 1", "ClusterError: rank 1 \\| died", "< 0.1", "1", "equal"],
        ["process", "**a kill**: of rank 1", "ClusterError: rank 1 \\| died", "2.0", "3", "equal"],
    ]
    assert len(head) == 6
