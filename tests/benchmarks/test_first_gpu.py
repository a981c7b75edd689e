"""The GPU programme: no step stops another, verdicts are what figures say, and an archive becomes results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.first_gpu import archive, keep, runner
from benchmarks.first_gpu.checks import ROOT, Check, load_checks
from benchmarks.first_gpu.report import FAIL, OK, SKIP, SLOW, Outcome, judge
from benchmarks.first_gpu.steps import PARTS, Expected, Step
from launcher.plan.hardware import load_hardware
from longctx.errors import ConfigError

HEAD = "import os, sys, time, pathlib\nfrom benchmarks.first_gpu.checks import Sheet\n"
HEAD += "words = sys.argv\nplace = pathlib.Path(words[words.index('--scratch') + 1])\n"
HEAD += "sheet = Sheet(place / (words[words.index('--name') + 1] + '.json'))\n"
CODE = {
    "good": "sheet.add('rate', 3.0)",
    "wrong": "sheet.add('error', 2.0, bound=1.0); sheet.add('rate', 3.0)",
    "crashes": "sheet.add('rate', 3.0); raise SystemExit('no driver')",
    "hangs": "sheet.add('rate', 3.0); time.sleep(600)",
    "leaves": f"import subprocess; sheet.add('rate'); subprocess.Popen([{sys.executable!r}, '-c', "
    "'import time, pathlib, sys; time.sleep(3); pathlib.Path(sys.argv[1]).touch()', str(place / 'alive')])",
    "says nothing": "",
    "raises": "with sheet.attempt('first'): 1 / 0\nsheet.add('second', 1.0)",
}


def a_step(name: str, **rest) -> Step:
    return Step(**{"name": name, "module": name, "seconds": 600.0} | rest)


def build_run(steps: list[Step], folder: Path, **rest) -> runner.Run:
    scratch = folder / "scratch"
    scratch.mkdir()
    facts = {"card": "", "machine": {"date": "2026-11-27"}}
    settings = {"device": "cuda", "seconds": 600.0, "cores": 4, "facts": facts} | rest
    return runner.Run(steps, scratch=scratch, out=folder / "r.tgz", **settings)


@pytest.fixture
def fake_steps(monkeypatch):
    """Modules are programs of a line."""
    monkeypatch.setattr(runner, "module_of", lambda name: [sys.executable, "-c", HEAD + CODE[name]])


# --- running ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("fake_steps")
def test_no_step_stops_another(tmp_path, capsys):
    steps, before = [a_step(name) for name in CODE], signal.getsignal(signal.SIGTERM)
    steps[3] = replace(steps[3], seconds=6.0)
    outcomes = build_run([*steps, a_step("last", module="good", alone=True)], tmp_path).all_steps()
    assert [outcome.verdict for outcome in outcomes] == [OK, FAIL, FAIL, FAIL, OK, FAIL, FAIL, OK]
    problems = [outcome.problem for outcome in outcomes]
    assert problems == ["", "", "exit code 1", "ended after its limit of 6 s", "", "it checked nothing", "", ""]
    # What a step had found before it failed is kept.
    assert [[check.name for check in outcome.checks] for outcome in outcomes[2:4]] == [["rate"], ["rate"]]
    assert outcomes[6].checks[0].problem == "ZeroDivisionError: division by zero"
    report = json.loads(archive.read_member(tmp_path / "r.tgz", "report.json"))
    assert [step["verdict"] for step in report["steps"]] == [outcome.verdict for outcome in outcomes]
    assert b"no driver" in archive.read_member(tmp_path / "r.tgz", "crashes.log")
    assert len(capsys.readouterr().out.splitlines()) == len(outcomes)
    assert signal.getsignal(signal.SIGTERM) == before
    # What a step leaves running ends with it.
    time.sleep(3.2)
    assert not (tmp_path / "scratch" / "alive").exists()


@pytest.mark.usefixtures("fake_steps")
def test_a_step_that_comes_too_late_is_skipped(tmp_path):
    late = a_step("late", module="good", least=30.0, alone=True)
    outcomes = build_run([a_step("hangs", seconds=1.0), late], tmp_path, seconds=20.0).all_steps()
    assert [(outcome.verdict, outcome.problem) for outcome in outcomes][1] == (SKIP, "out of time")


SIGNALLED = """
import sys
from pathlib import Path
from tests.benchmarks import test_first_gpu as t
t.runner.module_of = lambda name: [sys.executable, "-c", t.HEAD + t.CODE[name]]
steps = [t.a_step("good", alone=True), t.a_step("hangs"), t.a_step("after", module="good", alone=True)]
for outcome in t.build_run(steps, Path(sys.argv[1])).all_steps(): print(outcome.verdict)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_leaves_an_archive_of_all_that_was_done(tmp_path):
    words = [sys.executable, "-c", SIGNALLED, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while not load_checks(tmp_path / "scratch" / "hangs.json") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert said.split()[-3:] == [OK, FAIL, SKIP], said
    report = json.loads(archive.read_member(tmp_path / "r.tgz", "report.json"))
    assert [step["verdict"] for step in report["steps"]] == [OK, FAIL, SKIP]
    assert report["steps"][1]["problem"] == "ended by a signal"
    assert report["steps"][1]["checks"][0]["figure"] == 3.0


def names(steps) -> list[str]:
    return [step.name for step in steps]


def test_steps_start_as_cores_allow_and_none_passes_one_that_runs_alone():
    a, b, c = a_step("a", cores=3), a_step("b", cores=2), a_step("c", after=("a",))
    alone, d = a_step("alone", alone=True), a_step("d")
    assert names(runner.startable([a, b, c, alone, d], [], set(), cores=4)) == ["a"]
    assert names(runner.startable([a, b, c, alone, d], [], set(), cores=8)) == ["a", "b"]
    assert names(runner.startable([c, alone, d], [b], {"a"}, cores=4)) == ["c"]
    assert names(runner.startable([alone, d], [c], {"a", "b"}, cores=4)) == []
    assert names(runner.startable([alone, d], [], {"a"}, cores=4)) == ["alone"]
    assert names(runner.startable([a], [], set(), cores=1)) == ["a"]
    # One that is waited for and not among these steps is not waited for.
    assert names(runner.startable([c], [], set(), cores=1)) == ["c"]


def starts(steps, cores: int) -> dict[str, float]:
    """When each step begins if all take as long as they may."""
    pending, running, ended, now, found = list(steps), [], set(), 0.0, {}
    while pending or running:
        for step in list(runner.startable(pending, [one for _, one in running], ended, cores=cores)):
            pending.remove(step)
            running.append((now + step.seconds, step))
            found[step.name] = now
        now = min(end for end, _ in running)
        ended |= {step.name for end, step in running if end <= now}
        running = [(end, step) for end, step in running if end > now]
    return found


def test_timed_steps_have_their_time_whatever_hangs_before_them():
    found = starts(PARTS["1"], cores=16)
    assert found["attention"] <= 220
    # Timed in 190 s where all that precedes takes all of its time, and nothing but a hang does.
    assert found["compiled"] <= 380
    assert starts(PARTS["2"], cores=16)["rings"] <= 240
    known = [step.name for part in PARTS.values() for step in part]
    assert len(set(known)) == len(known)
    assert all(name in known for part in PARTS.values() for step in part for name in step.after)


# --- verdicts -----------------------------------------------------------------------------------------------

RATED = a_step("rated", shows="rate", expected={"rate": Expected(figure=100.0, source="?", cards={"H200": 200.0})})


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (Check(name="rate", figure=86.0), OK),
        (Check(name="rate", figure=84.0), SLOW),
        (Check(name="rate", figure=float("nan")), SLOW),
        (Check(name="size", figure=117.0, expected=100.0, at_most=True), OK),
        (Check(name="size", figure=118.0, expected=100.0, at_most=True), SLOW),
        (Check(name="error", figure=1e-3, bound=1e-2), OK),
        (Check(name="error", figure=2e-2, bound=1e-2), FAIL),
        (Check(name="error", figure=float("nan"), bound=1e-2), FAIL),
        (Check(name="error", bound=1e-2), FAIL),
        (Check(name="error", figure=0.0, bound=0.0), OK),
        (Check(name="fact", figure=-3.0), OK),
        (Check(name="kernel", skipped="not installed"), SKIP),
        (Check(name="kernel", problem="it raised"), FAIL),
    ],
)
def test_a_check_has_the_verdict_that_its_figure_says(check, verdict):
    assert judge(RATED, [check], seconds=1.0).verdict == verdict
    beside_good = judge(RATED, [Check(name="rate", figure=100.0), check], seconds=1.0)
    assert beside_good.verdict == (OK if verdict == SKIP else verdict)


