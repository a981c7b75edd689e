"""Keys that tools leave in a config.json: passed over if transformers computes the same, else there is a way out."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.config import ModelConfig
from longctx.conversion import import_hf
from longctx.errors import ConfigError
from longctx.families import FAMILIES, ignored_keys
from longctx.families.leftover import _LEFTOVER, IN_ROPE_TABLES, how_to_delete
from tests.longctx.families.hf_models import CASES, ENCODERS, TWO_STACKS, VISION, WITH_CLASS, new_model
from tests.longctx.tokenizer.byte_level import tokenizer_json, write_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
_STRANGE = {"attn_factor": 0.5, "pretraining_tp": 2, "model_max_length": 7, "max_length": 3, "min_length": 1}
"""Values that would show; of any other key a word does."""


def leftovers() -> dict[str, Any]:
    """Every listed key, with a value that would change something if anything read it."""
    return {key: values[-1] if values else _STRANGE.get(key, "x") for key, values in _LEFTOVER.items()}


def logits(folder: Path, auto_class: str) -> torch.Tensor:
    import transformers

    model = getattr(transformers, auto_class).from_pretrained(str(folder), local_files_only=True).eval()
    tokens = torch.arange(40)[None]
    given = {"input_ids": tokens}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens
    if model.main_input_name == "pixel_values":
        height, width = model.config.image_size
        given = {"pixel_values": torch.arange(3.0 * height * width).view(1, 3, height, width) / 999}
    with torch.no_grad():
        return model(**given).logits


@pytest.mark.few(5)
@pytest.mark.parametrize("name", WITH_CLASS)
def test_transformers_computes_the_same_with_each_key_and_without(name, tmp_path):
    case = (CASES | ENCODERS | TWO_STACKS | VISION)[name]
    config = case.config()
    torch.manual_seed(0)
    new_model(case.auto_class, config).save_pretrained(tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    wanted = logits(tmp_path, case.auto_class)
    read = {key for rule in FAMILIES[name].rules for key in rule.keys}
    added = {key: value for key, value in leftovers().items() if key not in before and key not in read}
    # transformers stretches no rope of a Mixtral without a head_dim.
    if before.get("head_dim") and before.get("rope_parameters", {}).get("rope_type") == "default":
        added["rope_parameters"] = YARN
        (tmp_path / "config.json").write_text(json.dumps(before | {"rope_parameters": YARN}))
        wanted = logits(tmp_path, case.auto_class)
        added["rope_parameters"] = YARN | dict.fromkeys(IN_ROPE_TABLES, 0.5)
    (tmp_path / "config.json").write_text(json.dumps(before | added))
    assert torch.equal(logits(tmp_path, case.auto_class), wanted)
    # And we read the same model.
    layers = ("num_hidden_layers", "n_layer", "decoder_layers", "num_decoder_layers")
    found = ModelConfig.from_hf(before | added | {"architectures": None}).num_layers
    wanted_layers = [before[key] for key in layers if key in before] or [sum(before["depths"])]
    assert found == wanted_layers[0]


def test_an_import_names_what_is_passed_over(tmp_path, caplog):
    source = write_model(tmp_path / "hf", tokenizer_json())
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_scaling": YARN | {"attn_factor": 0.88, "rope_theta": 10_000.0}, "unsloth_version": "2025.9.1"}
    config |= {"quantization_config": None, "transformers.js_config": {"dtype": "q4"}}
    (source / "config.json").write_text(json.dumps(config))
    done = import_hf(source, tmp_path / "in", verify="logits")
    assert done.logits is not None
    (said,) = [record.getMessage() for record in caplog.records if "keys ignored" in record.getMessage()]
    for key in ("unsloth_version='2025.9.1'", "quantization_config=None", "rope_scaling.attn_factor=0.88"):
        assert key in said


@pytest.mark.parametrize(
    "change",
    [
        {"pruned_heads": {"0": [1]}}, {"is_causal": False}, {"is_causal": 1},
        {"attention_chunk_size": 8}, {"add_cross_attention": True}, {"nobody_knows": None}, {"Unsloth_version": "x"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "betas": 1}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "low_freq_factor": 2.0}},
    ],
    ids=lambda change: json.dumps(change)[:40],
)  # fmt: skip
def test_a_key_that_may_change_the_model_is_refused_and_the_line_to_type_works(change, tmp_path):
    config = json.loads(json.dumps(CASES["llama"].config_json())) | {"rope_parameters": None} | change
    with pytest.raises(ConfigError, match="Otherwise delete them") as caught:
        ModelConfig.from_hf(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = str(caught.value).splitlines()[-1].strip()
    words = shlex.split(line)
    assert words[0] == "python"
    subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, check=True)
    after = json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig.from_hf(after).num_layers == 3


@pytest.mark.parametrize("key", ["a'; touch hacked; '", '"] + [1]', "a b", "a\n", "x" * 100, "$(id)", "`id`", "ü"])
def test_no_line_to_type_has_what_a_stranger_wrote(key):
    assert key not in how_to_delete(["fine", key])
    assert "python" not in how_to_delete([key])


def test_nothing_is_passed_over_in_what_we_write():
    config = ModelConfig.from_hf(CASES["llama"].config_json())
    assert ignored_keys(config.to_hf()) == {}
