"""The decoder: tokens in, hidden states out, under Hugging Face's parameter names.

Axes: B rows, t tokens of this rank, M model width, V vocabulary, L layers, S documents, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.model.block import Block
from longctx.model.cores import AttentionCore, AttentionMask, KVCache, LocalAttention
from longctx.model.head import LMHead
from longctx.model.initialize import initial_value
from longctx.model.layers import Embedding
from longctx.model.norms import RMSNorm
from longctx.model.positions import rotary_table
from longctx.model.router import RouterStats


class Backbone(nn.Module):
    """Embedding, blocks and the final norm: everything named ``model.*``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, tokens_Bt: Tensor, *, positions_Bt: Tensor, **shared: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [B, t, M] and the routers' counts and probability sums, [L, S, E] each.

        ``shared`` goes to every block as it is.
        """
        x_BtM = self.embed_tokens(tokens_Bt)
        rotary = rotary_table(positions_Bt, self.config.head_dim, self.config.rope_theta, x_BtM.dtype)
        counts, prob_sums = [], []
        for block in self.layers:
            x_BtM, counts_SE, prob_sums_SE = block(x_BtM, rotary=rotary, **shared)
            counts.append(counts_SE)
            prob_sums.append(prob_sums_SE)
        return self.norm(x_BtM), torch.stack(counts), torch.stack(prob_sums)


class Decoder(nn.Module):
    """A causal language model's network; which keys a query meets, and where they live, is its attention core's affair.

    ``core`` and ``recompute`` may be set at any time. With ``recompute`` a block keeps its input and the core's
    result, and computes the rest again in backward.
    """

    def __init__(self, config: ModelConfig, core: AttentionCore | None = None, *, seed: int | None = 0) -> None:
        """A decoder with the initial weights of ``seed``; None leaves memory unset, for a state dict to fill."""
        super().__init__()
        self.config = config
        self.core: AttentionCore = core if core is not None else LocalAttention()
        self.recompute = False
        self.model = Backbone(config)
        self.lm_head = LMHead(config)
        if seed is not None:
            self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every weight to its initial value, which depends on ``seed`` and the tensor's name alone."""
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(initial_value(name, tuple(parameter.shape), self.config, seed))

    def forward(
        self,
        tokens_Bt: Tensor,
        positions_Bt: Tensor,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        *,
        documents: Tensor | None = None,
        return_stats: bool = False,
        cache: KVCache | None = None,
    ) -> Any:
        """Hidden states [B, t, M]; with ``return_stats`` also a list of ``RouterStats``, one a layer (none if dense).

        ``cu_seqlens`` are the global document boundaries; None makes every row one document. ``documents`` [B, t] tells
        which segment of them each token belongs to, negative for padding; it may be left out when these tokens are the
        whole of ``cu_seqlens``. With a ``cache`` the tokens continue the sequence that filled it.
        """
        mask = _document_mask(cu_seqlens, tokens_Bt)
        if return_stats and documents is None:
            documents = _whole_documents(mask, tokens_Bt)
        hidden_BtM, counts_LSE, prob_sums_LSE = self.model(
            tokens_Bt,
            positions_Bt=positions_Bt,
            mask=mask,
            core=self.core,
            cache=cache,
            documents_Bt=documents if return_stats else None,
            recompute=self.recompute,
        )
        if not return_stats:
            return hidden_BtM
        if not self.config.num_experts:
            return hidden_BtM, []
        return hidden_BtM, [RouterStats(*layer) for layer in zip(counts_LSE, prob_sums_LSE, strict=True)]

    def logits(self, hidden_BtM: Tensor) -> Tensor:
        """Next-token logits [B, t, V] in the model's dtype."""
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens)

    def nll_sum(self, hidden_BtM: Tensor, targets_Bt: Tensor) -> Tensor:
        """Negative log-likelihood of the targets, summed, float32; the logits are never whole."""
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens, targets_Bt=targets_Bt)

    def token_nll(self, hidden_BtM: Tensor, targets_Bt: Tensor) -> Tensor:
        """Each token's negative log-likelihood [B, t], float32, without gradient; 0 where the target is ignored."""
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens, targets_Bt=targets_Bt, per_token=True)

    def external_parameters(self) -> list[tuple[nn.Module, nn.Parameter]]:
        """(module, parameter) for each parameter that a module other than its owner reads; ZeRO-3 has to be told."""
        table: Any = self.model.embed_tokens.weight
        return [(self.lm_head, table)] if self.config.tie_embeddings else []


@torch.compiler.disable(reason="boundaries are data: a graph that read them would serve one batch")
def _document_mask(cu_seqlens: Sequence[int] | Tensor | None, tokens_Bt: Tensor) -> AttentionMask:
    if cu_seqlens is None:
        B, T = tokens_Bt.shape
        return AttentionMask(tuple(T * row for row in range(B + 1)))
    return AttentionMask(tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens))


@torch.compiler.disable(reason="boundaries are data: a graph that read them would serve one batch")
def _whole_documents(mask: AttentionMask, tokens_Bt: Tensor) -> Tensor:
    """The segment of every token when these tokens are all there are."""
    if mask.num_tokens != tokens_Bt.numel():
        raise ValueError(
            f"{tokens_Bt.numel()} tokens are not the {mask.num_tokens} of cu_seqlens; a share of them needs `documents`"
        )
    lengths = torch.tensor(mask.cu_seqlens, device=tokens_Bt.device).diff()
    return torch.arange(len(lengths), device=tokens_Bt.device).repeat_interleave(lengths).view(tokens_Bt.shape)
