"""The copy of a checkpoint by ``plan``, beside what the ranks of real runs own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.checkpoint import host_copy
from launcher.plan.memory_estimate import checkpoint_copy_bytes, copies_checkpoints
from launcher.plan.planned_world import World
from parallel.comm.world import gather_objects
from tests.launcher.runs import STEPS, tiny_config
from tests.launcher.workers import build, run

RANKS = 2
CASES: list[dict[str, Any]] = [
    {"zero.stage": 0},
    {"zero.stage": 0, "parallel.expert": 2},
    {"zero.stage": 1},
    {"zero.stage": 2, "parallel.expert": 2, "train.dtype": "bfloat16"},
    {"zero.stage": 3},
]


def compare(shards: Path, folder: Path) -> None:
    for number, changed in enumerate(CASES):
        found = build(shards, folder / str(number), changed)
        owned = max(gather_objects(host_copy.host_copy_bytes(found.engine.owned_pieces())))
        found.prefetcher.close()
        # Routers' biases, a value for each expert, are a rank's own; parts are rounded up to whole values.
        assert checkpoint_copy_bytes(found.config, World(ranks=RANKS, ranks_per_node=RANKS)) == pytest.approx(
            owned, rel=0.01
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_copy_is_what_the_largest_rank_owns(shards: Path, tmp_path: Path):
    run(compare, RANKS, shards, tmp_path)


@pytest.mark.parametrize(
    "changed", [{"checkpoint.wait": True}, {"checkpoint.every_steps": 0}, {"checkpoint.every_steps": 8}], ids=str
)
def test_there_is_none_where_training_waits(tmp_path: Path, changed: dict[str, Any]):
    config = tiny_config(tmp_path, tmp_path, {"zero.stage": 1})
    assert checkpoint_copy_bytes(config, World(ranks=RANKS, ranks_per_node=RANKS)) > 100_000
    config = tiny_config(tmp_path, tmp_path, {"zero.stage": 1, **changed})
    assert checkpoint_copy_bytes(config, World(ranks=RANKS, ranks_per_node=RANKS)) == 0
    assert not copies_checkpoints(config, 0)
    # The last save is waited for.
    config = tiny_config(tmp_path, tmp_path, {})
    assert [copies_checkpoints(config, STEPS - left) for left in (2, 3)] == [False, True]
