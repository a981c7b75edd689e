"""The output head: logits, or the loss without ever holding them whole.

Axes: B rows, t tokens of this rank, M model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.cross_entropy import LossOptions, SumsAndGradients, loss_sums, sums_and_gradients, token_nll
from longctx.kernels.matmul import linear
from longctx.kernels.processor import Products
from longctx.kernels.regions import Run, call_function

LossByChunks = Callable[[Tensor, Tensor, Tensor, Callable[..., SumsAndGradients]], tuple[Tensor, Tensor]]
"""``loss_sums`` from a handle, the output matrix, the targets and ``sums_and_gradients`` of this matrix."""


class LMHead(nn.Module):
    """Everything that reads the output matrix happens in this forward: ZeRO-3 gathers a weight for its reader alone.

    A tied head owns no weight. It is handed the embedding *module* and reads the table inside its forward, after
    ZeRO-3 has gathered what ``external_parameters`` registered.
    """

    def __init__(self, config: ModelConfig, products: Products, run: Run = call_function) -> None:
        """``products`` says how a CPU multiplies bfloat16, ``run`` how a training loss is computed (``loss_sums``)."""
        super().__init__()
        self.products: Products = products
        self.run = run
        self.scale, self.softcap = config.logit_scale, config.logit_softcap
        self.weight: nn.Parameter | None
        weight = None
        if not config.tie_embeddings:
            weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        # Registered also as None, so that forward reads one name and a state dict has the key only where it is owned.
        self.register_parameter("weight", weight)

    def forward(
        self,
        hidden_BtM: Tensor,
        *,
        table: nn.Embedding,
        targets_Bt: Tensor | None = None,
        per_token: bool = False,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        by_chunks: LossByChunks | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [B, t, V]; with targets the pair of ``loss_sums``, or ``per_token`` the NLL of each [B, t].

        With ``by_chunks`` what stands for the hidden states is the handle that it knows.
        """
        weight_VM: Tensor = table.weight
        if self.weight is not None:
            weight_VM = self.weight
        if targets_Bt is None:
            return self._logits(hidden_BtM, weight_VM)
        options = LossOptions(
            logit_scale=self.scale, softcap=self.softcap, z_loss=z_loss, label_smoothing=label_smoothing
        )
        if by_chunks is not None:
            compute = partial(
                sums_and_gradients, weight_VM=weight_VM, options=options, products=self.products, run=self.run
            )
            return by_chunks(hidden_BtM, weight_VM, targets_Bt, compute)
        hidden_NM, targets_N = hidden_BtM.flatten(0, 1), targets_Bt.flatten()
        if per_token:
            nll_N = token_nll(hidden_NM, weight_VM, targets_N, options=options, products=self.products)
            return nll_N.view_as(targets_Bt)
        return loss_sums(hidden_NM, weight_VM, targets_N, options=options, products=self.products, run=self.run)

    def _logits(self, hidden_BtM: Tensor, weight_VM: Tensor) -> Tensor:
        # The narrow side is scaled: hidden states have M channels, logits V.
        if self.scale != 1:
            hidden_BtM = hidden_BtM * self.scale
        logits_BtV = linear(hidden_BtM, weight_VM, products=self.products)
        if not self.softcap:
            return logits_BtV
        return self.softcap * torch.tanh(logits_BtV / self.softcap)
