"""Tiny models with blocks for multi-token prediction, in folders as their makers write them."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.longctx.families import hf_models
from tests.longctx.families.hf_models import CASES

COUNTED = {"deepseek_v3": "num_nextn_predict_layers", "glm4_moe": "num_nextn_predict_layers"}
QWEN = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
OF_QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}


def their_layers(model: Any, count: int) -> torch.nn.ModuleList:
    """transformers' layers for multi-token prediction beside a model, with weights of their own."""
    from transformers.modeling_layers import MtpLayer

    decoder = model.get_decoder()
    config, layer_type = copy.deepcopy(decoder.config), type(decoder.layers[-1])
    if hasattr(config, "decoder_sparse_step"):
        config.decoder_sparse_step, config.mlp_only_layers = 1, []
    config._experts_implementation = "eager"
    # A layer of softmax attention with experts, where the model has any.
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
    number = max(n for n, kind in enumerate(kinds) if kind == "full_attention")
    norm = type(decoder.norm)
    torch.manual_seed(3)
    layers = torch.nn.ModuleList(MtpLayer(config, layer_type, norm, number) for _ in range(count))
    for parameter in layers.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in layers.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    return layers.eval()


def stored(name: str, layers: torch.nn.ModuleList, first: int) -> dict[str, torch.Tensor]:
    """The layers' tensors as makers' files have them."""
    found = {}
    for key, tensor in layers.state_dict().items():
        number, _, rest = key.partition(".")
        part = rest.split(".")[0]
        if name in QWEN:
            ours = (
                f"mtp.layers.{number}.{rest.removeprefix('mtp_block.')}"
                if part == "mtp_block"
                else f"mtp.{OF_QWEN[part]}.weight"
            )
        elif part == "post_norm":
            ours = f"model.layers.{first + int(number)}.shared_head.norm.weight"
        else:
            ours = f"model.layers.{first + int(number)}.{rest.removeprefix('mtp_block.')}"
        found |= by_expert(ours, tensor)
    return found


def by_expert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor as makers' files have it: experts one by one."""
    if name.endswith("experts.gate_up_proj"):
        parts = zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True)
    elif name.endswith("experts.down_proj"):
        parts = [("down_proj", tensor)]
    else:
        return {name: tensor.clone()}
    stem = name.rpartition(".")[0]
    return {f"{stem}.{n}.{part}.weight": x.clone() for part, of_all in parts for n, x in enumerate(of_all)}


def build(name: str, folder: Path, count: int = 1, **values: Any) -> tuple[Any, torch.nn.ModuleList]:
    """A tiny model with such layers in a folder: transformers' model and layers; ``values`` are of its config."""
    case = CASES[name]
    model = hf_models.build(dataclasses.replace(case, values=case.values | values))
    hf_models.save(model, folder)
    layers = their_layers(model, count)
    tensors = hf_models.on_disk(folder)
    first = model.get_decoder().config.num_hidden_layers
    tensors |= stored(name, layers, first)
    if name not in QWEN:
        for number in range(first, first + count):
            tensors[f"model.layers.{number}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"model.layers.{number}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {COUNTED.get(name, "mtp_num_hidden_layers"): count}
    (folder / "config.json").write_text(json.dumps(config))
    return model, layers


class MiMoBlock(torch.nn.Module):
    """A block as MiMo-7B's makers define it, around transformers' Qwen2 layer: hidden state before embedding."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        norm, size = type(decoder.norm), decoder.config.hidden_size
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = norm(size), norm(size), norm(size)
        self.input_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.layer = type(decoder.layers[0])(decoder.config, 0)
        torch.manual_seed(3)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.2)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        joined = torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embedded)), dim=-1)
        return self.final_layernorm(self.layer(self.input_proj(joined), **options))


def build_mimo(folder: Path) -> tuple[Any, MiMoBlock]:
    """A tiny MiMo in a folder: transformers' Qwen2 and the block."""
    model = hf_models.build(CASES["qwen2 full"])
    hf_models.save(model, folder)
    block = MiMoBlock(model.model).eval()
    tensors = hf_models.on_disk(folder)
    for key, tensor in block.state_dict().items():
        tensors[f"model.mtp_layers.0.{key.removeprefix('layer.')}"] = tensor.clone()
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return model, block
