"""``plan`` with ``parallel.tokens_per_rank``: the ranks, rows and seconds of what a run would do."""

from __future__ import annotations

import pytest

from launcher.cli.plan_command import _longer, _longest
from launcher.config.load_config import load_run_config
from launcher.plan.estimate import RunEstimate, estimate_run
from launcher.plan.hardware import load_hardware
from launcher.plan.plan_search import FIXED_DEGREE, search_settings
from launcher.plan.planned_world import World
from launcher.plan.screen import describe_settings, flags

LLAMA = [
    *(
        "--config",
        "quickstart",
        "--model.preset",
        "llama-3.1-8b",
        "--parallel.expert",
        "1",
        "--parallel.layout",
        "auto",
    ),
    *("--parallel.context", "1", "--data.seq_len", "8192", "--train.keep", "attention", "--zero.stage", "3"),
]


def estimate(*flags: str, ranks: int = 0) -> RunEstimate:
    config = load_run_config([*LLAMA, *flags])
    return estimate_run(config, World.of(config, ranks), load_hardware("h100"))


def test_all_ranks_share_a_micro_batch_and_as_few_as_a_row_needs_where_nobody_says():
    run = estimate("--parallel.tokens_per_rank", "3000", "--train.tokens_per_step", "32768")
    assert (run.world.ranks, run.config.parallel.context, run.config.train.micro_batch_rows) == (3, 3, 1)
    more = estimate("--parallel.tokens_per_rank", "3000", "--train.tokens_per_step", "32768", ranks=8)
    assert (more.config.parallel.context, more.config.train.micro_batch_rows) == (8, 2)
    heads = estimate(
        *("--parallel.tokens_per_rank", "3000", "--train.tokens_per_step", "32768", "--parallel.ulysses", "2")
    )
    assert heads.world.ranks == 4


def test_bytes_and_seconds_are_those_of_a_fixed_degree_with_as_many_tokens():
    """One row on four ranks, named in both ways."""
    fixed = estimate("--train.tokens_per_step", "8192", "--parallel.context", "4", "--parallel.layout", "balanced")
    shared = estimate("--train.tokens_per_step", "8192", "--parallel.tokens_per_rank", "2048", ranks=4)
    assert shared.config.parallel.layout == "balanced"
    assert shared.peak_bytes == fixed.peak_bytes
    assert shared.seconds == fixed.seconds
    assert shared.model_flops == fixed.model_flops


def test_smaller_micro_batches_are_counted_as_what_they_are():
    five, six = (
        estimate("--parallel.tokens_per_rank", "4096", "--train.tokens_per_step", str(8192 * rows), ranks=4)
        for rows in (5, 6)
    )
    sizes = [run.config.micro_batches(4).sizes for run in (five, six)]
    assert sizes == [(2, 2, 1), (2, 2, 2)]
    assert five.seconds.products == pytest.approx(six.seconds.products * 5 / 6)
    assert five.model_flops == pytest.approx(six.model_flops * 5 / 6)


def test_the_longest_row_is_what_the_ranks_may_hold():
    run = estimate("--parallel.tokens_per_rank", "4096", "--train.tokens_per_step", "16384", ranks=4)
    assert _longest(run, run.config) == 16384
    longer = _longer(run, 16384)
    assert longer is not None
    assert longer.config.data.seq_len == 32768
    assert "8,192 tokens per rank" in describe_settings(longer.config)


def test_a_search_keeps_the_key():
    config = load_run_config([*LLAMA, "--parallel.tokens_per_rank", "4096", "--train.tokens_per_step", "65536"])
    held = {"zero.stage", "zero.offload", "zero.offload_parameters", "parallel.expert"}
    found = search_settings(config, World.of(config, 4), load_hardware("h100"), held=held)
    assert found.fastest is not None
    assert found.fastest.config.parallel.tokens_per_rank == 4096
    assert not set(FIXED_DEGREE) & set(found.fastest.settings)
    assert "--parallel.tokens_per_rank 4096" in flags(found.fastest.settings)
