"""Checkpoints that are written while training goes on: the same bytes, errors a step later, proofs, order."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import launcher.checkpoint.background_saver
import launcher.checkpoint.checkpoint_files
import launcher.checkpoint.host_copy
from launcher.metrics.record import METRICS_FILE, read_metrics
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, PROOF_FILE, CheckpointReader, list_checkpoints
from longctx.files import hash_file
from longctx.storage.hashed_blocks import describe_file
from longctx.storage.hashed_file import HashedWriter, read_back
from tests.helpers import run_distributed
from tests.launcher.runs import STEPS
from tests.launcher.workers import end_guarded, run, train, train_each, train_each_swapping

pytestmark = pytest.mark.timeout(300)


def files_of(folder: Path) -> dict[str, Any]:
    """What each checkpoint of a run holds, by hash."""
    return {path.name: CheckpointReader(path).manifest["files"] for path in list_checkpoints(folder)}


def proof_of(checkpoint: Path) -> dict[str, Any]:
    proof = json.loads((checkpoint / PROOF_FILE).read_text())
    del proof["hash"]
    assert proof.pop("manifest") == json.loads((checkpoint / MANIFEST).read_text())["hash"]
    return proof


def losses(folder: Path, kind: str) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(folder) if row["kind"] == kind}


def write_late() -> None:
    """Let files be written when further steps have been taken."""
    write = launcher.checkpoint.background_saver.write_rank_file

    def wait(*args: Any) -> Any:
        time.sleep(0.3)
        return write(*args)

    launcher.checkpoint.background_saver.write_rank_file = wait


def train_each_late(shards: Path, runs: dict[Path, dict[str, Any]]) -> None:
    write_late()
    train_each(shards, runs)


def check_alike(shards: Path, folder: Path, changed: dict[str, Any], function: Any = train_each_late) -> None:
    """Copied and written later, or written at once: the same bytes."""
    # Each by itself, with time for a machine that is busy: DeepSpeed's AdamW may be compiled before the first step.
    for name, more in {"copied": {}, "waited": {"checkpoint.wait": True}}.items():
        run_distributed(function, 2, shards, {folder / name: {**changed, **more}}, timeout=280.0)
    copied, waited = files_of(folder / "copied"), files_of(folder / "waited")
    assert list(copied) == [f"step_{step:06d}" for step in range(2, STEPS + 1, 2)]
    assert copied == waited, "the steps that followed changed nothing of what was being written"


@pytest.mark.slow
def test_what_is_written_while_training_goes_on_is_the_step_that_was_saved(shards, tmp_path):
    check_alike(shards, tmp_path, {})
    said = (tmp_path / "copied/logs/rank_0.log").read_text()
    assert said.count(", with training blocked for ") == STEPS // 2 - 1, "that of the last step is waited for"
    assert ", with training blocked for " not in (tmp_path / "waited/logs/rank_0.log").read_text()
    # Of each by the step after it; of the last one, and of those that were validated, by its own validation.
    checkpoints = list_checkpoints(tmp_path / "copied")
    assert proof_of(checkpoints[0]) == {"by": "step", "step": 3, "loss": losses(tmp_path / "copied", "train")[3]}
    validated = losses(tmp_path / "copied", "validation")[STEPS]
    assert proof_of(checkpoints[-1]) == {"by": "validation", "step": STEPS, "loss": validated}
    assert all(CheckpointReader(path).extra_files() == [] for path in checkpoints)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changed",
    [
        {"zero.stage": 0},
        {"zero.stage": 3},
        {"zero.stage": 2, "train.dtype": "bfloat16"},
        {"zero.stage": 2, "zero.offload": "cpu"},
        {"zero.stage": 3, "zero.offload": "cpu"},
    ],
    ids=str,
)
def test_so_it_is_in_every_stage(shards, tmp_path, changed):
    check_alike(shards, tmp_path, changed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_on_a_disk_is_not_copied_into_memory(shards, tmp_path):
    changed = {"zero.stage": 3, "zero.offload": "nvme", "zero.nvme_path": tmp_path / "disk"}
    check_alike(shards, tmp_path, changed, train_each_swapping)
    assert ", with training blocked for " not in (tmp_path / "copied/logs/rank_0.log").read_text()


def fail_on_one_rank(shards: Path, output: Path, changed: dict[str, Any], words: list[str]) -> None:
    """The second file of the last rank does not fit on its disk."""
    write, calls = launcher.checkpoint.background_saver.write_rank_file, []

    def refuse(folder: Path, rank: int, *args: Any) -> Any:
        calls.append(folder)
        if rank == dist.get_world_size() - 1 and len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, rank, *args)

    launcher.checkpoint.background_saver.write_rank_file = refuse
    end_guarded(shards, output, changed, 1, words)


@pytest.mark.slow
def test_an_error_is_met_a_step_later_by_all_ranks(shards, tmp_path):
    words = [
        "CheckpointError",
        "rank 1",
        "No space left on device",
        "lower checkpoint.keep_last",
        "--run.resume latest",
    ]
    run(fail_on_one_rank, 2, shards, tmp_path, {"validation.rows": 0}, words)
    assert [path.name for path in (tmp_path / CHECKPOINTS).iterdir()] == ["step_000002"]
    assert CheckpointReader(tmp_path / CHECKPOINTS / "step_000002").verify() == []
    assert max(losses(tmp_path, "train")) in (5, 6), "not in the step that was saved"


def save_slowly(shards: Path, output: Path, changed: dict[str, Any]) -> None:
    write_late()
    train(shards, output, changed)


def test_a_save_waits_for_the_one_before_and_the_end_for_the_last(shards, tmp_path):
    changed = {"checkpoint.every_steps": 1, "train.steps": 3, "validation.rows": 0, "parallel.context": 1}
    run(save_slowly, 1, shards, tmp_path, changed)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000001", "step_000002", "step_000003"]
    assert "Waiting for checkpoint step_000001 to be written." in (tmp_path / "logs/rank_0.log").read_text()
    assert not list((tmp_path / CHECKPOINTS).glob(".*"))


def train_without_room(shards: Path, output: Path, changed: dict[str, Any]) -> None:
    launcher.checkpoint.host_copy.available_bytes = lambda: 1000
    train(shards, output, changed)


def test_without_memory_for_a_copy_training_waits(shards, tmp_path):
    changed = {"train.steps": 6, "validation.rows": 0, "parallel.context": 1}
    run(train_without_room, 1, shards, tmp_path, changed)
    said = (tmp_path / "logs/rank_0.log").read_text()
    assert said.count("Too little free memory for checkpoint copies") == 1
    assert len(list_checkpoints(tmp_path)) == 3


def save_onto_a_bad_disk(shards: Path, output: Path, changed: dict[str, Any], words: list[str]) -> None:
    """What the disk gives back is not what was written."""
    launcher.checkpoint.checkpoint_files.read_back = lambda path: "0" * 32
    end_guarded(shards, output, changed, 1, words)


def test_what_cannot_be_read_back_is_never_committed(shards, tmp_path):
    changed = {"train.steps": 4, "validation.rows": 0, "parallel.context": 1}
    run(save_onto_a_bad_disk, 1, shards, tmp_path, changed, ["CheckpointError", "has a checksum mismatch"])
    assert list((tmp_path / CHECKPOINTS).iterdir()) == []


# Files past the page cache.


@pytest.mark.parametrize("count", [0, 1, 4096, (8 << 20) - 1, 8 << 20, (40 << 20) + 3])
def test_what_was_written_is_read_back(tmp_path, count):
    content = bytes(range(256)) * (count // 256 + 1)
    path = tmp_path / "file"
    path.write_bytes(b"older and longer" * 10)
    with HashedWriter(path) as file:
        for start in range(0, count, 3 << 20):
            file.write(content[start : min(count, start + (3 << 20))])
        written = file.close()
    assert (written.num_bytes, path.stat().st_size) == (count, count)
    assert written.hash == hash_file(path) == read_back(path)
    described = {"bytes": count, "hash": written.hash, "blocks": written.block_hashes}
    assert describe_file(path) == described
    assert path.read_bytes() == content[:count]
    if count:
        with path.open("r+b") as other:
            other.seek(count - 1)
            other.write(bytes([content[count - 1] ^ 1]))
        assert read_back(path) != written.hash, "a flipped bit is seen on the disk"


def train_watching_syncs(shards: Path, folder: Path) -> None:
    """``train``, and check at each sync of the metrics that they are whole and the checkpoint is not there yet."""
    seen, sync = [], launcher.checkpoint.checkpoint_files.sync_path

    def watched(path: Path) -> None:
        sync(path)
        if path.name == METRICS_FILE:
            steps = {row["step"] for row in read_metrics(folder) if row["kind"] == "train"}
            saved = len(list_checkpoints(folder))
            assert set(range(1, 2 * saved + 3)) <= steps
            seen.append(saved)

    launcher.checkpoint.checkpoint_files.sync_path = watched
    train(shards, folder, {"parallel.context": 1})
    assert seen == list(range(STEPS // 2)), "before each checkpoint"


def test_rows_are_on_the_disk_before_their_checkpoint_is(shards, tmp_path):
    run_distributed(train_watching_syncs, 1, shards, tmp_path / "run")


def test_a_resume_names_rows_that_are_gone(shards, tmp_path):
    folder = tmp_path / "run"
    run_distributed(train_each, 1, shards, {folder: {"parallel.context": 1, "train.steps": 4}})
    (folder / METRICS_FILE).write_text("")
    changed = {"parallel.context": 1, "train.steps": 6, "run.resume": "latest"}
    run_distributed(train_each, 1, shards, {folder: changed})
    log = (folder / "logs" / "rank_0.log").read_text()
    assert log.count("lacks steps 1 to 4,") == 1
    assert "step_000004 includes" in log
