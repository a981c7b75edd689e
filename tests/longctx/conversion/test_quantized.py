"""Folders of quantised weights against the formula of each scheme, bit for bit; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longctx.conversion import HfReader, hf_conversion, load_hf
from longctx.errors import CheckpointError, ConfigError
from tests.longctx.families import hf_models
from tests.longctx.families.hf_models import CASES

BLOCK = (16, 24)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def compressed(strategy: str, **weights) -> dict:
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
SCHEMES = {
    "fp8": (FP8, "_scale_inv", BLOCK),
    "fp8 tensor": ({**FP8, "weight_block_size": None}, "_scale_inv", None),
    "tensor": (compressed("tensor"), "_scale", None),
    "channel": (compressed("channel"), "_scale", (1, 10**9)),
    "block": (compressed("block", block_structure=list(BLOCK)), "_scale", BLOCK),
}


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim == 2 and "proj" in name


def quantize(weight: torch.Tensor, block: tuple[int, int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 values and the scales of their blocks."""
    rows, columns = block or weight.shape
    grid = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    stored, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(grid)
    for i in range(grid[0]):
        for j in range(grid[1]):
            part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            scales[i, j] = part.abs().max().clamp(min=1e-6) / 448
            stored[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns] = (part / scales[i, j]).to(stored.dtype)
    return stored, scales if block else scales.reshape(())


