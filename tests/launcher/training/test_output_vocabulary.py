"""A model with fewer outputs than ids trains on what it can predict; other data is refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.shards.reader import ShardSet, check_outputs
from data_pipeline.shards.shard_writer import EncodedDocument, ShardWriter
from longctx.errors import ConfigError, DataError
from longctx.tokenizer import Tokenizer, load_tokenizer
from longctx.tokenizer.special import FIM_TOKENS
from tests.launcher.test_tokens_without_rows import rewrite
from tests.launcher.workers import build, rows, run, train
from tests.longctx.tokenizer.byte_level import SIZE, tokenizer_json, write_tokenizer

OUTPUTS = 300
FEWER: dict[str, Any] = {"model.tie_embeddings": False, "model.output_vocab_size": OUTPUTS, "validation.rows": 0}
ONE = FEWER | {"parallel.context": 1}


def write(folder: Path, tokenizer: Tokenizer, most: int) -> Path:
    """Documents whose ids are below ``most``, and reach it."""
    folder.mkdir()
    writer = ShardWriter(folder, vocab_size=tokenizer.vocab_size)
    for number in range(6):
        ids = (np.arange(700) * 11 + number) % most
        writer.add(EncodedDocument(tokens=ids, hash=number, name=f"d{number}", text_bytes=700))
    writer.finish(split="training", tokenizer=tokenizer, sources=[], options={}, skipped={})
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def fitting(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("fitting") / "shards", load_tokenizer(shards), OUTPUTS)


def refuse(fitting: Path, other: Path, output: Path) -> None:
    with pytest.raises(DataError, match=rf"ids up to {OUTPUTS}, and the model predicts ids 0 to {OUTPUTS - 1} only"):
        build(other, output, ONE)
    with pytest.raises(DataError, match=rf"(?s)ids up to {OUTPUTS}, and .*model.output_vocab_size=0"):
        build(fitting, output, ONE | {"data.validation": other, "validation.rows": 2})
    assert not (output / "metrics.jsonl").exists()


def test_an_id_without_an_output_is_refused_in_training_and_validation(shards, fitting, tmp_path):
    other = write(tmp_path / "other", load_tokenizer(shards), OUTPUTS + 1)
    run(refuse, 1, fitting, other, tmp_path / "run")


def fill_in(data: Path, output: Path) -> None:
    filled = ONE | {"data.fim_rate": 0.5, "data.seq_len": 128}
    with pytest.raises(ConfigError, match=rf"fim_rate=0.5 adds special tokens up to id {SIZE + 2}, .*ids 0 to {SIZE}"):
        build(data, output, filled | {"model.output_vocab_size": SIZE + 1})
    build(data, output, filled | {"model.output_vocab_size": SIZE + 3})


def test_marks_that_a_recipe_adds_need_outputs_though_no_shard_holds_them(tmp_path):
    marks = [(token, SIZE + number, True) for number, token in enumerate(FIM_TOKENS)]
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", tokenizer_json(*marks)))
    run(fill_in, 1, write(tmp_path / "shards", tokenizer, SIZE), tmp_path / "run")


def test_shards_of_an_earlier_release_have_the_ids_of_their_tokenizer(shards, fitting, tmp_path):
    opened = ShardSet.open(fitting)
    check_outputs(opened, OUTPUTS)
    with pytest.raises(DataError, match=f"ids up to {OUTPUTS - 1}"):
        check_outputs(opened, OUTPUTS - 1)
    old = write(tmp_path / "old", load_tokenizer(shards), OUTPUTS)
    rewrite(old, lambda entry: entry.pop("num_ids"))
    check_outputs(ShardSet.open(old), 512)
    with pytest.raises(DataError, match="ids up to 511"):
        check_outputs(ShardSet.open(old), OUTPUTS)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_chunks_and_zero_change_no_loss(fitting, tmp_path):
    steps = FEWER | {"train.steps": 3, "checkpoint.every_steps": 0}
    run(train, 1, fitting, tmp_path / "alone", steps | {"parallel.context": 1})
    run(train, 2, fitting, tmp_path / "shared", steps | {"train.chunk_tokens": 20, "zero.stage": 3})
    for mine, other in zip(rows(tmp_path / "shared"), rows(tmp_path / "alone"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
