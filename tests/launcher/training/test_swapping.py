"""A run whose state is in the machine's memory or on a disk, from its config to its checkpoints; folders it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launcher.config.load_config import load_run_config
from launcher.plan.memory_estimate import GIB
from launcher.training.run_preparation import check_swap_folders
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader
from longctx.errors import ConfigError
from tests.helpers import run_distributed
from tests.launcher.runs import SCREEN, resolved
from tests.launcher.workers import rows, train_each, train_each_swapping

SMALL = {"zero.stage": 3, "zero.sub_group_size": 3000, "zero.param_persistence_threshold": 0}
"""Several sub-groups of a tiny run."""
IN_MEMORY = {**SMALL, "zero.offload": "cpu", "zero.offload_parameters": "cpu"}
WEIGHTS = {**SMALL, "zero.offload_parameters": "nvme"}
BOTH = {**WEIGHTS, "zero.offload": "nvme"}


def on(disk: Path, settings: dict) -> dict:
    """The settings with a folder to swap to."""
    return {**settings, "zero.nvme_path": disk}


def check_same_bits(got: Path, wanted: Path, step: int) -> None:
    """Masters and moments of two checkpoints."""
    readers = [CheckpointReader(folder / CHECKPOINTS / f"step_{step:06d}") for folder in (got, wanted)]
    for name, entry in readers[0].manifest["tensors"].items():
        for role in entry["roles"]:
            mine, theirs = (reader.read(name, role) for reader in readers)
            assert torch.equal(mine, theirs), (name, role)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_weights_on_a_disk_go_through_a_whole_run(shards, tmp_path):
    """Validation, checkpoints, and a resume by one rank of what two have written."""
    plain, swapped, resumed = (tmp_path / name for name in ("plain", "swapped", "resumed"))
    disk = tmp_path / "disk"
    short = {"train.stop_after": 4}
    runs = {plain: {**SMALL, **short}, swapped: {**on(disk, WEIGHTS), **short}}
    run_distributed(train_each_swapping, 2, shards, runs, timeout=350)
    check_same(swapped, plain)
    check_same_bits(swapped, plain, 4)
    log = (swapped / "logs/rank_0.log").read_text()
    assert f"to {disk}, for 2 ranks here, with direct I/O" in log or "through the page cache" in log
    assert " on a disk" in log
    assert list(disk.iterdir()) == [], "nothing is left"
    alone = {**on(disk, WEIGHTS), "parallel.context": 1, "run.resume": plain / CHECKPOINTS / "step_000002", **short}
    run_distributed(train_each_swapping, 1, shards, {resumed: alone}, timeout=350)
    assert next(row["step"] for row in rows(resumed)) == 3
    check_same(resumed, plain)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_state_on_a_disk_does_so_too(shards, tmp_path):
    """The first run of a machine compiles DeepSpeed's AdamW, for minutes."""
    cpu, swapped, resumed, back = (tmp_path / name for name in ("cpu", "swapped", "resumed", "back"))
    disk = tmp_path / "disk"
    runs = {cpu: IN_MEMORY, swapped: on(disk, BOTH)}
    run_distributed(train_each_swapping, 2, shards, runs, timeout=400)
    for step in (2, 4, 6, 8):
        check_same_bits(swapped, cpu, step)
    # Another number of ranks, and back to memory.
    alone = {**on(disk, BOTH), "parallel.context": 1, "run.resume": swapped / CHECKPOINTS / "step_000004"}
    run_distributed(train_each_swapping, 1, shards, {resumed: alone}, timeout=400)
    check_same(resumed, cpu)
    plain = {"zero.stage": 2, "run.resume": resumed / CHECKPOINTS / "step_000006"}
    run_distributed(train_each_swapping, 2, shards, {back: plain}, timeout=400)
    check_same(back, cpu)
    assert list(disk.iterdir()) == [], "nothing is left"


def check(path: Path | str, *flags: str, ranks: int = 2) -> None:
    config = load_run_config([*(f"--{k}={v}" for k, v in on(Path(path), BOTH).items()), *flags])
    config = resolved(config)
    check_swap_folders(config, config.model.config(), ranks, ranks)


def test_a_folder_is_made(tmp_path):
    check(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def refusal(path: Path | str, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(path, *flags)
    assert len(str(caught.value).splitlines()) < SCREEN
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refusal(tmp_path / "file" / "folder")
    assert "cannot be written" in refusal("/proc/nowhere")


def test_a_disk_without_room_is_refused_with_the_arithmetic(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    large = ["--model.preset=llama-2-7b", "--data.seq_len=4096", "--train.tokens_per_step=4096"]
    # Masters, moments, gradients and weights in float32: 20 bytes a parameter over the two ranks of this machine.
    said = refusal(tmp_path, *large)
    assert "has 1.0 GiB free, and 2 ranks on this machine will swap 125.5 GiB" in said
    assert "62.8 GiB each" in said
    check(tmp_path, *large, "--run.memory_check", "false")


OFFLOADED = {"zero.stage": 3, "zero.offload": "cpu", "zero.offload_parameters": "cpu"}


@pytest.mark.slow
@pytest.mark.timeout(800)
def test_it_trains_like_one_on_the_device_and_goes_on_from_its_checkpoint(shards, tmp_path):
    """The first run of a machine compiles DeepSpeed's AdamW, for minutes."""
    plain, offloaded, resumed = (tmp_path / name for name in ("plain", "offloaded", "resumed"))
    run_distributed(train_each, 2, shards, {plain: {"zero.stage": 2}, offloaded: OFFLOADED}, timeout=350)
    check_same(offloaded, plain)
    log = (offloaded / "logs/rank_0.log").read_text()
    assert "DeepSpeed's CPU AdamW was ready" in log
    assert " offloaded" in log
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
