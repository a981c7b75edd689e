"""A shard that is excluded in mid-run: refused until it is meant, then gone on without, and kept on record."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from data_pipeline.prepare.build import build_shards
from data_pipeline.prepare.sources import open_source
from data_pipeline.shards.exclude import exclude, include
from data_pipeline.shards.exclusions import Exclusions
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reader import ShardSet
from launcher.metrics.record import read_metrics
from launcher.report import head
from launcher.report.run import load_run
from launcher.training.data_check import check_data
from longctx.checkpoint_format import CheckpointReader
from longctx.errors import DataError
from longctx.files import list_checkpoints
from longctx.tokenizer import load_tokenizer
from parallel.comm.world import gather_objects
from tests.helpers import run_distributed
from tests.launcher.workers import build, rows, train, train_each

BAD = "00001.arrow"
AGAIN = {"run.resume": "latest"}


@pytest.fixture
def folder(shards: Path, tmp_path: Path) -> Path:
    """Several shards, and held-out documents."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(24):
        text = "".join(f"def f{number}_{line}(x): return x * {line}\n" for line in range(10 + 9 * number))
        (corpus / f"{number:02}.py").write_text(text)
    output = tmp_path / "data"
    build_shards(open_source(corpus), load_tokenizer(shards), output, validation_fraction=0.2, shard_tokens=6_000)
    return output


def refuse(folder: Path, output: Path) -> None:
    with pytest.raises(DataError, match=rf"{BAD} came onto the list .*\n.*data\.changed_exclusions=go_on") as caught:
        build(folder, output, AGAIN)
    # In the same words on every rank.
    assert len(set(gather_objects(str(caught.value)))) == 1


def excluded_of(checkpoint: Path) -> list[int]:
    return CheckpointReader(checkpoint).manifest["training"]["loader"].get("excluded", [])


@pytest.mark.slow
def test_a_run_goes_on_without_it_and_says_so(folder: Path, tmp_path: Path):
    output = tmp_path / "run"
    run_distributed(train_each, 2, folder, {output: {"train.stop_after": 2}}, timeout=100)
    before = rows(output)
    exclude(folder, [BAD], reason="bad blocks on disk 3")
    (folder / BAD).unlink()
    run_distributed(refuse, 2, folder, output)
    assert rows(output) == before, "a start that was refused changes no file"
    go_on = {**AGAIN, "train.stop_after": 4, "data.changed_exclusions": "go_on"}
    run_distributed(train_each, 2, folder, {output: go_on}, timeout=100)
    # The list is the checkpoint's now: nothing has to be allowed any more.
    run_distributed(train_on_one, 1, folder, output, {**AGAIN, "train.stop_after": 6, "parallel.context": 1})
    assert [row["step"] for row in rows(output) if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    listed = {checkpoint.name: excluded_of(checkpoint) for checkpoint in list_checkpoints(output)}
    assert set(map(tuple, listed.values())) <= {(), (1,)}
    assert listed[max(listed)] == [1]
    events = [row for row in read_metrics(output) if row.get("event") == "exclusions"]
    assert [event["step"] for event in events] == [2, 4]
    (named,) = events[0]["folders"]
    assert named["folder"] == str(folder)
    assert [(shard["shard"], shard["reason"]) for shard in named["shards"]] == [(BAD, "bad blocks on disk 3")]
    assert named["hash"] == Exclusions.load(folder, Manifest.load(folder)).hash
    log = (output / "logs/rank_0.log").read_text()
    assert f"{BAD} came onto the list of excluded shards: from epoch 0" in log
    assert log.count(f"Excluded from {folder}: {BAD} (") == 2
    (remark,) = (line for line in head.remarks(load_run(output)) if "without" in line)
    assert remark.startswith("From step 2 on without 1 shard (")
    assert remark.endswith(f"{BAD} of {folder}. Why: bad blocks on disk 3.")


def train_on_one(folder: Path, output: Path, changed: dict) -> None:
    train(folder, output, changed)


@pytest.mark.slow
def test_bringing_it_back_is_on_record_too(folder: Path, tmp_path: Path):
    output = tmp_path / "run"
    exclude(folder, [BAD], reason="a test")
    one = {"parallel.context": 1}
    run_distributed(train_on_one, 1, folder, output, {**one, "train.stop_after": 2})
    include(folder, [BAD])
    changed = {**one, **AGAIN, "train.stop_after": 4, "data.changed_exclusions": "go_on"}
    run_distributed(train_on_one, 1, folder, output, changed)
    events = [(row["step"], len(row["folders"])) for row in read_metrics(output) if row.get("event") == "exclusions"]
    assert events == [(0, 1), (2, 0)]
    assert "From step 2 on no shard is excluded any more." in head.remarks(load_run(output))
    state = CheckpointReader(list_checkpoints(output)[-1]).manifest["training"]["loader"]
    assert not state.get("excluded")
    assert json.dumps(state).count("[1]") == len(state.get("before", []))


def refuse_other_lists(folder: Path) -> None:
    own = folder.with_name(f"copy_{dist.get_rank()}")
    with pytest.raises(DataError, match=r"has other excluded shards on rank 0 than on rank 1"):
        check_data([ShardSet.open(own)], "read")


def test_ranks_with_other_lists_are_refused(folder: Path, tmp_path: Path):
    for number in range(2):
        shutil.copytree(folder, folder.with_name(f"copy_{number}"))
    exclude(folder.with_name("copy_1"), [BAD], reason="a test")
    run_distributed(refuse_other_lists, 2, folder)


def open_without(folder: Path, output: Path) -> None:
    os.environ["LONGCTX_CACHE"] = str(output)
    for verify in ("read", "start", "off"):
        checked = check_data([ShardSet.open(folder)], verify)  # type: ignore[arg-type]
        assert checked.files == len(Manifest.load(folder).shards) - 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_is_not_looked_at_before_a_start(folder: Path, tmp_path: Path, ranks: int):
    exclude(folder, [BAD], reason="a test")
    (folder / BAD).write_bytes(b"rubbish")
    run_distributed(open_without, ranks, folder, tmp_path / "cache")
