"""Output head: logits, or the loss without ever holding all logits.

Axes: B rows, t tokens of this rank, M model width, V vocabulary (the ids with an output).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.cross_entropy import SumsAndGradients, gradient_of_rows, loss_sums, sums_and_gradients, token_nll
from longctx.kernels.loss_options import LossOptions
from longctx.kernels.matmul import linear
from longctx.kernels.processor import MatmulMode
from longctx.kernels.regions import RegionRunner, call_function
from longctx.model.layers.linear import Linear
from longctx.model.layers.mlp import PLAIN
from longctx.model.layers.norms import build_norm


class HeadCalls(NamedTuple):
    """A head's functions, with all token-independent arguments bound."""

    loss: Callable[..., SumsAndGradients]
    """``sums_and_gradients``, called with (hidden_NM, targets_N=, weights_N=, wanted=, dweight_VM=, dbias_V=,
    with_softmax=)."""
    gradient: Callable[..., Tensor]
    """``gradient_of_rows``, called with (hidden_NM, weight_vM, targets_N, softmax_2N, rows, vocab_size, dweight_vM=,
    weights_N=)."""
    nll: Callable[..., Tensor]
    """``token_nll``, called with (hidden_NM, targets_N=)."""


HeadByChunks = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, HeadCalls], Any]
"""``loss_sums`` or ``token_nll`` from a stream's handle, the output matrix, its bias, the targets, their weights and
the head's functions."""


class HeadTransform(nn.Module):
    """Projection to the embeddings' width, the FFN's activation, and a norm (BERT's masked-LM head)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = PLAIN[config.activation]
        self.dense = Linear(config.hidden_size, config.embedding_dim)
        self.norm = build_norm(config, config.embedding_dim)

    def forward(self, hidden_BtM: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden_BtM)))


class LMHead(nn.Module):
    """Output head. Only its forward reads the output matrix, since ZeRO-3 gathers a weight for its reader only.

    A tied head owns no weight. It receives the embedding *module* and reads the table inside its forward, after ZeRO-3
    has gathered the parameters that ``external_parameters`` registered.
    """

    def __init__(self, config: ModelConfig, matmul_mode: MatmulMode, run: RegionRunner = call_function) -> None:
        """Build the head.

        ``matmul_mode`` selects the bfloat16 matmul on a CPU, ``run`` how a training loss is computed (``loss_sums``).
        """
        super().__init__()
        self.matmul_mode: MatmulMode = matmul_mode
        self.run = run
        self.scale, self.softcap = config.logit_scale, config.logit_softcap
        weight, bias = None, None
        if not config.tie_embeddings:
            weight = nn.Parameter(torch.empty(config.head_rows, config.embedding_dim))
        if config.head_bias:
            bias = nn.Parameter(torch.empty(config.head_rows))
        # Registered even if None: forward reads one name, and a state dict has the key only if the head owns it.
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.transform: HeadTransform | None = None
        if config.head_transform:
            self.transform = HeadTransform(config)

    def forward(
        self,
        hidden_BtM: Tensor,
        *,
        table: nn.Embedding,
        targets_Bt: Tensor | None = None,
        per_token: bool = False,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        by_chunks: HeadByChunks | None = None,
        weights_Bt: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute logits [B, t, V]; with targets the pair from ``loss_sums``, or with ``per_token`` each token's NLL
        [B, t].

        With ``by_chunks`` a stream's handle replaces the hidden states.
        """
        weight_VM: Tensor = table.weight
        if self.weight is not None:
            weight_VM = self.weight
        if self.transform is not None and by_chunks is None:
            hidden_BtM = self.transform(hidden_BtM)
        if targets_Bt is None:
            return self._logits(hidden_BtM, weight_VM)
        options = LossOptions(
            logit_scale=self.scale, softcap=self.softcap, z_loss=z_loss, label_smoothing=label_smoothing
        )
        if by_chunks is not None:
            compute = partial(
                sums_and_gradients,
                weight_VM=weight_VM,
                bias_V=self.bias,
                options=options,
                matmul_mode=self.matmul_mode,
                run=self.run,
            )
            rows = partial(gradient_of_rows, options=options, matmul_mode=self.matmul_mode)
            nll = partial(
                token_nll, weight_VM=weight_VM, bias_V=self.bias, options=options, matmul_mode=self.matmul_mode
            )
            return by_chunks(hidden_BtM, weight_VM, self.bias, targets_Bt, weights_Bt, HeadCalls(compute, rows, nll))
        hidden_NM, targets_N, bias_V = hidden_BtM.flatten(0, 1), targets_Bt.flatten(), self.bias
        if per_token:
            nll_N = token_nll(hidden_NM, weight_VM, targets_N, bias_V, options=options, matmul_mode=self.matmul_mode)
            return nll_N.view_as(targets_Bt)
        weights_N = None if weights_Bt is None else weights_Bt.flatten()
        return loss_sums(
            hidden_NM,
            weight_VM,
            targets_N,
            bias_V,
            options=options,
            matmul_mode=self.matmul_mode,
            run=self.run,
            weights_N=weights_N,
        )

    def _logits(self, hidden_BtM: Tensor, weight_VM: Tensor) -> Tensor:
        bias_V = self.bias
        # Scale the narrow side: hidden states have M channels, logits V.
        if self.scale != 1:
            hidden_BtM = hidden_BtM * self.scale
            if bias_V is not None:
                bias_V = bias_V * self.scale
        logits_BtV = linear(hidden_BtM, weight_VM, bias_V, matmul_mode=self.matmul_mode)
        if not self.softcap:
            return logits_BtV
        return self.softcap * torch.tanh(logits_BtV / self.softcap)
