"""``parallel.tokens_per_rank``: the ranks and rows that it comes to, and what contradicts it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config.config_sections import RunConfig
from launcher.config.load_config import load_run_config
from launcher.config.run_config_rules import check_run
from launcher.config.tokens_per_rank_rules import padded_tokens, with_context
from longctx.errors import ConfigError
from tests.launcher.runs import TINY_MODEL

FIXED_DEGREE = {
    **TINY_MODEL,
    "data.seq_len": 256,
    "train.tokens_per_step": 256 * 12,
    "parallel.context": 1,
    "parallel.layout": "auto",
    "parallel.tokens_per_rank": 512,
}


def config(**changed: Any) -> RunConfig:
    keys = FIXED_DEGREE | {name.replace("__", "."): value for name, value in changed.items()}
    return load_run_config([word for key, value in keys.items() for word in (f"--{key}", str(value))])


@pytest.mark.parametrize(
    ("world_size", "changed", "ranks", "sizes"),
    [
        (4, {}, 4, (6, 6)),
        (3, {}, 3, (6, 6)),
        (5, {}, 5, (6, 6)),  # room for ten: two of six are as few
        (7, {}, 7, (12,)),
        (2, {}, 2, (4, 4, 4)),
        (1, {}, 1, (2,) * 6),
        (4, {"parallel__context": 2}, 2, (3, 3)),
        (4, {"parallel__context": 2, "train__tokens_per_step": 256 * 10}, 2, (3, 2)),
        (3, {"parallel__tokens_per_rank": 86}, 3, (1,) * 12),  # a row of 256 over three ranks
        (3, {"parallel__tokens_per_rank": 250}, 3, (2,) * 6),
        (4, {"parallel__ulysses": 2, "parallel__tokens_per_rank": 200}, 4, (3,) * 4),
        (2, {"parallel__tokens_per_rank": 100_000}, 2, (12,)),
    ],
)
def test_the_ranks_and_rows_that_follow(world_size, changed, ranks, sizes):
    given_config = config(**changed)
    check_run(given_config, world_size)
    settled = with_context(given_config, world_size)
    assert settled.parallel.context == ranks
    assert settled.train.micro_batch_rows == sizes[0]
    assert settled.micro_batches(world_size).sizes == sizes
    assert settled.accumulation(world_size) == len(sizes)
    assert with_context(settled, world_size) == settled, "a run's own config.toml comes to the same"
    check_run(settled, world_size)


@pytest.mark.parametrize(
    ("world_size", "changed", "words"),
    [
        (4, {"parallel__tokens_per_rank": -1}, ["tokens_per_rank=-1 must be at least 1, or 0"]),
        (4, {"parallel__tokens_per_rank": 63}, ["data.seq_len=256 does not fit on"]),
        (4, {"train__micro_batch_rows": 2}, ["micro_batch_rows=2 contradicts", "gives 6", "8 rows of 256"]),
        (4, {"parallel__layout": "zigzag"}, ["layout=zigzag spreads every document", "--parallel.layout auto"]),
        (4, {"parallel__layout": "striped"}, ["layout=striped spreads every document"]),
        (4, {"parallel__context": 3}, ["parallel.context=3 does not divide the 4 ranks"]),
        (4, {"parallel__ulysses": 3}, ["parallel.ulysses=3 does not divide parallel.context=4"]),
        (4, {"parallel__context": 2, "train__tokens_per_step": 256 * 5}, ["tokens_per_step=1280"]),
        (2, {"train__tokens_per_step": 100}, ["tokens_per_step=100", "Try 256."]),
        (2, {"data__seq_len": 0}, ["data.seq_len=0 must be at least 1"]),
    ],
)
def test_what_cannot_be_had(world_size, changed, words):
    with pytest.raises(ConfigError) as raised:
        check_run(config(**changed), world_size)
    said = str(raised.value)
    assert all(word in said for word in words), said
    assert len(said.splitlines()) < 4


def test_without_the_key_nothing_changes():
    fixed = config(parallel__tokens_per_rank=0, parallel__context=2, train__micro_batch_rows=3)
    assert with_context(fixed, 4) is fixed
    assert padded_tokens(fixed, 777) == 777
    with pytest.raises(ConfigError, match="is not a multiple of 1536"):
        check_run(dataclasses.replace(fixed, train=dataclasses.replace(fixed.train, tokens_per_step=2560)), 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 700), st.integers(1, 30))
def test_no_rank_holds_more_than_it_may(world_size, tokens_per_rank, rows):
    asked = dataclasses.replace(
        BASE,
        train=dataclasses.replace(BASE.train, tokens_per_step=256 * rows),
        parallel=dataclasses.replace(BASE.parallel, tokens_per_rank=tokens_per_rank),
    )
    if world_size * tokens_per_rank < 256:
        with pytest.raises(ConfigError, match=r"data\.seq_len=256 does not fit on"):
            with_context(asked, world_size)
        return
    settled = with_context(asked, world_size)
    sizes = settled.micro_batches(world_size).sizes
    assert sum(sizes) == rows
    for size in sizes:
        tokens = padded_tokens(settled, 256 * size)
        assert tokens % world_size == 0
        assert tokens // world_size <= tokens_per_rank


BASE = config()
