"""Where a run begins: a Hugging Face folder that is converted on the way, once."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launcher.config.model_section import find_start
from launcher.config.run_config_rules import check_run
from launcher.run_folder import IMPORTED
from launcher.training.run_origin import RunOrigin, converted
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader, find_checkpoint, list_checkpoints, model_config
from longctx.conversion import export_checkpoint, load_hf, save_hf
from longctx.errors import CheckpointError, ConfigError
from longctx.model.decoder import Decoder
from tests.launcher.runs import tiny_start
from tests.launcher.workers import leave_out_pictures, rows, run
from tests.longctx.families.mtp_models import build
from tests.longctx.families.whole_models import bits, whole_model
from tests.longctx.samples import dense_config

LLAMA = dense_config(vocab_size=512, qkv_bias=False, tie_embeddings=False, max_positions=256, expert_ffn_size=128)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return save_hf(LLAMA, Decoder(LLAMA).state_dict(), tmp_path / "hf")


def convert(source: Path, run_folder: Path) -> Path:
    folder = converted(RunOrigin(kind="started", folder=source), run_folder).folder
    assert folder == run_folder / IMPORTED
    return folder


def test_a_hugging_face_folder_becomes_a_checkpoint_of_the_run(hf, tmp_path):
    reader = CheckpointReader(convert(hf, tmp_path / "run"))
    assert model_config(reader) == LLAMA
    _, weights = load_hf(hf)
    assert all(torch.equal(reader.read(name), tensor) for name, tensor in weights.items())
    assert [p.name for p in (tmp_path / "run").iterdir()] == [IMPORTED], "nothing half-written beside it"


def test_the_same_files_are_converted_once_and_others_again(hf, tmp_path, caplog):
    folder = convert(hf, tmp_path / "run")
    first = (folder / "manifest.json").stat().st_mtime_ns
    with caplog.at_level(logging.INFO, logger="launcher.training.run_origin"):
        logging.getLogger("launcher").propagate = True
        convert(hf, tmp_path / "run")
    assert "is already converted" in caplog.text
    assert (folder / "manifest.json").stat().st_mtime_ns == first
    file = hf / "model.safetensors"
    changed = {name: tensor + 1 for name, tensor in load_file(file).items()}
    save_file(changed, file, {"format": "pt"})
    os.utime(file, ns=(1, 1))  # of the same size, and within the clock's tick
    convert(hf, tmp_path / "run")
    assert torch.equal(CheckpointReader(folder).read("lm_head.weight"), changed["lm_head.weight"])


def test_what_a_killed_conversion_left_is_not_taken(hf, tmp_path):
    folder = convert(hf, tmp_path / "run")
    (folder / "manifest.json").unlink()
    assert CheckpointReader(convert(hf, tmp_path / "run")).verify() == []
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 7}))
    assert CheckpointReader(convert(hf, tmp_path / "run")).step == 0, "a damaged one neither"


def test_a_disk_that_is_too_small_is_refused_before_a_byte_is_written(hf, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match="float32 masters take"):
        convert(hf, tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())


def test_a_run_folder_stands_for_its_newest_checkpoint(hf, tmp_path):
    first, newest = (convert(hf, tmp_path / name) for name in "ab")
    (tmp_path / "run" / CHECKPOINTS).mkdir(parents=True)
    first, newest = (
        folder.rename(tmp_path / "run" / CHECKPOINTS / f"step_00000{n}") for n, folder in enumerate((first, newest), 1)
    )
    assert find_start(str(tmp_path / "run")) == find_checkpoint(tmp_path / "run") == newest
    assert find_start(str(first)) == first
    assert find_start(str(hf)) == hf


# Across ranks.


def start_from_hf(shards: Path, source: Path, output: Path) -> None:
    leave_out_pictures()
    changed = {
        "run.start_from": source,
        "model.rope.theta": 2e4,
        "train.lr": 1e-4,
        "train.steps": 1,
        "train.warmup_steps": 0,
    }
    for _ in range(2):
        built = build_run(tiny_start(shards, output, changed), torch.device("cpu"))
    Trainer(built).train()


CAME_ALONG = {
    "chat_template.jinja": b"{{ messages }}\r\n",
    "generation_config.json": b'{"temperature": 0.6, "eos_token_id": 2}',
    "special_tokens_map.json": b"{ }",
}
"""Files of a Hugging Face folder that decide no id, as somebody else wrote them."""


@pytest.fixture(scope="module")
def started(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Mistral with its tokenizer's files, and the run that started from it."""
    folder = tmp_path_factory.mktemp("started")
    given = save_hf(
        LLAMA, Decoder(LLAMA).state_dict(), folder / "given", tokenizer=shards / "tokenizer.model", model_type="mistral"
    )
    for name, content in CAME_ALONG.items():
        (given / name).write_bytes(content)
    run(start_from_hf, 2, shards, given, folder / "run")
    return given, folder / "run"


def test_a_run_starts_from_a_hugging_face_folder(started):
    folder = started[1]
    log = (folder / "logs" / "rank_0.log").read_text()
    assert log.count("every tensor was read back") == log.count("is already converted") == 1
    assert "  rope.theta 10000 → 20000" in log
    assert "WARNING" not in log
    assert [r["step"] for r in rows(folder) if r["kind"] == "validation"] == [0, 1]
    saved = model_config(CheckpointReader(list_checkpoints(folder)[-1]))
    assert (saved.rope.theta, saved.tie_embeddings) == (2e4, False)


