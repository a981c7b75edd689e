"""The first hour on GPUs: a stage that fails, hangs or has no figures stops no other; a dry run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.first_gpu_hour import FAILED, PASSED, SKIPPED, TOO_LONG, main, run_stages
from benchmarks.gpu_hour_stages import ROOT, Place, Stage, run_figures, stages


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def broken() -> dict:
    raise KeyError("seconds")


STAGES = [
    Stage(name="good", question="?", commands=[python("print('fine')")], minutes=1, figures=lambda: {"rate": 3}),
    Stage(name="bad", question="?", commands=[python("raise SystemExit('no driver')"), python("1")], minutes=1),
    Stage(name="killed", question="?", commands=[python("import os; os.kill(os.getpid(), 9)")], minutes=1),
    Stage(name="hangs", question="?", commands=[python("import time; time.sleep(600)")], minutes=1 / 60),
    Stage(name="no figures", question="?", commands=[python("1")], minutes=1, figures=broken),
    Stage(name="not here", question="?", commands=[["nothing"]], minutes=1, skipped="no GPU: skipped"),
    Stage(name="empty", question="?", commands=[python("raise SystemExit(5)")], minutes=1, fine=(0, 5)),
    Stage(name="last", question="?", commands=[python("1"), python("print('end')")], minutes=1),
]
VERDICTS = [PASSED, FAILED, FAILED, TOO_LONG, FAILED, SKIPPED, PASSED, PASSED]


def test_no_stage_stops_another(tmp_path):
    outcomes = run_stages(STAGES, tmp_path)
    assert [outcome.verdict for outcome in outcomes] == VERDICTS
    told = json.loads((tmp_path / "report.json").read_text())
    assert [stage["verdict"] for stage in told["stages"]] == VERDICTS
    assert told["stages"][0]["figures"] == {"rate": 3}
    assert "no driver" in told["stages"][1]["why"]
    page = (tmp_path / "report.md").read_text()
    for stage, verdict in zip(STAGES, VERDICTS, strict=True):
        assert f"## {stage.name}: {verdict}" in page
    assert "end" in (tmp_path / "last.log").read_text()


def test_what_a_stage_leaves_running_ends_with_it(tmp_path):
    alive = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(alive)!r}).touch()"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    run_stages([Stage(name="leaves", question="?", commands=[python(parent)], minutes=1)], tmp_path)
    # As long as the child would have slept, from later on.
    time.sleep(3.2)
    assert not alive.exists()


def test_names_and_limits_of_the_real_stages(tmp_path):
    for gpus in (0, 1, 8):
        if gpus and not torch.cuda.is_available():
            continue
        known = stages(Place(tmp_path, gpus))
        assert len({stage.name for stage in known}) == len(known)
        assert sum(stage.minutes for stage in known) <= 120
        for stage in known:
            assert stage.skipped or all(word for command in stage.commands for word in command)


def test_an_unknown_stage_is_refused_with_those_there_are(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--dry-run", "--output", str(tmp_path), "--only", "speed"])
    assert ended.value.code == 2
    assert "there are tests, gpu_attention" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where nothing is")
def test_without_a_gpu_it_measures_nothing_and_says_so(tmp_path, capsys):
    assert main(["--output", str(tmp_path)]) == 1
    assert "--dry-run" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_figures_of_a_run_are_those_of_its_records(tmp_path):
    assert run_figures(tmp_path) == {}
    records = [
        {"kind": "event", "event": "resume"},
        {"kind": "train", "step": 1, "loss": 9.0, "tokens_per_second": 5.0, "mfu": None, "max_memory_bytes": 70},
        {"kind": "train", "step": 2, "loss": 8.5, "tokens_per_second": 50.4, "mfu": 0.4, "max_memory_bytes": 60},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert run_figures(tmp_path) == {
        "steps": 2,
        "loss": "9.000 → 8.500",
        "tokens a second": 50,
        "mfu": 0.4,
        "peak bytes": 70,
    }


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_a_dry_run_runs_what_a_cpu_can_and_skips_the_rest(tmp_path):
    command = ["benchmarks/first_gpu_hour.sh", "--dry-run", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1600)
    told = json.loads((tmp_path / "report.json").read_text())
    verdicts = {stage["name"]: stage["verdict"] for stage in told["stages"]}
    wrong = [stage for stage in told["stages"] if stage["verdict"] in (FAILED, TOO_LONG)]
    assert done.returncode == 0, wrong
    ran = ("tests", "gpu_attention", "gpu_moe", "data", "balanced", "profile")
    assert [verdicts[name] for name in ran] == [PASSED] * 6
    assert verdicts["drills"] == SKIPPED
    assert (tmp_path / "profile.json").stat().st_size > 1000
    assert "Self CPU" in (tmp_path / "profile.txt").read_text()
    figures = {stage["name"]: stage["figures"] for stage in told["stages"]}
    assert figures["balanced"]["steps"] == 3
