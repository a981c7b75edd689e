"""A run whose optimiser works in the machine's memory, from its config to its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from longctx.checkpoint_format import CHECKPOINTS
from tests.helpers import run_distributed
from tests.launcher.workers import rows, train_each

OFFLOADED = {"zero.stage": 3, "zero.offload": "cpu", "zero.offload_parameters": "cpu"}


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_it_trains_like_one_on_the_device_and_goes_on_from_its_checkpoint(shards, tmp_path):
    """The first run of a machine compiles DeepSpeed's AdamW, for minutes."""
    plain, offloaded, resumed = (tmp_path / name for name in ("plain", "offloaded", "resumed"))
    run_distributed(train_each, 2, shards, {plain: {"zero.stage": 2}, offloaded: OFFLOADED}, timeout=350)
    check_same(offloaded, plain)
    log = (offloaded / "logs/rank_0.log").read_text()
    assert "DeepSpeed's AdamW for the machine's memory was ready" in log
    assert "of it offloaded" in log
    changed = {**OFFLOADED, "run.resume": plain / CHECKPOINTS / "step_000004"}
    run_distributed(train_each, 2, shards, {resumed: changed}, timeout=350)
    assert next(row["step"] for row in rows(resumed)) == 5
    check_same(resumed, plain)


def check_same(got: Path, wanted: Path) -> None:
    """Losses and norms of the steps that both took."""
    theirs = {(row["kind"], row["step"]): row for row in rows(wanted)}
    for row in rows(got):
        other = theirs[row["kind"], row["step"]]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        if row["kind"] == "train":
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