# --- what is kept -------------------------------------------------------------------------------------------


def test_an_archive_stays_below_its_limit_and_keeps_the_end_of_a_log(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MOST_BYTES", 3000)
    monkeypatch.setattr(archive, "_LOG_BYTES", 10)
    scratch = tmp_path / "scratch"
    (scratch / "folder").mkdir(parents=True)
    files = {"a.json": b"{}", "b.log": b"x" * 50 + b"the end...", "trace.json.gz": os.urandom(5000), "c.bin": b"no"}
    for name, content in files.items():
        (scratch / name).write_bytes(content)
    path = tmp_path / "r.tgz"
    assert archive.write_archive(scratch, path) == ["trace.json.gz"]
    assert archive.read_member(path, "b.log") == b"the end..."
    with pytest.raises(KeyError):
        archive.read_member(path, "c.bin")
    assert path.stat().st_size < 3000


def saved(folder: Path, outcomes: list[Outcome], *, card: str, dry: bool = False, date: str = "2026-11-27") -> Path:
    scratch = folder / "kept"
    scratch.mkdir(exist_ok=True)
    report = {"machine": {"date": date}, "card": card, "dry": dry, "steps": [one.to_json() for one in outcomes]}
    (scratch / "report.json").write_text(json.dumps(report))
    path = folder / f"{date}.tgz"
    archive.write_archive(scratch, path)
    return path


def measured(**rates: float) -> Outcome:
    step = next(step for step in PARTS["1"] if step.name == "attention")
    checks = [Check(name=f"cudnn {name.replace('_', ' ')}", figure=rate) for name, rate in rates.items()]
    return judge(step, checks, seconds=40.0)


def machine(matmul: float) -> Outcome:
    return judge(PARTS["1"][0], [Check(name="matmul", figure=matmul), Check(name="copy", figure=3.1)], seconds=9.0)


def test_an_archive_becomes_results_and_the_rates_of_an_h100(tmp_path):
    profile = tmp_path / "h100.toml"
    profile.write_text(keep.PROFILE.read_text())
    results, card = tmp_path / "results", "NVIDIA H100 80GB HBM3"
    rates = {"8K_forward": 500.0, "8K_backward": 400.0, "32K_forward": 540.0, "32K_backward": 430.0}
    path = saved(tmp_path, [machine(781.0), measured(**rates)], card=card)
    keep.keep([path], results, profile)
    kept = json.loads((results / "h100" / "first_gpu.json").read_text())
    assert kept["steps"]["machine"]["verdict"] == OK
    hardware = load_hardware(str(profile))
    assert hardware.product_flops.at() == 781e12
    assert hardware.memory_bandwidth.at() == pytest.approx(3.1e12)
    assert hardware.attention_flops.at(length=8192) == pytest.approx(500e12)
    assert hardware.attention_backward_flops.at(length=1 << 20) == pytest.approx(430e12)
    text = profile.read_text()
    assert "measured by benchmarks/first_gpu.sh, NVIDIA H100 80GB HBM3, 2026-11-27" in text
    assert "none of them was measured" not in text
    # All other figures are as they were.
    before, after = (tomllib.loads(each) for each in (keep.PROFILE.read_text(), text))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"product_flops", "memory_bandwidth", "attention_flops", "attention_backward_flops"}


