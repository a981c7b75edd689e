"""The runner goes on after a failure, tells all of them, and its exit code says so."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as runner
from benchmarks.bounds import Bound, conclude, parse


def outcome(name: str, *bounds: Bound, problem: str = "") -> runner.Outcome:
    return runner.Outcome(name, list(bounds), 12.0, problem)


def test_a_bound_holds_up_to_its_limit_and_no_number_never():
    assert Bound("time", 1.0, 1.0).held
    assert not Bound("time", 1.001, 1.0).held
    assert Bound("rate", 0.9, 0.8, at_least=True).held
    assert not Bound("rate", 0.7, 0.8, at_least=True).held
    assert not Bound("time", float("nan"), 1.0).held
    assert Bound("rate", 0.4, 0.8, at_least=True).margin == 2.0


@pytest.mark.parametrize("misses", [True, False])
def test_all_run_whatever_becomes_of_one(monkeypatch, capsys, misses):
    ran = []

    def run_benchmark(name: str, *, quick: bool, keep: bool) -> runner.Outcome:
        assert quick
        assert not keep
        ran.append(name)
        return outcome(name, Bound("time", 1.0 if misses and name == "peers" else 0.5, 0.9))

    monkeypatch.setattr(runner, "run_benchmark", run_benchmark)
    assert runner.main(["--quick"]) == int(misses)
    assert tuple(ran) == runner.NAMES
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == ("outside their bounds: peers" if misses else "every bound holds")
    # Nothing is left out in silence.
    for name, reason in (runner.SEPARATE | runner.SCRIPTS).items():
        assert any(line.split()[:1] == [name] and reason in line for line in lines), name


def test_a_missed_limit_on_time_is_measured_by_a_second_process(monkeypatch):
    ran = []

    def measure(name: str, arguments: list[str], timeout: float) -> tuple[list[Bound], str]:
        ran.append(arguments)
        ring = ("--only", "ring")
        found = [Bound("time", 1.2, 1.0, case, again=ring) for case in ("even", "Zipf")]
        if len(ran) > 1:
            found = [replace(found[0], figure=0.9), replace(found[1], figure=1.1)]
        return [*found, Bound("error", 1.2, 1.0), Bound("rate", 0.9, 1.0, again=(), at_least=True)], "exit code 1"

    monkeypatch.setattr(runner, "measure", measure)
    found = runner.run_benchmark("attention", quick=True, keep=True)
    assert ran == [["--quick", "--save"], ["--quick", "--only", "ring"], ["--quick"]]
    assert [(bound.figures, bound.held) for bound in found.bounds] == [
        ("1.2, then 0.9", True),
        ("1.2, then 1.1", False),
        ("1.2", False),  # an error is the same in every process
        ("0.9, then 0.9", False),
    ]
    lines = runner.summary([found]).splitlines()
    assert "1.2, then 1.1" in lines[1]
    assert "FAILED" in lines[1]
    assert "1.2, then 0.9" in lines[2]
    assert "held" in lines[2]


SCRIPT = """
import argparse, sys
from benchmarks.bounds import Bound, conclude, parse
options = parse(argparse.ArgumentParser(), quick="less")
sys.exit(conclude("nothing", {}, [Bound("time", %s, 1.0)], options))
"""


@pytest.mark.slow
def test_what_a_benchmark_concludes_is_what_the_runner_reads(monkeypatch):
    def run_command(command: list[str], timeout: float) -> str:
        return original([sys.executable, "-c", SCRIPT % figure, *command[3:]], timeout)

    original = runner.run_command
    monkeypatch.setattr(runner, "run_command", run_command)
    for figure, passed in ((0.5, True), (2.0, False)):
        found = runner.run_benchmark("nothing", quick=True)
        assert found.passed is passed
        assert found.problem == ""
        assert found.bounds == [Bound("time", figure, 1.0)]


def test_a_command_that_dies_or_does_not_end_is_told():
    assert runner.run_command([sys.executable, "-c", "raise SystemExit(3)"], 60) == "exit code 3"
    assert runner.run_command([sys.executable, "-c", ""], 60) == ""
    assert (
        runner.run_command([sys.executable, "-c", "import time; time.sleep(60)"], 0.5)
        == "it took more than 0.5 seconds"
    )


def test_every_script_runs_with_all_or_says_why_not():
    folder = Path(runner.__file__).parent
    texts = {path.stem: path.read_text() for path in folder.glob("*.py")}
    texts |= {path.parent.name: path.read_text() for path in folder.glob("*/__main__.py")}
    scripts = {name for name, text in texts.items() if 'if __name__ == "__main__"' in text}
    # The command of all benchmarks, and the one that writes their tables, measure nothing.
    listed = [*runner.NAMES, *runner.SEPARATE, *runner.SCRIPTS, *runner.GPU]
    assert sorted(listed) == sorted(scripts - {"__main__", "tables"})
    for name in listed:
        keeps_bounds = f'conclude("{name}"' in texts[name] and "parse(parser" in texts[name]
        assert keeps_bounds == (name not in (*runner.SCRIPTS, *runner.GPU)), name


@pytest.mark.parametrize(("asked", "kept"), [([], False), (["--save"], True), (["--save", "--quick"], False)])
def test_results_are_written_only_when_asked(monkeypatch, tmp_path, asked, kept):
    monkeypatch.setattr("benchmarks.machine.RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["decoder", *asked])
    options = parse(argparse.ArgumentParser(), quick="less")
    assert conclude("decoder", {"rows": []}, [], options) == 0
    assert [path.name for path in tmp_path.rglob("*.json")] == ["decoder.json"] * kept
