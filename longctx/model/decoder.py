"""The decoder: tokens in, hidden states out, under Hugging Face's parameter names.

Axes: B rows, t tokens of this rank, M model width, V vocabulary, L layers, S documents, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longctx.architecture.rope import Rope
from longctx.config import ModelConfig
from longctx.kernels.attention.bias import alibi_slopes
from longctx.kernels.attention.contract import RelativeBias, Scores
from longctx.model.attention.core import AttentionCore, KVCache
from longctx.model.attention.linear import LocalLinearAttention
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.mask import AttentionMask
from longctx.model.block import Block, Call
from longctx.model.experts.capacity import Capacity
from longctx.model.experts.dispatch import ExpertRun, LocalDispatcher, TokenDispatcher
from longctx.model.experts.experts import is_expert_weight
from longctx.model.experts.layer import ExpertCall
from longctx.model.experts.replay import RoutingReplay
from longctx.model.experts.router import RouterStats
from longctx.model.head import LMHead
from longctx.model.layers.dropout import Dropout, Jitter
from longctx.model.layers.initialize import initial_value
from longctx.model.layers.linear import Embedding, Weight
from longctx.model.layers.norms import build_norm
from longctx.model.positions import check_learned, rotary_table, sinusoid_table, sinusoidal_embedding


class Backbone(nn.Module):
    """Embedding, blocks and the final norm: everything named ``model.*``."""

    def __init__(self, config: ModelConfig, experts: slice = slice(None)) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        if config.position == "learned":
            self.embed_positions = Embedding(config.max_positions, config.hidden_size)
        if config.position == "t5":
            self.relative_bias = Weight(config.relative_buckets, config.num_heads)
        self.layers = nn.ModuleList(Block(config, layer, experts) for layer in range(config.num_layers))
        if config.norm_order != "post":
            self.norm = build_norm(config, config.hidden_size)

    def forward(
        self,
        tokens_Bt: Tensor,
        positions_Bt: Tensor,
        *,
        masks: dict[str, AttentionMask],
        length: int,
        cores: dict[str, AttentionCore],
        cache: KVCache | None,
        dropout: Dropout | None,
        recompute: bool,
        experts: ExpertCall,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Hidden states [B, t, M] and the fields of every expert layer's ``RouterStats``.

        ``masks`` and ``cores`` have one entry for each kind of layer; ``length`` is the longest document's.
        """
        config, x_BtM = self.config, self._embed(tokens_Bt, positions_Bt, dropout)
        scores = self._scores(x_BtM)
        calls = {kind: Call(masks[kind], cores[kind], scores, cache, dropout, recompute, experts) for kind in masks}
        turned_by = [config.rope_of(n) if config.has_rope(n) else None for n in range(config.num_layers)]
        tables = {rope: self._table(rope, positions_Bt, length, x_BtM.dtype) for rope in dict.fromkeys(turned_by)}
        stats = []
        for layer, block in enumerate(self.layers):
            x_BtM, *of_router = block(x_BtM, tables[turned_by[layer]], call=calls[config.layer_kind(layer)])
            if config.has_experts(layer):
                stats.append(tuple(of_router))
        return (x_BtM if config.norm_order == "post" else self.norm(x_BtM)), stats

    def _embed(self, tokens_Bt: Tensor, positions_Bt: Tensor, dropout: Dropout | None) -> Tensor:
        config, x_BtM = self.config, self.embed_tokens(tokens_Bt)
        if config.embedding_scale != 1:
            # rounded to the model's dtype first, as Gemma was trained
            x_BtM = x_BtM * torch.tensor(config.embedding_scale, dtype=x_BtM.dtype, device=x_BtM.device)
        if config.position == "learned":
            x_BtM = x_BtM + self.embed_positions(positions_Bt)
        if config.position == "sinusoidal":
            x_BtM = x_BtM + sinusoidal_embedding(positions_Bt, config.hidden_size, x_BtM.dtype).to(x_BtM.dtype)
        return x_BtM if dropout is None else dropout(x_BtM, -1)

    def _scores(self, x_BtM: Tensor) -> Scores:
        """How queries and keys become scores: the same in all layers."""
        config, slopes, bias = self.config, None, None
        if config.position == "alibi":
            slopes = alibi_slopes(config.num_heads).to(x_BtM.device)
        if config.position == "t5":
            bias = RelativeBias(self.relative_bias(), max_distance=config.relative_max_distance)
        return Scores(
            scale=config.scale,
            softcap=config.attention_softcap or None,
            alibi_slopes_H=slopes,
            relative_bias=bias,
        )

    def _table(
        self, rope: Rope | None, positions_Bt: Tensor, length: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        if rope is not None:
            return rotary_table(positions_Bt, rope, self.config.rotary_size, dtype, length=length)
        if self.config.position == "relative":
            return sinusoid_table(positions_Bt, self.config.hidden_size, dtype)
        return None


class Decoder(nn.Module):
    """A causal language model's network; which keys a query meets, and where they live, is its attention core's affair.

    ``core``, ``linear_core``, ``recompute``, ``training_seed`` and ``replay`` may be set at any time, and so may
    ``expert_tile_tokens`` and ``recompute_experts`` (``ExpertRun``). With ``recompute`` a block keeps its input, the
    core's result and where its tokens went, and computes the rest again in backward. What happens in training alone,
    where the config asks for it (dropout, router jitter, experts' capacity), happens where ``training_seed`` is set,
    which decides all that is random; None, as in evaluation, does none of it. ``training_start`` is the place of the
    next forward pass's first token among all that share the seed. ``replay`` records or gives the experts' ids.
    """

    def __init__(
        self,
        config: ModelConfig,
        core: AttentionCore | None = None,
        *,
        dispatcher: TokenDispatcher | None = None,
        seed: int | None = 0,
    ) -> None:
        """A decoder with the initial weights of ``seed``; None leaves memory unset, for a state dict to fill.

        It holds the experts that are the ``dispatcher``'s share: without one, all.
        """
        super().__init__()
        self.config = config
        self.core: AttentionCore = core if core is not None else LocalAttention()
        self.linear_core: AttentionCore = LocalLinearAttention()
        self.recompute = False
        self.training_seed: int | None = None
        self.training_start = 0
        self.replay: RoutingReplay | None = None
        self.dispatcher: TokenDispatcher = dispatcher if dispatcher is not None else LocalDispatcher()
        self.expert_tile_tokens = 0
        self.recompute_experts = "activation"
        self.model = Backbone(config, self.dispatcher.share)
        self.lm_head = LMHead(config)
        if seed is not None:
            self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every weight to its initial value, which depends on ``seed`` and the tensor's name alone."""
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            shape = self.logical_shape(name, parameter.shape)
            value = initial_value(name, shape, self.config, seed)
            parameter.copy_(value if shape == tuple(parameter.shape) else value[self.dispatcher.share])
        for buffer in self.buffers():
            buffer.zero_()

    def logical_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole model's tensor of which the parameter ``name``, of this shape, is here."""
        return (self.config.num_experts, *shape[1:]) if is_expert_weight(name) else tuple(shape)

    def forward(
        self,
        tokens_Bt: Tensor,
        positions_Bt: Tensor,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        row_tokens: int = 0,
        return_stats: bool = False,
        cache: KVCache | None = None,
    ) -> Any:
        """Hidden states [B, t, M]; with ``return_stats`` also a list of ``RouterStats``, one a layer (none if dense).

        ``cu_seqlens`` are the global document boundaries; None makes every row one document. ``document_ids`` [B, t]
        tells which segment of them each token belongs to, negative for padding; it may be left out when these tokens
        are the whole of ``cu_seqlens``. ``row_tokens`` is the length of the rows that were laid end to end in these (an
        expert's capacity is one of a row); 0 if none were. With a ``cache`` the tokens continue the sequence that
        filled it."""
        masks = _masks(cu_seqlens, tokens_Bt, self.config, self.core)
        mask = next(iter(masks.values()))
        if self.config.position == "learned":
            check_learned(positions_Bt, mask.longest, self.config.max_positions, wait=cache is not None)
        if return_stats and document_ids is None:
            document_ids = _whole_documents(mask, tokens_Bt)
        places_Bt = self._places(mask, tokens_Bt, positions_Bt, document_ids)
        if self.replay is not None:
            self.replay.check(self.config, tokens_Bt.numel())
        hidden_BtM, stats = self.model(
            tokens_Bt,
            positions_Bt,
            masks=masks,
            length=self._length(mask, positions_Bt, cache),
            cores={kind: self.linear_core if kind == "linear" else self.core for kind in masks},
            cache=cache,
            dropout=self._dropout(places_Bt),
            recompute=self.recompute,
            experts=self._expert_call(mask, places_Bt, document_ids if return_stats else None, row_tokens),
        )
        return (hidden_BtM, [RouterStats(*layer) for layer in stats]) if return_stats else hidden_BtM

    def _length(self, mask: AttentionMask, positions_Bt: Tensor, cache: KVCache | None) -> int:
        """Tokens of the longest document, on whatever ranks it lies; 0 where nothing depends on it."""
        if self.config.position != "rope" or not self.config.rope.depends_on_length:
            return 0
        return mask.longest if cache is None else int(positions_Bt.max()) + 1

    def _places(
        self, mask: AttentionMask, tokens_Bt: Tensor, positions_Bt: Tensor, documents_Bt: Tensor | None
    ) -> Tensor | None:
        """Where each token stands in the micro-batch, negative for padding; None where nothing depends on it."""
        config = self.config
        of_experts = config.num_experts > 0 and (config.router_jitter > 0 or config.capacity_factor > 0)
        if self.training_seed is None or not (config.residual_dropout or of_experts):
            return None
        if documents_Bt is None:
            documents_Bt = _whole_documents(mask, tokens_Bt)
        return _places_of(mask, positions_Bt, documents_Bt)

    def _dropout(self, places_Bt: Tensor | None) -> Dropout | None:
        if places_Bt is None or self.training_seed is None or not self.config.residual_dropout:
            return None
        return Dropout(self.config.residual_dropout, self.training_seed, places_Bt + self.training_start)

    def _expert_call(
        self, mask: AttentionMask, places_Bt: Tensor | None, documents_Bt: Tensor | None, row_tokens: int
    ) -> ExpertCall:
        config, jitter, capacity = self.config, None, None
        if config.num_experts and places_Bt is not None and self.training_seed is not None:
            if config.router_jitter:
                jitter = Jitter(config.router_jitter, self.training_seed, places_Bt + self.training_start)
            if config.capacity_factor:
                row_tokens = row_tokens or mask.num_tokens // len(places_Bt)
                capacity = Capacity.build(config, places_Bt.flatten(), row_tokens, mask.num_tokens)
        run = ExpertRun(self.dispatcher, self.expert_tile_tokens, self.recompute_experts)
        return ExpertCall(run, documents_Bt, mask.num_documents, jitter, capacity, self.replay)

    def logits(self, hidden_BtM: Tensor) -> Tensor:
        """Next-token logits [B, t, V] in the model's dtype."""
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens)

    def loss_sums(
        self, hidden_BtM: Tensor, targets_Bt: Tensor, *, z_loss: float = 0.0, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Σ objective, with gradient, and Σ negative log-likelihood, without: float32, and the logits are never whole.

        The objective of a target is its negative log-likelihood with smoothed labels plus the z-loss (``LossOptions``).
        """
        options = {"z_loss": z_loss, "label_smoothing": label_smoothing}
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens, targets_Bt=targets_Bt, **options)

    def token_nll(self, hidden_BtM: Tensor, targets_Bt: Tensor) -> Tensor:
        """Each token's negative log-likelihood [B, t], float32, without gradient; 0 where the target is ignored."""
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens, targets_Bt=targets_Bt, per_token=True)

    def external_parameters(self) -> list[tuple[nn.Module, nn.Parameter]]:
        """(module, parameter) for each parameter that a module other than its owner reads; ZeRO-3 has to be told."""
        table: Any = self.model.embed_tokens.weight
        return [(self.lm_head, table)] if self.config.tie_embeddings else []


