"""Hugging Face folders that somebody made up: refused on one screen, before anything is allocated."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longctx.conversion import import_hf, load_hf, save_hf
from longctx.conversion.weights.weights_folder import INDEX
from longctx.model.decoder import Decoder
from tests.bounded import HOSTILE_JSON, ODD_FILES, put_odd_file, refusal
from tests.longctx.samples import tiny_config

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A model of several files and an index."""
    config = tiny_config(num_experts=0, shared_ffn_size=0)
    folder = tmp_path_factory.mktemp("whole") / "hf"
    return save_hf(config, Decoder(config).state_dict(), folder, shard_bytes=20_000, model_type="qwen2")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "hf"))


def import_in_every_way(folder: Path, output: Path) -> list[Callable[[], object]]:
    return [lambda: load_hf(folder), lambda: import_hf(folder, output, verify="tensors")]


def edited(path: Path, **values: Any) -> None:
    """A JSON file with other values."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "10^6 layers": ({"num_hidden_layers": 10**6}, "must be between 1 and 4,096"),
    "10^18 layers": ({"num_hidden_layers": 10**18}, "is out of range"),
    "4,000 layers": ({"num_hidden_layers": 4000}, "4,000 layers, but only"),
    "no layers": ({"num_hidden_layers": 0}, "must be between 1 and"),
    "true layers": ({"num_hidden_layers": True}, "must be of type int"),
    "a width without end": ({"hidden_size": 10**18, "head_dim": 8}, "must be at most|is out of range"),
    "a wide model": ({"hidden_size": 2**20, "head_dim": 8}, "parameters, but its tensors only"),
    "an epsilon that is text": ({"rms_norm_eps": "small"}, "must be of type float"),
    "a model of nobody": ({"model_type": "x" * 10_000}, "is not supported"),
    "a model that is a list": ({"model_type": ["qwen2"]}, "is not supported"),
    "an activation that is a table": ({"hidden_act": {}}, "is not supported"),
    "many unknown keys": ({f"key_{n}": "v" * 1000 for n in range(10_000)}, "and 9988 more"),
    "a rope that is text": ({"rope_scaling": "yarn"}, "is not supported"),
    "a base beyond powers": ({"rope_theta": 1e300, "rope_parameters": None}, "must be at most"),
    "a stretch beyond powers": (
        {"rope_parameters": {"rope_type": "linear", "factor": 1e300, "rope_theta": 1e4}},
        "must be at most",
    ),
    "kinds of layers without end": ({"layer_types": ["full_attention"] * 100_000}, "is not supported"),
    "kinds of layers that are tables": ({"layer_types": [{}, {}]}, "is not supported"),
    "an end of 10^30": ({"eos_token_id": 10**30}, "eos_token_id=.* is not an integer"),
    "ends without end": ({"eos_token_id": list(range(5000))}, "has 5000 entries"),
}


@pytest.mark.parametrize("forgery", CONFIGS)
def test_a_config_that_cannot_be_right_is_refused(folder: Path, tmp_path: Path, forgery: str):
    values, said = CONFIGS[forgery]
    edited(folder / "config.json", **values)
    for action in import_in_every_way(folder, tmp_path / "out"):
        assert re.search(said, refusal(action))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("experts", [10**6, 60_000])
def test_experts_without_end(folder: Path, tmp_path: Path, model_type: str, experts: int):
    from tests.longctx.families.hub_configs import HUB

    name = next(name for name, config in HUB.items() if config["model_type"] == model_type)
    keys = {"num_experts", "n_routed_experts", "num_local_experts"} & HUB[name].keys()
    small = {"num_hidden_layers": 2, "hidden_size": 64} | dict.fromkeys(keys, experts)
    (folder / "config.json").write_text(json.dumps(HUB[name] | small))
    for action in import_in_every_way(folder, tmp_path / "out"):
        refusal(action)


@pytest.mark.parametrize("count", [10**6, 10**12])
def test_further_layers_without_end(folder: Path, tmp_path: Path, count: int):
    from tests.longctx.families.hub_configs import HUB

    (folder / "config.json").write_text(json.dumps(HUB["DeepSeek-V3"] | {"num_nextn_predict_layers": count}))
    for action in import_in_every_way(folder, tmp_path / "out"):
        assert "num_nextn_predict_layers" in refusal(action)


@pytest.mark.parametrize("content", HOSTILE_JSON)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_what_is_no_strict_json_is_refused(folder: Path, tmp_path: Path, name: str, content: str):
    (folder / name).write_bytes(HOSTILE_JSON[content][0])
    for action in import_in_every_way(folder, tmp_path / "out"):
        assert name in refusal(action)


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_small_file_is_not_read(folder: Path, tmp_path: Path, name: str, kind: str):
    put_odd_file(folder / name, kind)
    for action in import_in_every_way(folder, tmp_path / "out"):
        refusal(action)


INDICES: dict[str, tuple[Any, str]] = {
    "no map": ({}, "has no weight_map"),
    "a map that is a list": ([], "has no weight_map"),
    "files that are numbers": ({"a": 1}, "has no weight_map"),
    "files elsewhere": ({"a": "../x.safetensors"}, "not a .safetensors file in its folder"),
    "files of a folder in it": ({"a": "a/b.safetensors"}, "not a .safetensors file in its folder"),
    "files by another separator": ({"a": "a\\b.safetensors"}, "not a .safetensors file in its folder"),
    "a pickle": ({"a": "pytorch_model.bin"}, "not a .safetensors file in its folder"),
    "the index itself": ({"a": INDEX}, "not a .safetensors file in its folder"),
    "a NUL": ({"a": "x\0.safetensors"}, "not a .safetensors file in its folder"),
    "a name without end": ({"a": "x" * 5000 + ".safetensors"}, "not a .safetensors file in its folder"),
    "tensors without end": ({"t" * 100 + str(n): "x.safetensors" for n in range(100_000)}, "missing"),
}


@pytest.mark.parametrize("forgery", INDICES)
def test_an_index_that_cannot_be_right_is_refused(folder: Path, tmp_path: Path, forgery: str):
    weight_map, said = INDICES[forgery]
    content = {"weight_map": weight_map}
    if forgery == "no map":
        content = {}
    (folder / INDEX).write_text(json.dumps(content))
    for action in import_in_every_way(folder, tmp_path / "out"):
        assert re.search(said, refusal(action))


def test_a_header_of_a_hundred_megabytes_of_nothing(folder: Path, tmp_path: Path):
    """As large as the library reads: millions of values, refused before they are built."""
    (folder / INDEX).unlink()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    header = b'{"a": [' + b"[]," * 30_000_000 + b"[]]}"
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    for action in import_in_every_way(folder, tmp_path / "out"):
        assert "values; the limit is" in refusal(action)


def test_torch_is_not_asked_for_what_a_config_names(folder: Path):
    """A dtype in config.json says nothing: the files do."""
    edited(folder / "config.json", dtype="hub", torch_dtype="__class__")
    assert {tensor.dtype for tensor in load_hf(folder)[1].values()} == {torch.float32}