def formula(stored: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> torch.Tensor:
    """Value by value."""
    rows, columns = block or stored.shape
    out = torch.empty(stored.shape, dtype=torch.bfloat16)
    grid = scales.reshape(-(-stored.shape[0] // rows), -(-stored.shape[1] // columns))
    for i in range(stored.shape[0]):
        for j in range(stored.shape[1]):
            out[i, j] = (stored[i, j].float() * grid[i // rows, j // columns].float()).bfloat16()
    return out


def write(folder: Path, output: Path, tensors: dict[str, torch.Tensor], scheme: dict) -> Path:
    output.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return output


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    built = {}

    def get(name: str) -> Path:
        if name not in built:
            model = hf_models.build(CASES[name])
            built[name] = hf_models.save(model, tmp_path_factory.mktemp("hf") / "model")
        return built[name]

    return get


@pytest.mark.few(5)
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_float8_is_read_as_its_formula_says(family, name, models, tmp_path):
    scheme, ending, block = SCHEMES[name]
    folder, stored, plain = models(family), {}, {}
    for key, tensor in hf_models.on_disk(folder).items():
        plain[key] = tensor if "correction_bias" in key else tensor.bfloat16()
        stored[key] = plain[key]
        if is_quantized(key, tensor):
            stored[key], stored[key + ending] = quantize(tensor, block)
            plain[key] = formula(stored[key], stored[key + ending], block)
            stored[key.removesuffix("weight") + "input_scale"] = torch.ones(())
    if "compressed" not in scheme["quant_method"]:
        stored = {key: tensor for key, tensor in stored.items() if not key.endswith("input_scale")}
    quantized = HfReader(write(folder, tmp_path / "quantized", stored, scheme))
    wanted = dict(HfReader(write_plain(folder, tmp_path / "plain", plain)))
    assert quantized.quantization is not None
    for key, tensor in quantized:
        assert tensor.dtype == wanted[key].dtype, key
        assert torch.equal(tensor, wanted[key]), key


def test_without_accelerate_logits_are_left_and_said(models, tmp_path, monkeypatch):
    """transformers would end the conversion, whose tensors are right, with an ImportError."""
    monkeypatch.setattr(hf_conversion, "find_spec", lambda name: None)
    scheme, ending, block = SCHEMES["fp8"]
    stored = {}
    for key, tensor in hf_models.on_disk(models("llama")).items():
        stored[key] = tensor.bfloat16()
        if is_quantized(key, tensor):
            stored[key], stored[key + ending] = quantize(tensor, block)
    folder = write(models("llama"), tmp_path / "quantized", stored, scheme)
    done = hf_conversion.import_hf(folder, tmp_path / "ours", verify="auto")
    assert done.tensors is not None
    assert "accelerate" in str(done.logits_skip_reason)
    with pytest.raises(ConfigError, match="accelerate"):
        hf_conversion.import_hf(folder, tmp_path / "again", verify="logits")


def write_plain(folder: Path, output: Path, tensors: dict[str, torch.Tensor]) -> Path:
    output.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output / "model.safetensors")
    (output / "config.json").write_text((folder / "config.json").read_text())
    return output


def test_scales_of_bfloat16_multiply_in_bfloat16(models, tmp_path):
    """As compressed-tensors does: the product is rounded once, of factors that were rounded."""
    folder, stored = models("llama"), {}
    for key, tensor in hf_models.on_disk(folder).items():
        stored[key] = tensor.bfloat16()
        if is_quantized(key, tensor):
            stored[key], scales = quantize(tensor, (1, 10**9))
            stored[key + "_scale"] = scales.bfloat16()
    _, found = load_hf(write(folder, tmp_path / "quantized", stored, compressed("channel")))
    key = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(found[key], stored[key].bfloat16() * stored[key + "_scale"])


def test_mxfp4_is_what_transformers_unpacks(models, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    case = hf_models.Case(
        "GptOss", {**CASES["gpt_oss"].values, "hidden_size": 32, "intermediate_size": 64}, std=CASES["gpt_oss"].std
    )
    folder = hf_models.save(hf_models.build(case), tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    stored, plain = {}, {}
    for key, tensor in hf_models.on_disk(folder).items():
        stored[key] = plain[key] = tensor.bfloat16()
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensor.shape
            blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(110, 130, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
            del stored[key]
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            plain[key] = convert_moe_packed_tensors(blocks, scales)
    found = dict(HfReader(write(folder, tmp_path / "packed", stored, MXFP4)))
    wanted = dict(HfReader(write_plain(folder, tmp_path / "plain", plain)))
    for key, tensor in found.items():
        assert torch.equal(tensor, wanted[key]), key


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq'"),
        ({"bits": 4}, "quant_method=None"),
        (compressed("channel", num_bits=4, type="int"), "8-bit float"),
        (compressed("token"), "8-bit float"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ("fp8", "is not an object"),
    ],
)
def test_other_schemes_are_refused_by_name(scheme, said, models, tmp_path):
    tensors = hf_models.on_disk(models("llama"))
    with pytest.raises(ConfigError, match=said):
        HfReader(write(models("llama"), tmp_path / "other", tensors, scheme))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, key: t.pop(key + "_scale_inv"), "without their scales.*q_proj"),
        (lambda t, key: t.update({key + "_scale_inv": torch.ones(3, 3)}), r"shapes do not match.*\(3, 3\)"),
        (lambda t, key: t.update({"model.norm.weight_scale_inv": torch.ones(1)}), "without a float8 weight.*norm"),
    ],
    ids=["missing", "shape", "alone"],
)
def test_scales_that_do_not_fit_are_named(change, said, models, tmp_path):
    folder, stored = models("llama"), {}
    for name, tensor in hf_models.on_disk(folder).items():
        stored[name] = tensor.bfloat16()
        if is_quantized(name, tensor):
            stored[name], stored[name + "_scale_inv"] = quantize(tensor, BLOCK)
    change(stored, "model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(CheckpointError, match=said):
        HfReader(write(folder, tmp_path / "quantized", stored, FP8))


def test_blocks_without_scales_are_named(models, tmp_path):
    folder = models("gpt_oss")
    stored = hf_models.on_disk(folder)
    stored["model.layers.0.mlp.experts.down_proj_blocks"] = torch.zeros(6, 32, 1, 16, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"down_proj_blocks lacks .*down_proj_scales"):
        HfReader(write(folder, tmp_path / "packed", stored, MXFP4))
