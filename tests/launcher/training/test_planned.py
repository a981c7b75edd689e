"""What a run expects of itself: the profile it takes, the comparison at its end, the refusal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from launcher.config.load_config import load_run_config
from launcher.plan.hardware import FOLDER, MEASURED_FILE
from launcher.plan.planned_world import World
from launcher.plan.synthetic_documents import uniform_documents
from launcher.training.hooks.plan_watch import PlanWatch, comparison_line
from launcher.training.start import Expected, check_planned_memory, estimate_step, find_hardware
from longctx.errors import ConfigError
from longctx.kernels.processor import has_native_bfloat16
from tests.launcher.runs import SCREEN, resolved

STEP: Any = None
"""Of which the watch reads nothing."""
QUICK = ["--config", "quickstart", "--data.seq_len", "64", "--train.tokens_per_step", "64"]


def expected(device_name: str = "cpu", **sizes: int) -> Expected:
    device_type = "cpu" if device_name == "cpu" else "cuda"
    world = World(ranks=1, ranks_per_node=1)
    flags = [*QUICK, "--parallel.context", "1", "--parallel.expert", "1"]
    native = device_type == "cuda" or has_native_bfloat16()
    config = resolved(load_run_config(flags), native_bfloat16=native, device_type=device_type)
    found = estimate_step(config, world, uniform_documents(config), device_name=device_name, steps=10)
    return dataclasses.replace(found, bytes=dataclasses.replace(found.bytes, **sizes))


@pytest.mark.parametrize(
    ("device", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM 80 GB"),
        ("NVIDIA H200", "NVIDIA H200 SXM 141 GB"),
        ("NVIDIA B200", "NVIDIA B200 180 GB"),
        ("NVIDIA A100-SXM4-80GB", None),
        ("cpu", "one core of a server CPU"),
    ],
)
def test_the_profile_is_the_devices(device, profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = find_hardware(device)
    assert (found and found.name) == profile


def test_a_measured_profile_goes_first_on_its_own_kind_of_device(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (FOLDER / "cpu.toml").read_text()
    Path(MEASURED_FILE).write_text(text.replace('"one core of a server CPU"', '"mine"'))
    on_cpu, on_gpu = find_hardware("cpu"), find_hardware("NVIDIA H100 80GB HBM3")
    assert on_cpu is not None
    assert on_gpu is not None
    assert (on_cpu.name, on_gpu.name) == ("mine", "NVIDIA H100 SXM 80 GB")
    Path(MEASURED_FILE).write_text("[[[")
    with pytest.raises(ConfigError, match="is not TOML"):
        find_hardware("cpu")


def test_a_gpu_without_profile_has_bytes_and_no_seconds():
    found = expected("NVIDIA A100-SXM4-80GB")
    assert found.seconds is None
    assert "no profile has rates for NVIDIA A100-SXM4-80GB" in found.line()
    assert "step_seconds" not in found.record(0)
    assert found.record(0)["peak_bytes"] == found.bytes.peak > 0
    assert found.bytes.process == 0, "a GPU's memory holds no program"


def test_the_program_counts_on_a_cpu():
    found = expected()
    assert found.bytes.process > 50e6
    assert found.bytes.peak > found.bytes.process
    assert "program" in found.line()


def test_the_end_compares_the_median_step_and_the_largest_peak():
    watch = PlanWatch(expected(process=0, weights=0, gradients=0, optimizer=0, kept=1500, passing=0, reduction=0))
    # The first step compiles, one was disturbed.
    for seconds, peak in ((99.0, 900), (2.0, 1000), (2.2, 1000), (50.0, 800)):
        watch.before_log(STEP, {"step_seconds": seconds, "max_memory_bytes": peak})
    record = watch.comparison_record(4)
    assert (record["peak_bytes"], record["step_seconds"], record["step"]) == (1000, 2.2, 4)
    assert record["peak_error"] == pytest.approx(watch.expected.bytes.peak / 1000 - 1)
    assert watch.expected.seconds is not None
    assert record["seconds_error"] == pytest.approx(watch.expected.seconds.total / 2.2 - 1)
    assert "in the median" in comparison_line(record)


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 2), ("NVIDIA H100 80GB HBM3", 8)])
def test_a_plan_that_does_not_fit_is_refused_on_one_screen(device, ranks):
    found, config = expected(device, kept=40 * 2**30), resolved(load_run_config(QUICK), ranks=2)
    needs = found.bytes.peak - found.bytes.process
    if device == "cpu":
        needs *= ranks
    check_planned_memory(config, found, local_ranks=ranks, free_bytes=needs)
    with pytest.raises(ConfigError, match="plan --search") as refused:
        check_planned_memory(config, found, local_ranks=ranks, free_bytes=needs - 1)
    assert len(str(refused.value).splitlines()) < SCREEN
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, memory_check=False))
    check_planned_memory(config, found, local_ranks=ranks, free_bytes=0)