@torch.compiler.disable(reason="boundaries are data: a graph that read them would serve one batch")
def _masks(
    cu_seqlens: Sequence[int] | Tensor | None, tokens_Bt: Tensor, config: ModelConfig, core: AttentionCore
) -> dict[str, AttentionMask]:
    """What the layers of each kind see."""
    if cu_seqlens is None:
        B, T = tokens_Bt.shape
        mask = AttentionMask(tuple(T * row for row in range(B + 1)))
    else:
        mask = AttentionMask(tuple(cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens))
    masks = {kind: _mask_of(kind, mask, config) for kind in dict.fromkeys(config.layers)}
    if "sparse" in masks and getattr(core, "is_operator", False):
        _ = masks["sparse"].strided  # formed here, outside of the graph that reads it
    return masks


def _mask_of(kind: str, mask: AttentionMask, config: ModelConfig) -> AttentionMask:
    if kind == "window":
        return replace(mask, window=config.window)
    if kind == "sparse":
        return replace(mask, window=config.window, stride=config.sparse_stride)
    return mask


@torch.compiler.disable(reason="boundaries are data: a graph that read them would serve one batch")
def _whole_documents(mask: AttentionMask, tokens_Bt: Tensor) -> Tensor:
    """The segment of every token when these tokens are all there are."""
    if mask.num_tokens != tokens_Bt.numel():
        raise ValueError(
            f"{tokens_Bt.numel()} tokens are not the {mask.num_tokens} of cu_seqlens; a share of them needs `documents`"
        )
    lengths = torch.tensor(mask.cu_seqlens, device=tokens_Bt.device).diff()
    return torch.arange(len(lengths), device=tokens_Bt.device).repeat_interleave(lengths).view(tokens_Bt.shape)


@torch.compiler.disable(reason="boundaries are data: a graph that read them would serve one batch")
def _places_of(mask: AttentionMask, positions_Bt: Tensor, documents_Bt: Tensor) -> Tensor:
    starts = torch.tensor(mask.cu_seqlens, device=positions_Bt.device)
    return (starts[documents_Bt.clamp(min=0)] + positions_Bt).where(documents_Bt >= 0, -1)
