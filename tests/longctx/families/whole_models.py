"""Tiny models of several parts made by transformers: a text model of ``hf_models.CASES`` beside a vision tower."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.longctx.families.hf_models import CASES, on_disk

_QWEN_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
_QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
_MROPE = {
    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
    "mrope_section": [1, 1, 0],
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "model_type": "siglip_vision_model",
}  # fmt: skip
_PIXTRAL = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "head_dim": 8, "model_type": "pixtral",
}  # fmt: skip
WHOLE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    # Class, text model, changes of its config, keys beside it.
    "gemma3": (
        "Gemma3", "gemma3_text", {},
        {"vision_config": _SIGLIP, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92}
        | {"mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "Gemma4", "gemma4_text", {"pad_token_id": 0},
        {
            "vision_config": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16,
                "model_type": "gemma4_vision",
            },
            # Ids that no text has: transformers reads these tokens as padding.
            "audio_config": None, "image_token_id": 190, "video_token_id": 191, "audio_token_id": 192,
            "boi_token_id": 193, "eoi_token_id": 194, "boa_token_id": 195, "eoa_token_index": 196,
        },
    ),
    "mistral3": (
        "Mistral3", "mistral", {"tie_word_embeddings": False},
        {"vision_config": _PIXTRAL, "image_token_index": 90, "vision_feature_layer": -1, "spatial_merge_size": 2}
        | {"tie_word_embeddings": False},
    ),
    "qwen3_5": (
        "Qwen3_5", "qwen3_5_text", {"rope_parameters": _MROPE},
        {"vision_config": _QWEN_VISION, "tie_word_embeddings": True} | _QWEN_TOKENS,
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe", "qwen3_5_moe_text", {"rope_parameters": _MROPE}, {"vision_config": _QWEN_VISION} | _QWEN_TOKENS
    ),
}  # fmt: skip


def whole_model(name: str, folder: Path, **text_changes: Any) -> Any:
    """A model of all parts in evaluation, and its folder, to which two tensors are added that transformers ignores."""
    import transformers

    class_name, text, changes, beside = WHOLE[name]
    values = CASES[text].sizes | CASES[text].values | changes | text_changes
    config = getattr(transformers, f"{class_name}Config")(text_config=values, **beside)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{class_name}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name_of_one, tensor in model.named_parameters():
            is_factor = "norm" in name_of_one and class_name != "Gemma3"
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1 + is_factor)
    model.save_pretrained(folder, max_shard_size="60KB")
    if class_name.startswith("Qwen"):
        extra = {"mtp.fc.weight": torch.randn(4, 8), "mtp.norm.weight": torch.randn(4).bfloat16()}
        save_file(extra, folder / "model-mtp.safetensors")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(extra, "model-mtp.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        edit(folder, lambda config: config["text_config"].update(mtp_num_hidden_layers=1, attn_output_gate=True))
    return model


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a folder's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def bits(folder: Path) -> dict[str, Any]:
    """Dtype, shape and bytes of every tensor."""
    return {
        name: (x.dtype, tuple(x.shape), x.view(torch.uint8).flatten().tolist()) for name, x in on_disk(folder).items()
    }