def test_what_came_with_a_model_goes_out_after_training(started, tmp_path):
    """The run's checkpoints had nothing but the tokenizer.model of the data."""
    given, folder = started
    exported = export_checkpoint(folder, tmp_path / "exported").folder
    names = {path.name for path in given.iterdir()}
    assert {*CAME_ALONG, "tokenizer.json", "tokenizer_config.json", "tokenizer.model"} <= names
    assert {path.name for path in exported.iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (exported / name).read_bytes() == (given / name).read_bytes(), name
    assert json.loads((exported / "config.json").read_text())["model_type"] == "mistral"


# Parts that are not trained.


def start_from_whole(shards: Path, source: Path, output: Path) -> None:
    leave_out_pictures()
    changed = {"run.start_from": source, "train.lr": 1e-3, "checkpoint.keep_last": 1, "data.seq_len": 64}
    changed |= {"train.tokens_per_step": 128, "validation.rows": 1}
    Trainer(build_run(tiny_start(shards, output, changed), torch.device("cpu"))).train()


def test_a_vision_tower_and_layers_for_more_tokens_come_out_of_a_run_as_they_went_in(shards, tmp_path):
    import transformers

    whole_model("qwen3_5", tmp_path / "hf", vocab_size=512)
    (tmp_path / "hf" / "preprocessor_config.json").write_text('{"size": 16}')
    run(start_from_whole, 2, shards, tmp_path / "hf", tmp_path / "run")
    (checkpoint,) = list_checkpoints(tmp_path / "run")
    assert CheckpointReader(checkpoint).verify() == []
    # Once on the disk: of the imported model and of the run's checkpoint.
    assert (checkpoint / "carried.safetensors").stat().st_nlink == 2
    # With Qwen's type transformers takes Qwen's tokenizer class, whatever lies there.
    exported = export_checkpoint(tmp_path / "run", tmp_path / "exported", verify="logits", tokenizer="none")
    assert exported.logits is not None
    before, after = bits(tmp_path / "hf"), bits(exported.folder)
    assert before.keys() == after.keys()
    carried = {name for name in before if name.startswith(("model.visual.", "mtp."))}
    assert all(before[name] == after[name] for name in carried)
    changed = {name for name in before if before[name][2] != after[name][2]}
    assert changed == before.keys() - carried, "every weight of the text model was trained"
    model = transformers.AutoModelForImageTextToText.from_pretrained(str(exported.folder))
    assert model.config.vision_config.depth == 2
    assert (exported.folder / "preprocessor_config.json").read_text() == '{"size": 16}'


def start_from_ahead(shards: Path, source: Path, output: Path, changed: dict) -> None:
    leave_out_pictures()
    changed = {"run.start_from": source, "train.lr": 1e-3, "data.seq_len": 64, "validation.rows": 2} | changed
    changed |= {"train.tokens_per_step": 128, "train.mtp_weight": 0.3}
    Trainer(build_run(tiny_start(shards, output, changed), torch.device("cpu"))).train()


@pytest.mark.slow
def test_blocks_for_multi_token_prediction_are_trained_where_their_loss_has_a_weight(shards, tmp_path):
    """From a folder to a folder: over two ranks as in one process, and further from the checkpoint."""
    build("glm4_moe", tmp_path / "hf", vocab_size=512)
    for ranks in (1, 2):
        changed = {"parallel.context": ranks, "train.steps": 4}
        run(start_from_ahead, ranks, shards, tmp_path / "hf", tmp_path / f"run{ranks}", changed)
    one, two = (rows(tmp_path / f"run{ranks}") for ranks in (1, 2))
    ahead = [[record["mtp_loss"] for record in of if record["kind"] == "train"] for of in (one, two)]
    assert len(ahead[0]) == 4
    assert ahead[0] == pytest.approx(ahead[1], rel=1e-5)
    exported = export_checkpoint(tmp_path / "run2", tmp_path / "exported", tokenizer="none").folder
    before, after = bits(tmp_path / "hf"), bits(exported)
    assert before.keys() == after.keys()
    assert all(before[name][2] != after[name][2] for name in before if "correction_bias" not in name)
    # A copy of the trained table, not of the one that was read.
    assert after["model.layers.3.embed_tokens.weight"][2] == after["model.embed_tokens.weight"][2]
    changed = {"run.start_from": tmp_path / "run2", "parallel.context": 1, "train.steps": 1}
    run(start_from_ahead, 1, shards, tmp_path / "run2", tmp_path / "further", changed)
    first = next(record for record in rows(tmp_path / "further") if record["kind"] == "train")
    assert first["mtp_loss"] < ahead[0][0]


def test_blocks_that_nothing_trains_are_refused(shards, tmp_path):
    for changed, message in (
        ({"model.mtp_layers": 1}, "model.mtp_layers=1: only the loss of train.mtp_weight"),
        ({"train.mtp_weight": 0.1}, "the model has none"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_run(tiny_start(shards, tmp_path / "run", changed), 2)
