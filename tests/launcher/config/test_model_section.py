"""``[model]``: over a checkpoint, over a preset, or a plain decoder that names its sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from launcher.cluster import exit as exit_module
from launcher.cluster.exit import USAGE_ERROR, run_to_exit_code
from launcher.config.load_config import config_from_values, load_run_config
from launcher.config.model_section import describe_change, model_changes
from launcher.pretrain import main
from longctx.architecture.rope import Rope
from longctx.checkpoint_format import CHECKPOINTS
from longctx.config import PRESETS, ModelConfig
from longctx.conversion import save_hf
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.errors import CheckpointError, ConfigError
from longctx.model.decoder import Decoder
from tests.launcher.runs import SCREEN
from tests.longctx.samples import dense_config

LLAMA = dense_config(
    qkv_bias=False, tie_embeddings=False, norm_eps=3e-6, max_positions=64, init_std=0.02, expert_ffn_size=128,
    rope=Rope(theta=500_000.0, kind="llama3", factor=8.0, original_max_positions=32, high_freq_factor=3.0),
)  # fmt: skip
"""A model whose every part differs from the defaults."""
RATE = ["--train.lr", "1e-4"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of it, in a run folder."""
    run = tmp_path_factory.mktemp("base")
    folder = run / CHECKPOINTS / "step_000003"
    folder.parent.mkdir()
    save_master_weights(LLAMA, Decoder(LLAMA).state_dict().items(), folder, dtype=torch.float32, training={})
    return folder


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same as a Hugging Face folder."""
    return save_hf(LLAMA, Decoder(LLAMA).state_dict(), tmp_path_factory.mktemp("hf") / "model")


def toml(folder: Path, text: str) -> list[str]:
    path = folder / "run.toml"
    path.write_text(text)
    return ["--config", str(path)]


# Over a checkpoint.


def test_the_model_is_the_checkpoints(checkpoint, hf, tmp_path):
    for start in (checkpoint, checkpoint.parent.parent, hf):
        assert load_run_config(["--run.start_from", str(start), *RATE]).model.config() == LLAMA
        assert load_run_config([f"--run.start-from={start}", *RATE]).model.config() == LLAMA
        named = toml(tmp_path, f"[run]\nstart_from = '{start}'\n[train]\nlr = 1e-4\n")
        assert load_run_config(named).model.config() == LLAMA


def test_rope_that_is_left_out_is_the_checkpoints_not_the_default(checkpoint, tmp_path):
    """It was replaced by the default rope, without a word."""
    text = f"[run]\nstart_from = '{checkpoint}'\n[train]\nlr = 1e-4\n[model]\nmax_positions = 128\n"
    config = load_run_config(toml(tmp_path, text))
    assert config.model.rope == LLAMA.rope
    assert model_changes(LLAMA, config.model.config()) == {"max_positions": (64, 128)}


def test_only_what_changes_is_named(checkpoint, tmp_path):
    text = f"[run]\nstart_from = '{checkpoint}'\n[train]\nlr = 1e-4\n[model]\nmax_positions = 128\n[model.rope]\n"
    config = load_run_config([*toml(tmp_path, f"{text}theta = 1e6\n"), "--model.residual_dropout", "0.1"])
    changes = model_changes(LLAMA, config.model.config())
    assert [describe_change(name, *values) for name, values in changes.items()] == [
        "max_positions 64 → 128",
        "residual_dropout 0 → 0.1",
        "rope.theta 500000 → 1000000",
    ]


def test_another_kind_of_rope_begins_with_its_own_defaults(checkpoint, tmp_path):
    text = f"[run]\nstart_from = '{checkpoint}'\n[train]\nlr = 1e-4\n[model.rope]\nkind = 'yarn'\nfactor = 4.0\n"
    rope = load_run_config(toml(tmp_path, text)).model.rope
    assert rope == Rope(theta=500_000.0, kind="yarn", factor=4.0, original_max_positions=32)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model.num_layers", "3"], ["model.num_layers: checkpoint 2, run 3"]),
        (["--model.norm_eps", "1e-6", "--model.activation", "geglu"], ["model.norm_eps: checkpoint 3e-06, run 1e-06"]),
        (["--model.rope.partial", "0.5"], ["model.rope.partial: checkpoint 1.0, run 0.5"]),
        (["--model.rope.interleaved", "true"], ["model.rope.interleaved: checkpoint False, run True"]),
        (["--model.preset", "llama-2-7b"], ["model.preset='llama-2-7b'", "both set the model", "preset none"]),
    ],
)
def test_what_the_weights_fix_is_refused_before_a_rank_waits(checkpoint, flags, said, capfd, monkeypatch):
    monkeypatch.setattr(exit_module, "HEAD_START_SECONDS", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        assert run_to_exit_code(lambda: main(["--run.start_from", str(checkpoint), *RATE, *flags])) == USAGE_ERROR
        out, err = capfd.readouterr()
        assert (out, err if rank == "1" else "") == ("", "")
    assert all(words in err for words in said), err
    assert len(err.splitlines()) < SCREEN


def test_a_table_of_positions_is_as_long_as_the_checkpoints(tmp_path):
    config = dense_config(position="learned", max_positions=64)
    save_master_weights(config, Decoder(config).state_dict().items(), tmp_path / "c", dtype=torch.float32, training={})
    with pytest.raises(ConfigError, match=r"model\.max_positions: checkpoint 64, run 128"):
        load_run_config(["--run.start_from", str(tmp_path / "c"), *RATE, "--model.max_positions", "128"])


def test_a_rate_for_new_weights_is_not_taken_for_trained_ones(checkpoint):
    """Without a file it was the quickstart's 5e-3."""
    with pytest.raises(ConfigError, match=r"train\.lr is not set(.|\n)*2e-5"):
        load_run_config(["--run.start_from", str(checkpoint)])


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"run\.start_from='.*gone'.*gone does not exist(.|\n)*Hugging Face"):
        load_run_config(["--run.start_from", str(tmp_path / "gone"), *RATE])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(ConfigError, match=r"run\.start_from=(.|\n)*mamba"):
        load_run_config(["--run.start_from", str(tmp_path), *RATE])


