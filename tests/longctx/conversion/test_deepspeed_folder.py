"""Checkpoints of DeepSpeed: weights come out of real ones, and nothing is executed unless that is said."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.checkpoint_format import CheckpointReader
from longctx.conversion import import_deepspeed
from longctx.conversion.hf_conversion import read_master
from longctx.errors import CheckpointError
from parallel.zero.deepspeed_config import quiet_deepspeed
from tests.helpers import run_distributed

CONFIG: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


class Writes:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def folder_of(path: Path, payload: object) -> Path:
    """What looks like a checkpoint of DeepSpeed; its states are this payload."""
    (path / "global_step1").mkdir(parents=True)
    (path / "latest").write_text("global_step1")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG}))
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        (path / "global_step1" / name).write_bytes(pickle.dumps(payload))
    return path


def test_nothing_is_executed_without_the_flag(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "ds", Writes(tmp_path / "executed"))
    with pytest.raises(CheckpointError, match="--execute-pickles"):
        import_deepspeed(source, tmp_path / "out", execute_pickles=False)
    assert not (tmp_path / "executed").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds"]


@pytest.mark.parametrize("missing", ["latest", "config.json", "global_step1"])
def test_what_is_missing_is_named_before_anything_is_executed(missing: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "ds", Writes(tmp_path / "executed"))
    (source / missing).rename(tmp_path / missing)
    with pytest.raises(CheckpointError, match=missing if "." in missing else "latest"):
        import_deepspeed(source, tmp_path / "out", execute_pickles=True)
    assert not (tmp_path / "executed").exists()


def test_an_output_that_exists_is_never_touched(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "ds", Writes(tmp_path / "executed"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(CheckpointError, match="exists"):
        import_deepspeed(source, tmp_path / "out", execute_pickles=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_what_deepspeed_cannot_read_is_told_in_its_words(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "ds", {"no": "states"})
    with pytest.raises(CheckpointError, match="zero_to_fp32 failed with exit code 1"):
        import_deepspeed(source, tmp_path / "out", execute_pickles=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds"]


def train_and_save(folder: Path, stage: int) -> None:
    """A step of a tiny model of transformers by DeepSpeed, saved its way; the weights beside it, on rank 0."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    quiet_deepspeed()
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=False))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    options: dict[str, Any] = {"model": model, "model_parameters": model.parameters(), "config": settings}
    engine, *_ = deepspeed.initialize(**options)
    ids = torch.arange(8)[None] + 3 * torch.distributed.get_rank()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.save_checkpoint(folder)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        if torch.distributed.get_rank() == 0:
            model.config.save_pretrained(folder)
            # a copy of its own: what rank 0 sees as whole weights
            torch.save({k: v.detach().clone() for k, v in model.state_dict().items()}, folder.with_name("weights.pt"))
    torch.distributed.barrier()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_those_that_deepspeed_trained(stage: int, tmp_path: Path) -> None:
    source, output = tmp_path / "ds", tmp_path / "out"
    run_distributed(train_and_save, 2, source, stage, timeout=200)
    done = import_deepspeed(source, output, execute_pickles=True, verify="logits")
    assert done.logits is not None
    wanted = torch.load(tmp_path / "weights.pt", weights_only=True)
    reader = CheckpointReader(output)
    assert sum(torch.Size(read_master(reader, name, torch.float32).shape).numel() for name in reader.names()) == sum(
        tensor.numel() for tensor in wanted.values()
    )
    embedding = next(name for name in reader.names() if "embed" in name)
    assert torch.equal(read_master(reader, embedding, torch.float32), wanted["model.embed_tokens.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds", "out", "weights.pt"]
