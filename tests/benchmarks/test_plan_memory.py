"""The eleven runs of ``benchmarks.plan_memory``: they plan, they differ, and what was saved adds up."""

from __future__ import annotations

import json

import pytest

from benchmarks import plan_memory
from benchmarks.machine import KINDS, RESULTS, machine, processor_kind
from benchmarks.plan_memory import BOUND, CASES, merged
from benchmarks.plan_runs import planned
from launcher.plan.figures import StepBytes
from launcher.plan.hardware import load_hardware


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_run_plans_and_is_more_than_its_program(case):
    run = planned(case, load_hardware("cpu"))
    for rank in run.ranks:
        assert rank.bytes.peak > 2 * rank.bytes.process


def test_the_runs_are_as_different_as_those_of_users():
    settings = [case.settings for case in CASES]
    assert len(CASES) == 11
    assert {case.ranks for case in CASES} == {1, 2, 4}
    assert {s["train.dtype"] for s in settings} == {"float32", "bfloat16"}
    assert {s["train.keep"] for s in settings} == {"all", "attention", "inputs"}
    assert {s["zero.stage"] for s in settings} == {0, 1, 2, 3}


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


def test_a_row_that_was_measured_alone_takes_its_place_with_its_day():
    names = [case.name for case in CASES]
    before = {"machine": {"processor": "one", "date": "2026-01-01"}, "steps": 3}
    before["rows"] = [{"name": name, "error": 0.01} for name in names if name != names[4]]
    found = merged(before, [{"name": name, "error": 0.02} for name in (names[4], names[0])], before["machine"])
    assert [row["name"] for row in found["rows"]] == names
    dated = [row for row in found["rows"] if "date" in row]
    assert [(row["name"], row["error"], row["date"]) for row in dated] == [
        (names[0], 0.02, "2026-01-01"),
        (names[4], 0.02, "2026-01-01"),
    ]
    assert (found["machine"], found["steps"]) == (before["machine"], 3)
    with pytest.raises(ValueError, match="this is two"):
        merged(before, [], {"processor": "two", "date": "2026-01-02"})


@pytest.mark.parametrize("arguments", [["--save"], ["--save", "--quick"], []])
def test_only_what_was_measured_whole_is_added_to_the_others(monkeypatch, tmp_path, arguments):
    """Saved if asked, if there is a result, and not with --quick."""
    path = tmp_path / processor_kind() / "plan_memory.json"
    path.parent.mkdir()
    others = [{"name": case.name, "error": 0.01} for case in CASES if not case.name.startswith("saves")]
    before = {"machine": machine(), "steps": 3, "rows": others, "bounds": []}
    if arguments != ["--save"]:
        # Nothing is added, so it does not matter who measured the others.
        before["machine"]["processor"] = "another"
    path.write_text(json.dumps(before))

    def measure(cases, steps):
        for case in cases:
            yield {"name": case.name, "error": 0.03, "planned_bytes": 103, "measured_bytes": 100}

    monkeypatch.setattr(plan_memory, "measure", measure)
    monkeypatch.setattr(plan_memory, "RESULTS", tmp_path)
    monkeypatch.setattr("benchmarks.machine.RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["plan_memory", "--only", "saves", *arguments])
    assert plan_memory.main() == 0
    result = json.loads(path.read_text())
    if arguments != ["--save"]:
        assert result == before
        return
    assert [row["name"] for row in result["rows"]] == [case.name for case in CASES]
    assert [bound["case"] for bound in result["bounds"]] == [case.name for case in CASES]
    path.unlink()
    # A single row is no result.
    assert plan_memory.main() == 0
    assert not path.exists()
