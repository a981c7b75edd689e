"""PairHead: classifies a document's two segments from its first token (BERT's pooler and classifier).

Axes: F first tokens, M model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.model.layers.linear import Linear


class PairHead(nn.Module):
    """Projection, tanh and two logits: the segments belong together as they are, or they do not."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)
        self.out = Linear(config.hidden_size, 2)

    def forward(self, hidden_FM: Tensor) -> Tensor:
        """Compute logits [F, 2] for "together" and "not", ordered like BERT's and ALBERT's labels 0 and 1."""
        return self.out(torch.tanh(self.dense(hidden_FM)))
