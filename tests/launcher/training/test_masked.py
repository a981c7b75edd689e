"""Training on tokens of which some count: the loss is their sum over their number, whatever packing and ranks are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.shards.reader import ShardSet
from launcher.metrics.record import read_metrics
from longctx.checkpoint_format import list_checkpoints
from longctx.tokenizer import load_tokenizer
from tests.data_pipeline.lengths import write_lengths
from tests.launcher.workers import rows, run, train, train_each

pytestmark = pytest.mark.timeout(200)

ROW = 252
"""Tokens of a row: 1, 2 and 3 ranks can share it."""
LENGTHS = [200, 90, 150, 31, ROW, 64, 120, 5, 77, 130, 240, 18]
"""Documents with runs that count, and every fourth one each without any that does and with nothing else."""
EPOCH = {"data.seq_len": ROW, "train.steps": 3, "train.lr": 1e-3, "validation.rows": 0, "checkpoint.every_steps": 0}
ALONE = EPOCH | {"data.packing": "one_document", "train.tokens_per_step": ROW * len(LENGTHS), "parallel.context": 1}
"""Every step takes all documents, each in a row of its own."""


@pytest.fixture(scope="module")
def masked(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked") / "shards"
    write_lengths(folder, load_tokenizer(shards), LENGTHS, masked=True)
    return folder


def check_equal(got: Path, wanted: Path) -> None:
    pairs = list(zip(rows(got), rows(wanted), strict=True))
    assert len(pairs) == EPOCH["train.steps"]
    for mine, other in pairs:
        # float32: the order of sums, over a few steps.
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        assert mine["tokens"] == other["tokens"]


@pytest.mark.slow
def test_packing_and_ranks_change_no_loss(masked, tmp_path):
    """Packed in one row on 1, 2 and 3 ranks, by chunks, with ZeRO 3; rows of their own on two ranks."""
    step: dict[str, Any] = EPOCH | {"data.seq_len": 6 * ROW, "train.tokens_per_step": 6 * ROW}
    run(train_each, 1, masked, {tmp_path / "alone": ALONE, tmp_path / "packed": step | {"parallel.context": 1}})
    shared = step | {"parallel.context": 2}
    ways = {"shared": shared, "chunks": shared | {"train.chunk_tokens": 20, "zero.stage": 3}}
    # A rank then has rows in which nothing counts, and in some steps no row.
    ways["own"] = ALONE | {"data.balance": False}
    run(train_each, 2, masked, {tmp_path / name: changed for name, changed in ways.items()})
    run(train, 3, masked, tmp_path / "three", step | {"parallel.context": 3})
    for name in ("packed", *ways, "three"):
        check_equal(tmp_path / name, tmp_path / "alone")


def test_conversations_and_texts_in_one_mixture(shards, masked, tmp_path):
    """Of a text every token counts, two ranks have the losses of one, and the model gets the chats' template."""
    mixture, chats = tmp_path / "mixture.toml", tmp_path / "chats"
    shutil.copytree(masked, chats)
    (chats / "chat_template.jinja").write_text("{{ messages }}")
    sources = {"texts": shards, "chats": chats}
    lines = [f'[[sources]]\nname = "{name}"\npath = "{folder}"\nweight = 1\n' for name, folder in sources.items()]
    mixture.write_text("\n".join(lines))
    changed = EPOCH | {"train.tokens_per_step": ROW * 6}
    run(train, 1, mixture, tmp_path / "one", changed | {"parallel.context": 1})
    run(train, 2, mixture, tmp_path / "two", changed | {"parallel.context": 2})
    check_equal(tmp_path / "two", tmp_path / "one")
    (saved,) = list_checkpoints(tmp_path / "one")
    assert (saved / "chat_template.jinja").read_text() == "{{ messages }}"
    assert ShardSet.open(masked).is_masked
    assert not ShardSet.open(shards).is_masked
    for record in rows(tmp_path / "one"):
        assert set(record["source_tokens"]) == {"chats", "texts"}


def test_a_step_in_which_nothing_counts_has_no_loss_and_is_none_to_measure_others_by(masked, tmp_path):
    """Nor has a validation; the checkpoint behind it is proved by no loss of 0."""
    changed = ALONE | {"train.tokens_per_step": ROW, "train.steps": 48, "train.spike_sigmas": 6, "validation.rows": 4}
    changed |= {"data.validation": uncounted(masked, tmp_path / "uncounted"), "validation.every_steps": 24}
    run(train, 1, masked, tmp_path / "run", changed)
    records = read_metrics(tmp_path / "run")
    steps = [record for record in records if record["kind"] == "train"]
    losses = [record["loss"] for record in steps]
    assert losses.count(None) == 12, "every fourth document"
    assert min(loss for loss in losses if loss is not None) > 1
    assert not any("skipped" in record for record in steps)
    validations = [record for record in records if record["kind"] == "validation"]
    assert [record["loss"] for record in validations] == [None, None]
    assert validations[0]["num_targets"] == 0
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "The validation rows have no target tokens" in log
    assert "no target tokens" in log


def uncounted(masked: Path, folder: Path) -> Path:
    """A folder in which no target counts: a document of one token has none, and the second one counts nowhere."""
    assert write_lengths(folder, ShardSet.open(masked).tokenizer(), [1, 50, 1, 1], masked=True).is_masked
    return folder
