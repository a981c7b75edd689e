"""Adapters of ``peft`` against ours: gradients in float64, and folders in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longctx.architecture.adapter import is_adapter
from longctx.checkpoint_format import CheckpointReader
from longctx.config import ModelConfig
from longctx.conversion import load_hf
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.conversion.peft_folder import CONFIG_FILE, WEIGHTS_FILE, export_peft, read_peft
from longctx.errors import CheckpointError
from longctx.model.decoder import Decoder
from tests.longctx.families import hf_models

PLAIN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (PLAIN, ()),
    "qwen3": (("q_proj", "v_proj"), ()),
    "qwen3_moe": (PLAIN[:4], EXPERTS),
    "qwen2_moe": (PLAIN, EXPERTS),
    "mixtral": (PLAIN[:4], EXPERTS[1:]),
    "gpt_oss": (PLAIN[:4], EXPERTS),
    "deepseek_v3": (("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"), EXPERTS),
}
"""Target modules, and target parameters."""


def adapted(name: str, folder: Path) -> tuple[Any, Any, ModelConfig, dict[str, Tensor]]:
    """A model of transformers, the same with random adapters (its folder too), and our config and weights."""
    theirs = hf_models.build(hf_models.CASES[name])
    theirs.save_pretrained(folder / "hf")
    config, weights = load_hf(folder / "hf")
    if config.num_experts:
        theirs.set_experts_implementation("eager")
    modules, parameters = CASES[name]
    options = {"r": 3, "lora_alpha": 7, "target_modules": list(modules), "target_parameters": list(parameters) or None}
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in wrapped.named_parameters():
            if "lora_" in key:
                p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    wrapped.save_pretrained(str(folder / "peft"))
    return theirs, wrapped, config, weights


def ours_of(config: ModelConfig, weights: dict[str, Tensor], folder: Path) -> Decoder:
    adapter, tensors = read_peft(folder, config)
    decoder = Decoder(replace(config, adapter=adapter), seed=None)
    decoder.load_state_dict(weights | tensors)
    return decoder


def logits_of(decoder: Decoder, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    hidden = decoder(tokens, positions)
    return decoder.logits(hidden)


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_read_and_gives_pefts_logits(name, tmp_path):
    _, wrapped, config, weights = adapted(name, tmp_path)
    decoder = ours_of(config, weights, tmp_path / "peft")
    tokens = hf_models.tokens_of(config)
    with torch.no_grad():
        wanted, got = wrapped(input_ids=tokens).logits, logits_of(decoder, tokens)
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert decoder.config.adapter.rank == 3
    assert decoder.config.adapter.alpha == 7.0
    trained = [key for key, p in decoder.named_parameters() if p.requires_grad]
    assert len(trained) == sum("lora_" in key for key, _ in wrapped.named_parameters())
    assert all(map(is_adapter, trained))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_pefts(name, tmp_path):
    theirs, wrapped, config, weights = adapted(name, tmp_path)
    decoder, tokens, bound = ours_of(config, weights, tmp_path / "peft"), hf_models.tokens_of(config), 1e-5
    # transformers computes a scaled rope in float32.
    if config.rope.kind == "default":
        decoder, bound = decoder.double(), 1e-6
        theirs = wrapped.base_model.model = hf_models.in_float64(theirs)
    with hf_models.computing_in(theirs.dtype, theirs):
        wanted = wrapped(input_ids=tokens).logits
    for logits in (wanted, logits_of(decoder, tokens)):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    # Through a folder, as weights go.
    with torch.no_grad():
        for key, p in wrapped.named_parameters():
            if "lora_" in key:
                p.copy_(p.grad)
    wrapped.float().save_pretrained(str(tmp_path / "gradients"))
    expected = read_peft(tmp_path / "gradients", config)[1]
    largest = max(float(x.abs().max()) for x in expected.values())
    for key, p in decoder.named_parameters():
        if is_adapter(key):
            assert p.grad is not None
            assert p.grad.any(), key
            assert (p.grad - expected[key]).abs().max() <= bound * largest, key


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_ours_is_pefts(name, tmp_path):
    _, wrapped, config, weights = adapted(name, tmp_path)
    adapter, tensors = read_peft(tmp_path / "peft", config)
    base = save_master_weights(config, weights.items(), tmp_path / "base", dtype=torch.float32, training={})
    options = {"dtype": torch.float32, "training": {}, "base": CheckpointReader(base)}
    save_master_weights(replace(config, adapter=adapter), tensors.items(), tmp_path / "adapters", **options)
    export_peft(tmp_path / "adapters", tmp_path / "again")
    written = [load_file(tmp_path / folder / WEIGHTS_FILE) for folder in ("peft", "again")]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(written[1][key], x) for key, x in written[0].items())
    plain = hf_models.build(hf_models.CASES[name])
    if config.num_experts:
        plain.set_experts_implementation("eager")
    again, tokens = peft.PeftModel.from_pretrained(plain, tmp_path / "again"), hf_models.tokens_of(config)
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=tokens).logits, wrapped(input_ids=tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'; only LORA"),
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"rank_pattern": {"q_proj": 5}}, "rank_pattern="),
        ({"r": 0}, "r=0"),
    ],
)
def test_what_is_not_such_an_adapter_is_named(changes, message, tmp_path):
    _, _, config, weights = adapted("llama", tmp_path)
    path = tmp_path / "peft" / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        ours_of(config, weights, tmp_path / "peft")


def test_another_base_is_named(tmp_path):
    config = adapted("llama", tmp_path)[2]
    with pytest.raises(CheckpointError, match="no projections of this model"):
        read_peft(tmp_path / "peft", replace(config, num_layers=2))
    with pytest.raises(CheckpointError, match="instead of"):
        read_peft(tmp_path / "peft", replace(config, ffn_size=40))
