"""The tokenizer travels with the weights: ids that mean another text are refused wherever data and model meet."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from data_pipeline.prepare.build_shards import build_shards
from data_pipeline.prepare.sources import open_source
from data_pipeline.prepare.train_tokenizer import train_tokenizer
from data_pipeline.shards.reader import ShardSet
from launcher.checkpoint.tokenizer_checks import check_checkpoint_tokenizer
from launcher.config.config_sections import RunConfig
from launcher.training.run_data import _tokenizer_files
from launcher.training.run_origin import RunOrigin
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import list_checkpoints
from longctx.conversion import export_checkpoint, save_hf
from longctx.errors import DataError
from longctx.model.decoder import Decoder
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.load_tokenizer import GENERATION_CONFIG
from parallel.mesh import Mesh
from tests.data_pipeline.preference_records import write_preferences
from tests.launcher.cli.calls import call
from tests.launcher.runs import tiny_config, tiny_start
from tests.launcher.workers import run, train
from tests.longctx.chat.templates import MARKED, PLAIN, chat_tokenizer
from tests.longctx.conversion.tiny_tokenizer import corpus
from tests.longctx.samples import dense_config

VOCAB_SIZE = 512
ONE_STEP = {"train.steps": 1, "train.warmup_steps": 0, "checkpoint.every_steps": 1, "validation.rows": 0}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of as many ids as the session's, which mean other texts."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "text").mkdir()
    for number, text in enumerate(corpus() * 4):
        (folder / "text" / f"{number}.txt").write_text(f"{number}\n{text}", newline="")
    source = open_source(folder / "text")
    tokenizer = train_tokenizer(source, folder / "other.model", vocab_size=VOCAB_SIZE)
    build_shards(source, tokenizer, folder / "shards", validation_fraction=0.3)
    return folder / "shards"


def refuse_each(shards: Path, other: Path, folder: Path) -> None:
    """A run on ``shards`` goes on from nothing but these ids: resumed, started from, validated."""
    train(shards, folder / "run", ONE_STEP)
    (checkpoint,) = list_checkpoints(folder / "run")
    between = f"{other} was built with a different tokenizer than {checkpoint}"
    refuse(tiny_config(other, folder / "run", {**ONE_STEP, "train.steps": 2, "run.resume": "latest"}), between)
    start: dict[str, Any] = {**ONE_STEP, "train.lr": 1e-4, "run.start_from": folder / "run"}
    refuse(tiny_start(other, folder / "started", start), between)
    validated = {**ONE_STEP, "validation.rows": 2, "data.validation": other / "validation"}
    refuse(tiny_config(shards, folder / "new", validated), "data.train and data.validation were built with different")


def refuse(config: RunConfig, said: str) -> None:
    """A DataError on every rank that says this, and how to build the data for it."""
    with pytest.raises(DataError) as caught:
        build_run(config, torch.device("cpu"))
    assert said in str(caught.value)
    assert "longctx data build --tokenizer" in str(caught.value)


def test_data_of_another_tokenizer_is_refused_on_every_rank(shards, other, tmp_path):
    assert load_tokenizer(other).vocab_size == load_tokenizer(shards).vocab_size == VOCAB_SIZE
    run(refuse_each, 2, shards, other, tmp_path)


@pytest.mark.parametrize(
    ("content", "travels"),
    [
        (b'{"temperature": 0.6, "eos_token_id": [2, 7]}\r\n', True),
        (b'{"eos_token_id": 3}', False),
        (b'{"eos_token_id": 128001}', False),
        (b"{", False),
        (None, False),
    ],
)
def test_a_checkpoint_without_a_tokenizer_is_said_to_have_none(shards, tmp_path, caplog, content, travels):
    """Nothing was compared, and not a word said; its generation settings were lost."""
    (tmp_path / "vocab.json").write_text("{}")
    if content is not None:
        (tmp_path / GENERATION_CONFIG).write_bytes(content)
    data_shards = ShardSet.open(shards)
    loader = SimpleNamespace(shards=data_shards, folders=[data_shards])
    files = _tokenizer_files(
        RunOrigin(kind="started", folder=tmp_path), cast(Any, loader), None, Mesh(rank=0, world_size=1, context=1)
    )
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "this check is skipped" in said[0]
    assert "vocab.json" in said[1]
    data = load_tokenizer(shards)
    wanted = dict(data.files)
    if travels:
        assert content is not None
        wanted[GENERATION_CONFIG] = content
    assert files == wanted
    assert any(GENERATION_CONFIG in line for line in said) == (content is not None and not travels)
    # The run goes on from its own checkpoints, and stops where the settings say.
    own = tmp_path / "own"
    own.mkdir()
    for name, bytes_of_file in files.items():
        (own / name).write_bytes(bytes_of_file)
    check_checkpoint_tokenizer(own, loader.shards)
    assert (7 in load_tokenizer(own).special.stop_ids) == travels
    # Without a checkpoint there is nothing to say.
    caplog.clear()
    new = RunOrigin(kind="new")
    assert _tokenizer_files(new, cast(Any, loader), None, Mesh(rank=0, world_size=1, context=1)) == data.files
    assert not caplog.records


@pytest.mark.parametrize("built_with", [PLAIN, None])
def test_the_template_of_preferences_travels(tmp_path, built_with: str | None):
    """Records of plain texts need none: then a model keeps its own."""
    data = write_preferences(tmp_path / "data", chat_tokenizer(tmp_path / "built", built_with), [(2, 2, 2)])
    chat_tokenizer(tmp_path / "model", MARKED)
    loader = cast(Any, SimpleNamespace(shards=data, folders=[data]))
    origin = RunOrigin(kind="started", folder=tmp_path / "model")
    files = _tokenizer_files(origin, loader, None, Mesh(rank=0, world_size=1, context=1))
    assert files["chat_template.jinja"].decode() == (built_with or MARKED)


def train_from(shards: Path, source: Path, output: Path) -> None:
    start: dict[str, Any] = {**ONE_STEP, "train.lr": 1e-4, "run.start_from": source}
    Trainer(build_run(tiny_start(shards, output, start), torch.device("cpu"))).train()


@pytest.mark.slow
def test_generation_settings_of_a_model_without_a_tokenizer_go_out_after_training(shards, tmp_path):
    model = dense_config(vocab_size=VOCAB_SIZE, qkv_bias=False, tie_embeddings=False, max_positions=256)
    given = save_hf(model, Decoder(model).state_dict(), tmp_path / "given")
    content = b'{"temperature": 0.6, "eos_token_id": 2}'
    (given / GENERATION_CONFIG).write_bytes(content)
    run(train_from, 2, shards, given, tmp_path / "run")
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert log.count("this check is skipped") == 1
    exported = export_checkpoint(tmp_path / "run", tmp_path / "exported").folder
    assert (exported / GENERATION_CONFIG).read_bytes() == content


def test_an_export_has_the_tokenizer_that_it_is_asked_for(shards, other, tmp_path, capsys):
    """By itself the one of the weights; another one, or none, only where the command says so."""
    run(train, 2, shards, tmp_path / "run", ONE_STEP)
    text = "def main(): pass\n"
    chosen = {"own": [], "another": ["--tokenizer", other], "none": ["--tokenizer", "none"]}
    for name, words in chosen.items():
        words = ["convert", "--to", "hf", tmp_path / "run", tmp_path / name, "--verify", "tensors", *words]
        assert call(capsys, *words)[0] == 0
    ids = {name: load_tokenizer(tmp_path / name).encode(text).tolist() for name in ("own", "another")}
    assert ids["own"] == load_tokenizer(shards).encode(text).tolist()
    assert ids["another"] == load_tokenizer(other).encode(text).tolist() != ids["own"]
    assert not [path.name for path in (tmp_path / "none").iterdir() if "token" in path.name]
