"""``measure``: a profile of one and of two ranks, written and read back; what stands in a file; the command."""

from __future__ import annotations

import itertools
import json
import math
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.measure.attention_benchmark import benchmark_attention, benchmark_matmuls, slices_of
from launcher.measure.elementwise import benchmark_elementwise
from launcher.measure.profile_entry import ProfileEntry, mean_over_ranks, profile_text
from launcher.measure.rank import benchmark_all_ranks
from launcher.measure.rank_timer import RankTimer
from launcher.measure.run_benchmarks import BenchmarkOptions, benchmark_machine
from launcher.measure.sizes import TINY
from launcher.plan.hardware import SIZES, Hardware, hardware_from_values, load_hardware
from longctx.errors import ConfigError
from longctx.kernels.attention.slices import slice_table
from parallel.schedule.bands import area
from tests.helpers import run_distributed
from tests.launcher.cli.calls import refused

ORDERS = {"device": "cpu", "cpu_time": False, "sizes": "smallest", "timeout_seconds": 60.0}
ALWAYS_MEASURED = {name for name in SIZES if name != "network_bandwidth"}


def profile_of(figures: list[ProfileEntry]) -> Hardware:
    """The profile that these figures make."""
    figures = [*figures, ProfileEntry.of("ranks", 2, "ranks")]
    return hardware_from_values(tomllib.loads(profile_text("mine", "cpu", figures, "today", ["a note"])), "measured")