def test_a_later_archive_replaces_the_steps_that_it_ran_and_no_others(tmp_path):
    results, profile, card = tmp_path / "results", tmp_path / "no.toml", "NVIDIA H200"
    skipped = Outcome(name="attention", verdict=SKIP, seconds=0.0, problem="out of time")
    first = saved(tmp_path, [machine(500.0), measured(**{"8K_forward": 500.0})], card=card)
    second = saved(tmp_path, [machine(790.0), skipped], card=card, date="2026-11-28")
    keep.keep([first, second], results, profile)
    kept = json.loads((results / "h200" / "first_gpu.json").read_text())
    assert kept["steps"]["machine"]["checks"][0]["figure"] == 790.0
    assert (kept["steps"]["attention"]["verdict"], kept["steps"]["attention"]["date"]) == (OK, "2026-11-27")
    # An H200's rates are none of an H100.
    assert not profile.exists()


def test_a_dry_run_is_no_result(tmp_path):
    with pytest.raises(ConfigError, match="dry run"):
        keep.keep([saved(tmp_path, [machine(1.0)], card="NVIDIA H100", dry=True)], tmp_path / "results")
    assert not (tmp_path / "results").exists()


# --- the command --------------------------------------------------------------------------------------------


def dry_run(part: str, out: Path, **environment: str) -> tuple[subprocess.CompletedProcess, dict]:
    words = {"DRY": "1", "OUT": str(out), "PYTHON": sys.executable, **environment}
    command = ["benchmarks/first_gpu.sh", part]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | words, capture_output=True, text=True, timeout=3000, check=False
    )
    sys.stdout.write(done.stdout[-14_000:] + done.stderr[-2000:])
    return done, json.loads(archive.read_member(out / "r.tgz", "report.json"))


@pytest.mark.slow
@pytest.mark.timeout(3100)
@pytest.mark.parametrize("part", list(PARTS))
def test_a_dry_run_runs_everything(tmp_path, part):
    done, report = dry_run(part, tmp_path)
    wrong = [(step["name"], check) for step in report["steps"] for check in step["checks"] if check["verdict"] == FAIL]
    assert wrong == []
    assert {step["name"]: step["problem"] for step in report["steps"]} == {step.name: "" for step in PARTS[part]}
    assert done.returncode == 0
    assert (tmp_path / "r.tgz").stat().st_size < 16 << 20
    assert len(done.stdout) < 40_000
