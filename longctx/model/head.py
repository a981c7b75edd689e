"""The output head: logits, or the loss without ever holding them whole.

Axes: B rows, t tokens of this rank, M model width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.cross_entropy import linear_cross_entropy, token_nll


class LMHead(nn.Module):
    """Everything that reads the output matrix happens in this forward: ZeRO-3 gathers a weight for its reader alone.

    A tied head owns no weight. It is handed the embedding *module* and reads the table inside its forward, after
    ZeRO-3 has gathered what ``Decoder.external_parameters`` registered.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale, self.softcap = config.logit_scale, config.logit_softcap
        self.weight: nn.Parameter | None
        weight = None if config.tie_embeddings else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.register_parameter("weight", weight)

    def forward(
        self,
        hidden_BtM: Tensor,
        *,
        table: nn.Embedding,
        targets_Bt: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Logits [B, t, V]; with targets the summed loss, or ``per_token`` each one's [B, t] without gradient."""
        weight_VM: Tensor = table.weight if self.weight is None else self.weight
        if self.scale != 1:
            hidden_BtM = hidden_BtM * self.scale
        if targets_Bt is None:
            logits_BtV = nn.functional.linear(hidden_BtM, weight_VM)
            return self.softcap * torch.tanh(logits_BtV / self.softcap) if self.softcap else logits_BtV
        hidden_NM, targets_N = hidden_BtM.flatten(0, 1), targets_Bt.flatten()
        if per_token:
            return token_nll(hidden_NM, weight_VM, targets_N).view_as(targets_Bt)
        return linear_cross_entropy(hidden_NM, weight_VM, targets_N)
