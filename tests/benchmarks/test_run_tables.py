"""Tables of what surrounds a run's steps, and the figures and bounds of the search for silent errors."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import endurance, run_tables
from benchmarks.silent_errors import bounds_of, row_of

RANK = {
    "step": 2.0,
    "of_messages": 0.02,
    "of_replicas": 0.1,
    "bytes": 3.0 * 2**20,
    "messages": 24.0,
    "predicted": 0.015,
    "rate": 1e9,
}


def test_shares_are_those_of_the_rank_that_looks_longest():
    row = row_of("ring", [RANK, {**RANK, "step": 1.0, "of_messages": 0.015}])
    assert row["messages_share"] == pytest.approx(0.015)
    assert row["replicas_share"] == pytest.approx(0.1 / 20)
    head, lines = run_tables.of_sums({"rows": [row]})
    assert lines == [["ring", "1.00", "24", "3.0", "0.0150", "0.0150", "1.50%", "0.100", "0.50%"]]
    assert len(head) == 9


def test_each_case_may_spend_a_share_on_messages_and_one_on_replicas():
    rows = [row_of("slow", [{**RANK, "of_messages": 0.05}]), row_of("dear", [{**RANK, "of_replicas": 0.3}])]
    assert [(bound.case, bound.held) for bound in bounds_of(rows)] == [
        ("slow", False),
        ("slow", True),
        ("dear", True),
        ("dear", False),
    ]


def test_contenders_that_save_have_a_row_each():
    seconds = {"longctx": {"save": 0.492, "load": 0.775}, "torch.save": {"save": 2.53, "load": 0.678}}
    head, rows = run_tables.of_saves({"files": {"seconds": seconds}})
    assert head == ["", "saved, s", "loaded, s"]
    assert rows == [["longctx", "0.49", "0.78"], ["torch.save", "2.53", "0.68"]]


def test_a_start_has_the_figure_of_the_state_before_where_there_is_one():
    row = {"model": "dense", "billions": 0.3, "origin": "weights", "stage": 2, "dtype": "bfloat16"}
    row |= {"share": 2.4, "peak": 3.9, "cpu_seconds": 8.9}
    before = {**row, "peak": 4.3}
    del before["cpu_seconds"]
    found = run_tables.of_starts({"before": [before], "rows": [row, {**row, "stage": 3}]})[1]
    assert found[0][1:] == ["weights of a checkpoint", "2, bfloat16", "2.4", "5.8", "4.3 → **3.9**", "8.9"]
    assert found[1][5] == "3.9"


def test_a_long_run_has_a_row_for_each_rank_and_its_memory_in_mib():
    count = {"median": 8.0, "least": 7.0, "most": 9.0, "rise": 0.004}
    found: dict[str, Any] = dict.fromkeys(endurance.COUNTS, count)
    found["memory_bytes"] = {"median": 5 << 20, "least": 4 << 20, "most": 6 << 20, "rise": -0.001}
    found["growth"] = {"early": 2_610.4, "late": -3.0}
    head, rows = endurance.table({"ranks": {"1": {**found, "log": {"early": 201.4, "late": 199.6}}}})
    assert rows == [["1", "5, 4 … 6", "+2,610, late -3", *["8, 7 … 9, +0.40%"] * 3, "201, late 200"]]
    assert "MiB" in head[1]
    assert not any("MiB" in title for title in head[2:])
