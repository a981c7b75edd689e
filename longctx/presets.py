"""Named shapes for ``model.preset``."""

from __future__ import annotations

from longctx.config import ModelConfig

PRESETS: dict[str, ModelConfig] = {
    "quickstart": ModelConfig(
        num_layers=2, num_experts=8, expert_ffn_size=128, shared_ffn_size=256, balance_loss_weight=0.01
    ),
    "quickstart-dense": ModelConfig(num_layers=2),
}
"""Sizes to start from; every field may be changed beside the name."""