def test_a_run_that_resumes_has_the_model_of_its_own_checkpoint(checkpoint, tmp_path):
    run = checkpoint.parent.parent
    flags = ["--run.output_dir", str(run), "--run.resume"]
    text = toml(tmp_path, "[run]\nstart_from = 'gone'\n[model]\nmax_positions = 128\n")
    for resume in ("latest", "newest-good", str(checkpoint)):
        config = load_run_config([*text, *flags, resume])
        assert config.model.config() == dataclasses.replace(LLAMA, max_positions=128)
    assert load_run_config([*flags, "latest"]).model.preset == "quickstart", "a preset stands, and is compared later"


# Without a checkpoint and without a preset.


def test_a_plain_decoder_is_llamas(tmp_path):
    """It was the quickstart's, with eight experts and tied embeddings."""
    sizes = "[model]\nvocab_size = 512\nhidden_size = 64\nnum_layers = 3\nnum_heads = 4\nffn_size = 96\n"
    config = load_run_config(toml(tmp_path, sizes))
    assert config.model.config() == ModelConfig(
        vocab_size=512, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=96,
        qkv_bias=False, tie_embeddings=False, norm_eps=1e-5,
    )  # fmt: skip
    assert config.model.to_hf()["model_type"] == "llama"
    assert config.train.lr == 3e-4
    grouped = load_run_config([*toml(tmp_path, sizes), "--model.num-kv-heads=2", "--model.head_dim", "8"]).model
    assert (grouped.num_kv_heads, grouped.head_dim) == (2, 8)


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("", ["vocab_size", "hidden_size", "num_layers", "num_heads", "ffn_size"]),
        ("[model]\nnum_experts = 4\n", ["vocab_size", "hidden_size", "num_layers", "num_heads", "expert_ffn_size"]),
        ("[model]\nvocab_size=9\nhidden_size=50\nnum_layers=3\nnum_heads=4\nffn_size=8\n", ["head_dim"]),
    ],
)
def test_sizes_that_are_missing_are_asked_for(tmp_path, text, missing):
    with pytest.raises(ConfigError, match="The config defines no model") as caught:
        load_run_config(toml(tmp_path, f"[train]\nsteps = 3\n{text}"))
    assert ", ".join(f"model.{name}" for name in missing) + "." in str(caught.value)
    assert "llama-3.1-8b" in str(caught.value)


@pytest.mark.parametrize("advice", ["normalize_gates = false", "experts_per_token = 2"])
def test_routers_that_would_learn_nothing_are_refused(tmp_path, advice):
    text = "[model]\nvocab_size=9\nhidden_size=8\nnum_layers=1\nnum_heads=2\nexpert_ffn_size=8\nnum_experts=4\n"
    with pytest.raises(ConfigError, match="every gate 1") as caught:
        load_run_config(toml(tmp_path, f"{text}experts_per_token=1\n"))
    assert f"--model.{advice.replace(' =', '')}" in str(caught.value)
    load_run_config(toml(tmp_path, text + f"{'experts_per_token=1' * ('gates' in advice)}\n{advice}\n"))
    load_run_config(toml(tmp_path, f"{text.replace('num_experts=4', 'num_experts=1')}experts_per_token=1\n"))


def test_a_preset_stands_as_it_did():
    for name, config in PRESETS.items():
        assert config_from_values({"model": {"preset": name}}).model.config() == config
