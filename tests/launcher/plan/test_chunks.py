"""``train.chunk_tokens = "auto"``: what it chooses from, and that plan, search and longest row take what fits."""

from __future__ import annotations

import dataclasses

import pytest

from launcher.config.config_sections import LEAST_CHUNK, RunConfig
from launcher.config.load_config import load_run_config
from launcher.config.run_config_rules import check_run
from launcher.config.saved_activation_rules import chunk_choices
from launcher.plan.estimate import HEADROOM, estimate_run, peak_bytes, planned
from launcher.plan.hardware import load_hardware
from launcher.plan.plan_search import search_settings
from launcher.plan.planned_world import World
from longctx.errors import ConfigError
from tests.launcher.runs import resolved

WORLD = World(ranks=8, ranks_per_node=8)
LLAMA = {
    "model.preset": "llama-3.1-8b",
    "data.seq_len": 1 << 20,
    "train.tokens_per_step": 1 << 20,
    "parallel.context": 8,
    "zero.stage": 3,
    "train.keep": "attention",
    "train.store": "host",
    "train.chunk_tokens": "auto",
}


def llama(**changed: object) -> RunConfig:
    keys = LLAMA | {name.replace("__", "."): value for name, value in changed.items()}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return load_run_config(["--config", "quickstart", *words])


def ways(config: RunConfig) -> list[tuple[int, int]]:
    return [(one.train.chunk_tokens, one.train.head_groups) for one in chunk_choices(config)]


def test_whole_rows_come_first_then_large_chunks_in_few_groups():
    found = ways(llama())
    assert found[0] == (0, 1)
    assert found[1:5] == [(16384, groups) for groups in (1, 2, 4, 8)]
    assert found[-1] == (LEAST_CHUNK, 16), "half the query heads of each of Llama's eight key heads"
    assert len(found) == 1 + 5 * 5


def test_only_what_goes_with_the_other_settings_is_chosen_from():
    on_disk = {"train__store": "disk", "train__store_path": "/local"}
    assert 0 not in [chunk for chunk, _ in ways(llama(**on_disk))]
    assert [groups for _, groups in ways(llama(train__head_groups=4))] == [4, 8, 16, 32] * 5
    # Chunks recompute experts, which this setting forbids.
    whole = {"model__preset": "qwen3-30b-a3b", "train__keep": "all", "train__recompute_experts": "none"}
    kept = llama(**whole, train__store="device")
    assert ways(kept) == [(0, 1)]
    check_run(kept, 8)
    neither = llama(**whole, **on_disk)
    for refused in (lambda: check_run(neither, 8), lambda: chunk_choices(neither)):
        with pytest.raises(ConfigError, match="recompute_experts"):
            refused()


def test_chunks_as_long_as_a_ranks_tokens_are_left_out():
    assert {chunk for chunk, _ in ways(llama(data__seq_len=8 * 4096, train__tokens_per_step=8 * 4096))} == {
        *(0, 2048, 1024)
    }
    assert {chunk for chunk, _ in ways(llama(data__seq_len=8 * 64, train__tokens_per_step=8 * 64))} == {0, LEAST_CHUNK}


@pytest.mark.parametrize("memory", [100e9, 60e9, 50e9, 45e9, 40e9, 36e9, 20e9])
def test_the_first_choice_that_leaves_room_is_taken_and_the_leanest_where_none_does(memory):
    hardware = dataclasses.replace(load_hardware("h100"), memory_bytes=memory)
    found = planned(llama(), WORLD, hardware)
    choices = chunk_choices(found)
    index = choices.index(found)
    for choice in choices[:index]:
        assert peak_bytes(choice, WORLD, hardware) > (1 - HEADROOM) * memory
    is_in_room = peak_bytes(found, WORLD, hardware) <= (1 - HEADROOM) * memory
    leanest = min(peak_bytes(choice, WORLD, hardware) for choice in choices)
    assert is_in_room or peak_bytes(found, WORLD, hardware) == leanest
    run = estimate_run(llama(), WORLD, hardware)
    assert run.config == found
    assert run.peak_bytes == peak_bytes(found, WORLD, hardware)


def test_a_number_stays():
    found = resolved(llama(train__chunk_tokens=4096), fits=lambda _: False)
    assert (found.train.chunk_tokens, found.train.head_groups) == (4096, 1)


def test_a_search_chooses_by_itself():
    held = {"parallel.context", "parallel.ulysses", "zero.stage", "train.chunk_tokens", "train.keep", "train.store"}
    found = search_settings(llama(), WORLD, load_hardware("h100"), held=held)
    assert found.fastest is not None
    assert {one.config.train.chunk_tokens for one in found.front} <= {0, 16384, 8192, 4096, 2048}


def test_where_nothing_fits_the_leanest_is_taken():
    found = resolved(llama(), fits=lambda _: False)
    assert (found.train.chunk_tokens, found.train.head_groups) == (LEAST_CHUNK, 16)
