"""Runs whose layers take their tokens by chunks, stored on a disk: trained, killed, gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader
from tests.helpers import run_distributed
from tests.launcher.training.test_offloading import check_same
from tests.launcher.workers import rows, run, train_each, train_until_killed_in_a_chunk

LATER_CHUNKS_A_STEP = 2 * 2 * 2
"""Two micro-batches of two layers, whose 128 tokens of a rank are three chunks."""


def by_chunks(disk: Path) -> dict[str, Any]:
    return {"train.keep": "attention", "train.chunk_tokens": 50, "train.store": "disk", "train.store_path": disk}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_killed_between_two_chunks_goes_on_to_the_same_bits(shards, tmp_path):
    whole, unbroken, killed, disk = (tmp_path / name for name in ("whole", "unbroken", "killed", "disk"))
    changed = by_chunks(disk)
    run_distributed(train_each, 2, shards, {whole: {}, unbroken: changed}, timeout=300)
    check_same(unbroken, whole)
    log = (unbroken / "logs/rank_0.log").read_text()
    assert f"to {disk}, for 2 ranks here" in log
    with pytest.raises(AssertionError, match="rank 0 of 2"):
        run(train_until_killed_in_a_chunk, 2, shards, killed, changed, 1, 6 * LATER_CHUNKS_A_STEP - 3)
    assert [row["step"] for row in rows(killed) if row["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert list(disk.iterdir()) == [], "nothing is left"
    run_distributed(train_each, 2, shards, {killed: {**changed, "run.resume": "latest"}}, timeout=300)
    assert rows(killed) == rows(unbroken)
    for folder in sorted((unbroken / CHECKPOINTS).iterdir()):
        files = [CheckpointReader(path).manifest["files"] for path in (folder, killed / CHECKPOINTS / folder.name)]
        assert files[0] == files[1], f"{folder.name} holds other bytes"
