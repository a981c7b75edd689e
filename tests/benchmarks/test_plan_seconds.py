"""The ten runs of ``benchmarks.plan_seconds``: they plan, their data is what they say, the slowest rank counts."""

from __future__ import annotations

import json

import pytest

from benchmarks.machine import KINDS, RESULTS
from benchmarks.plan_runs import planned, write_shards
from benchmarks.plan_seconds import BOUND, CASES, Steps, measured_seconds
from data_pipeline.shards.reader import ShardSet
from launcher.plan.hardware import load_hardware


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_plans_on_cpus(case):
    run = planned(case, load_hardware("cpu"))
    assert run.seconds.total > 0
    assert run.fits
    assert run.world.ranks == case.ranks


def test_documents_have_the_length_that_the_plan_is_told(tmp_path):
    shards = ShardSet.open(write_shards(tmp_path, 4096))
    assert shards.num_tokens == shards.num_documents * 4096
    assert write_shards(tmp_path, 4096) == shards.folder


def test_the_slowest_rank_counts_and_a_shared_core_counts_twice(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    steps = [Steps(wall=[3.0, 1.0, 2.0], cpu=[1.0, 1.0, 9.0]), *(Steps(wall=[1.0], cpu=[0.5]) for _ in range(3))]
    assert measured_seconds(steps, cpu_time=False) == 2.0
    assert measured_seconds(steps, cpu_time=True) == 2.0
    assert measured_seconds(steps[:1], cpu_time=True) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_saved_errors_are_those_of_the_saved_seconds(kind):
    path = RESULTS / kind / "plan_seconds.json"
    if not path.exists():
        pytest.skip("not measured on this kind of processor")
    rows = json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == [case.name for case in CASES]
    for row in rows:
        assert row["error"] == pytest.approx(row["planned_seconds"] / row["measured_seconds"] - 1)
        assert row["planned_seconds"] == pytest.approx(sum(row["parts"].values()))
        assert abs(row["error"]) <= BOUND
