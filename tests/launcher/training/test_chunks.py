"""Runs whose layers take their tokens by chunks, stored on a disk: trained, killed, gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import launcher.training.rank_machine as machines
from launcher.config.config_sections import LEAST_CHUNK
from launcher.config.resolve import Data, TargetMachine, resolve
from launcher.training.rank_machine import machine_of_ranks
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader
from parallel.comm.world import gather_objects
from parallel.mesh import Mesh
from tests.helpers import run_distributed
from tests.launcher.runs import tiny_config
from tests.launcher.training.test_swapping import check_same
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


def settle_with_little_on_one_rank(folder: Path) -> None:
    config = tiny_config(
        folder, folder / "run", {"train.chunk_tokens": "auto", "data.seq_len": 65536, "train.tokens_per_step": 1 << 17}
    )
    mesh = Mesh.build(context=1, ulysses=1, expert=1)
    plenty, little, none = 8 << 30, 150 << 20, 1 << 20
    found = []
    for of_rank_0, of_rank_1 in ((plenty, plenty), (plenty, little), (little, plenty), (none, plenty)):
        machines.free_device_bytes = lambda _, free=(of_rank_0, of_rank_1): free[mesh.rank]
        machine = machine_of_ranks(TargetMachine(ranks=2), config, mesh, torch.device("cpu"))
        found.append(resolve(config, machine, Data(is_packed=False)).train.chunk_tokens)
    assert gather_objects(found) == [found, found]
    # Whole rows take 170 MiB, chunks of any size 118: there is one group of heads, and its queries and keys decide.
    assert found == [0, 16384, 16384, LEAST_CHUNK]


def test_the_rank_with_least_memory_decides_for_all(tmp_path):
    run_distributed(settle_with_little_on_one_rank, 2, tmp_path)


def train_with_little_memory(shards: Path, folder: Path) -> None:
    """Whole rows by number, then "auto" where whole rows have no room."""
    train_each(shards, {folder / "whole": {"train.steps": 4}})
    machines.fits = lambda config, *_, **__: config.train.chunk_tokens > 0
    train_each(shards, {folder / "auto": {"train.steps": 4, "train.chunk_tokens": "auto"}})


@pytest.mark.slow
def test_a_run_with_little_memory_takes_chunks_and_says_so(shards, tmp_path):
    run_distributed(train_with_little_memory, 2, shards, tmp_path, timeout=120)
    check_same(tmp_path / "auto", tmp_path / "whole")
    log = (tmp_path / "auto/logs/rank_0.log").read_text()
    assert f"train.chunk_tokens=auto is {LEAST_CHUNK}, train.head_groups 1: a rank's peak is" in log