def measure_on_ranks(folder: str) -> None:
    titles: list[str] = []
    figures = benchmark_all_ranks({**ORDERS, "folder": folder}, torch.device("cpu"), titles.append)
    hardware = profile_of(figures)
    assert len(titles) == 7
    assert all(name in hardware.sources for name in ALWAYS_MEASURED - {"exchange_bandwidth"})
    for name in SIZES:
        rate = getattr(hardware, name)
        assert all(value > 0 for values in rate.values.values() for value in values), name
    assert 0 <= hardware.hidden_share <= 1
    # On every rank the same: each one's own figures differ.
    said = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(said, json.dumps(hardware.to_json()))
    assert len(set(said)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_measure_together_and_have_one_profile(ranks, tmp_path):
    run_distributed(measure_on_ranks, ranks, str(tmp_path))


@pytest.mark.slow
def test_a_process_of_its_own_measures_and_its_profile_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    titles: list[str] = []
    options = BenchmarkOptions(device="cpu", sizes="smallest", cpu_time=True)
    text, hardware = benchmark_machine(options, tmp_path, titles.append)
    assert titles[0] == "the process itself"
    assert hardware.ranks == 1
    assert hardware.device_type == "cpu"
    assert "CPU seconds" in hardware.sources["product_flops"]
    Path("hardware.toml").write_text(text)
    assert load_hardware("measured") == hardware


@pytest.mark.slow
def test_what_fails_in_a_process_is_said(tmp_path):
    with pytest.raises(RuntimeError, match="KeyError: 'no such sizes'"):
        benchmark_machine(BenchmarkOptions(device="cpu", sizes="no such sizes"), tmp_path, lambda _: None)


def test_tables_have_a_value_for_each_point():
    clock = RankTimer(torch.device("cpu"), round_seconds=0.0)
    for figure in benchmark_elementwise(clock, TINY):
        points = math.prod(map(len, figure.axes.values()))
        assert set(figure.values) == {"float32", "bfloat16"}
        assert all(len(values) == points for values in figure.values.values())


class HalfASecond(RankTimer):
    """Everything takes half a second, once it was done."""

    def seconds(self, action: Callable[[], Any]) -> float:
        action()
        return 0.5


def test_rates_are_work_over_seconds():
    clock = HalfASecond(torch.device("cpu"), round_seconds=0.0)
    forward, backward = benchmark_matmuls(clock, TINY)
    shapes = list(itertools.product(TINY.tokens, TINY.widths))
    assert forward.values["float32"] == [2 * n * m * m / 0.5 for n, m in shapes]
    assert backward.values["bfloat16"] == [4 * n * m * m / 0.5 for n, m in shapes]
    figures = {figure.name: figure for figure in benchmark_attention(clock, TINY)}
    heads, size = TINY.num_heads, TINY.head_dims[0]
    # Eight documents of 64 tokens, or of 128: as many as a call takes.
    pairs = [8 * n * (n + 1) // 2 for n in TINY.lengths]
    assert figures["attention_flops"].values["float32"] == [4 * heads * size * n / 0.5 for n in pairs]
    assert figures["attention_backward_flops"].values["float32"] == [10 * heads * size * n / 0.5 for n in pairs]
    figures = {figure.name: figure for figure in benchmark_elementwise(clock, TINY)}
    for name, passes in (("memory_bandwidth", 3), ("norm_backward_bandwidth", 4), ("activation_bandwidth", 3)):
        assert figures[name].values["float32"] == [passes * n / 0.5 for n in TINY.tensor_bytes]


@pytest.mark.parametrize(
    ("kind", "size", "pairs"), [("", 4, 2 * 10), ("full_", 4, 2 * 16), ("window_", 2, 15), ("window_", 8, 36)]
)
def test_a_mask_leaves_the_pairs_that_it_says(kind, size, pairs):
    assert area(slice_table(slices_of(kind, size, 8)).numpy()) == pairs


def test_cpu_seconds_count_as_often_as_ranks_share_a_core(monkeypatch):
    monkeypatch.setattr("launcher.measure.rank_timer.num_ranks", lambda: 6)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert RankTimer(torch.device("cpu"), round_seconds=0.0, cpu_time=True).oversubscription == 3.0
    assert RankTimer(torch.device("cpu"), round_seconds=0.0).oversubscription == 1.0


def test_the_mean_over_ranks_is_that_of_their_seconds():
    fast, slow = (ProfileEntry("memory_bandwidth", {}, "sums", {"value": [rate]}) for rate in (3e9, 1e9))
    # A byte takes 1/3 and 1 ns: 2/3 ns in the mean.
    assert mean_over_ranks([fast, slow]).values == {"value": [pytest.approx(1.5e9)]}


def test_a_section_is_read_back_as_it_was():
    figure = ProfileEntry("product_flops", {"tokens": (16, 64), "width": (8,)}, "products")
    for dtype in (torch.float32, torch.bfloat16):
        figure.add(dtype, 1.5e9)
        figure.add(dtype, 250.0)
    section = tomllib.loads(figure.section('of a "test"'))["product_flops"]
    assert section["source"] == 'of a "test"'
    assert section["float32"] == [[1.5e9], [250.0]]


def test_a_clock_counts_one_call_of_many():
    clock, calls = RankTimer(torch.device("cpu"), round_seconds=0.01), []
    seconds = clock.seconds(lambda: calls.append(1))
    assert seconds > 0
    assert len(calls) > 3


def measure_unevenly() -> None:
    """On rank 1 every call takes 4 ms, on rank 0 next to nothing."""
    import torch.distributed as dist

    clock, calls = RankTimer(torch.device("cpu"), round_seconds=0.01), []

    def wait() -> None:
        calls.append(1)
        if dist.get_rank():
            time.sleep(0.004)

    def reduce() -> None:
        dist.all_reduce(torch.zeros(1))
        wait()

    alone: list[Any] = [None, None]
    together: list[Any] = [None, None]
    counts = []
    for _ in range(3):
        calls.clear()
        clock.seconds(wait)
        counts.append(len(calls))
    # Other programs may have the core as the one call is timed that decides on the number.
    dist.all_gather_object(alone, max(counts))
    calls.clear()
    clock.collective_seconds(reduce)
    dist.all_gather_object(together, len(calls))
    assert alone[0] > 10 * alone[1], alone
    # A first call, one that is timed, and three rounds of some 10.
    assert together[0] == together[1] > 5, together


def test_ranks_repeat_as_often_what_they_do_together_however_long_it_takes_them():
    run_distributed(measure_unevenly, 2, timeout=20.0)


def test_a_gpu_is_waited_for_before_and_after(monkeypatch):
    waits: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    RankTimer(torch.device("cuda"), round_seconds=0.0).single_call_seconds(lambda: None)
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "5000"), "must be 1 to"),
        (("--output", "there.toml"), "there.toml exists"),
    ],
)
def test_what_it_cannot_measure_is_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("there.toml").touch()
    said = refused(capsys, 2, "measure", *arguments, "--device", "cpu")
    assert message in said


def test_gpus_that_are_not_there_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="2 ranks need as many GPUs"):
        benchmark_machine(BenchmarkOptions(ranks=2, device="cuda"), tmp_path, lambda _: None)
