"""Stack: tokens in, hidden states out, under Hugging Face's parameter names.

Axes: B rows, t tokens of this rank, M model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longctx.architecture.layer_specs import layer_specs
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.rope import Rope
from longctx.batch import PackedDocuments, ReadTokens
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.attention.bias import alibi_slopes
from longctx.kernels.attention.kernel_interface import RelativeBias, ScoreRules
from longctx.model.adapters import with_gradient
from longctx.model.block import Block, LayerCall
from longctx.model.chunks.chunked_layer import chunked_layer
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.chunks.token_table import TokenTable, is_summed_by_rows
from longctx.model.cross_block import CrossBlock
from longctx.model.layers.dropout import Dropout
from longctx.model.layers.linear import Embedding, Linear, Weight
from longctx.model.layers.norms import build_norm
from longctx.model.mtp import HeadInput, MtpBlock
from longctx.model.patches import PatchEmbedding
from longctx.model.plans import ReadCall
from longctx.model.rotary import RotaryTable, sinusoid_table, sinusoidal_embedding


@dataclass(frozen=True, kw_only=True, eq=False)
class StackInput:
    """Tokens for one forward pass through a stack; all but ``cu_seqlens`` as in ``Stream``."""

    tokens_Bt: Tensor
    positions_Bt: Tensor
    cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None
    """Global document boundaries; None makes every row one document."""
    document_ids: Tensor | None = None
    row_tokens: int = 0
    placement: Any = None
    segments: Tensor | None = None
    pixels: Tensor | None = None
    hidden: Tensor | None = None
    """Hidden states [B, t, M] to start from instead of embeddings, in a stage after the front."""
    read: ReadTokens | None = None
    """Tokens whose hidden states are read; None: all."""


@dataclass(frozen=True, eq=False)
class PassCalls:
    """A forward pass's arguments for a stack's layers, and their router statistics."""

    tables: Sequence[RotaryTable | None]
    """One per rope, from ``Stack.tables``."""
    of_mixer: Mapping[Mixer, LayerCall]
    read: ReadCall | None = None
    """Tokens whose outputs the last layer computes; None: all."""
    stats: list[tuple[Tensor, ...]] = field(default_factory=list)
    """``RouterStats.tensors`` from every expert layer that has run."""


class Stack(nn.Module):
    """Embeddings, blocks and the last norm: the modules named ``model.*``, or ``encoder.*`` for an encoder."""

    def __init__(
        self,
        config: ModelConfig,
        experts: slice = slice(None),
        *,
        owns_table: bool = True,
        owns_front: bool = True,
        has_norm: bool = True,
    ) -> None:
        """Build the stack with the weights for ``experts``, this rank's slice in each layer.

        A stack that owns no token table receives another stack's module in ``forward``; one without a front receives
        hidden states. Only a model's last stage has the last norm.
        """
        super().__init__()
        self.config = config
        if owns_front:
            self._build_front(owns_table=owns_table)
        if config.position == "t5":
            self.relative_bias = Weight(config.relative_buckets, config.num_heads)
        num_blocks = 1 if config.shared_layers else config.num_layers
        kind = CrossBlock if config.encoder_layers else Block
        self.layers = nn.ModuleList(kind(config, layer, experts) for layer in range(num_blocks))
        further = range(config.num_layers, config.depth)
        self.mtp: Any = nn.ModuleList(MtpBlock(config, layer, experts) for layer in further)
        self.norm: nn.Module | None = None
        if has_norm and config.norm_order != "post":
            self.norm = build_norm(config, config.hidden_size)
        # Layers with one rope share a table; None means no rotary channels.
        self._specs = layer_specs(config)
        layer_rotary = [(spec.rope, spec.rotary_size) for spec in self._specs]
        self._rope_kinds = tuple(dict.fromkeys(layer_rotary))
        self._rope_of_layer = tuple(self._rope_kinds.index(rope) for rope in layer_rotary)

    def _build_front(self, *, owns_table: bool) -> None:
        config, E = self.config, self.config.embedding_dim
        if config.image.patch:
            self.embed_patches = PatchEmbedding(config)
        elif owns_table:
            self.embed_tokens = TokenTable(config.vocab_size, E)
        if config.position == "learned":
            self.embed_positions = Embedding(config.max_positions + config.position_offset, E)
        if config.segments:
            self.embed_segments = Embedding(config.segments, E)
        if config.embedding_norm:
            self.embed_norm = build_norm(config, E)
        if config.embedding_size:
            self.embed_projection = Linear(E, config.hidden_size)

    def forward(
        self,
        given: StackInput,
        positions_Bt: Tensor,
        calls: PassCalls,
        *,
        dropout: Dropout | None,
        stream: ResidualStream | None,
        embed_tokens: nn.Module | None = None,
    ) -> Tensor:
        """Compute hidden states [B, t, M].

        With ``stream`` return its handle instead, before the final norm. ``positions_Bt`` are resolved
        (``plans.resolve_positions``). ``embed_tokens`` is the table's module if the stack owns no table. With
        ``calls.read`` the last layer computes only these tokens' outputs, and the result is [1, F, M].
        """
        x_BtM = self._enter(given, positions_Bt, dropout, stream, embed_tokens)
        if self.config.adapter.is_used:
            x_BtM = with_gradient(x_BtM)
        for layer in range(self.config.num_layers):
            x_BtM = self.run_layer(layer, x_BtM, calls)
        if stream is None:
            x_BtM = self.last_norm(x_BtM)
        return x_BtM

    def _enter(
        self,
        given: StackInput,
        positions_Bt: Tensor,
        dropout: Dropout | None,
        stream: ResidualStream | None,
        embed_tokens: nn.Module | None,
    ) -> Tensor:
        """Return the first layer's input: hidden states, or the handle of the stream that now holds them."""
        if given.hidden is not None:
            x_BtM = given.hidden
        elif self.config.image.patch:
            x_BtM = self.embed_images(given.pixels, positions_Bt, dropout)
        else:
            # Use the module, not its weight: ZeRO-3 gathers a weight for its owner's forward.
            table: Any = embed_tokens or self.embed_tokens
            if stream is not None and dropout is None and enters_by_rows(self.config):
                return table(given.tokens_Bt, stream, self._factor(table.weight.dtype, given.tokens_Bt.device))
            x_BtM = self._embed(self._scaled(table(given.tokens_Bt)), positions_Bt, given.segments, dropout)
        if stream is None:
            return x_BtM
        return stream.enter(x_BtM)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.parameters()).dtype

    def run_layer(self, layer: int, x_BtM: Tensor, calls: PassCalls) -> Tensor:
        """Run one layer, or an MTP block after the last; return its output, the last layer's of ``calls.read`` only."""
        spec = self._specs[layer]
        if layer < self.config.num_layers:
            block = self.layers[layer % len(self.layers)]
        else:
            block = self.mtp[layer - self.config.num_layers].block
        read = calls.read if layer == self.config.num_layers - 1 else None
        call = replace(calls.of_mixer[spec.mixer], layer=layer, read=read)
        table = calls.tables[self._rope_of_layer[layer]]
        x_BtM, *of_router = block(x_BtM, table, call=call)
        if spec.ffn == "experts":
            calls.stats.append(tuple(of_router))
        return x_BtM

    def last_norm(self, x_BtM: Tensor) -> Tensor:
        """Apply the last norm to the residual stream."""
        # A post-norm block ends in its own norm, so the stream needs no last one.
        if self.norm is None:
            return x_BtM
        return self.norm(x_BtM)

    def build_head_inputs(
        self, hidden_BtM: Tensor, stream: ResidualStream | None, mtp_tokens: Sequence[Tensor], calls: PassCalls
    ) -> Any:
        """Return the head's input: hidden states, or with ``mtp_tokens`` a list of ``HeadInput``.

        The list starts with the last layer's and has one per MTP block, which run here. ``mtp_tokens`` [B, t] are the
        following tokens, one token further per block.
        """
        if not mtp_tokens:
            return hidden_BtM
        inputs = [HeadInput(hidden_BtM, stream, self.norm)]
        for number, (block, tokens_Bt) in enumerate(zip(self.mtp, mtp_tokens, strict=True)):
            before, stream, by_chunks = inputs[-1], None, None
            # Each block has its own residual stream.
            if before.stream is not None:
                stream = before.stream.branch()
                by_chunks = partial(chunked_layer, stream)
            of_mixer = {mixer: replace(call, by_chunks=by_chunks) for mixer, call in calls.of_mixer.items()}
            # The block reads the head's input; by chunks that is before the norm, which the join applies.
            hidden_BtM, x_BtM = block.join(before, self._scaled(self.embed_tokens(tokens_Bt)), stream)
            inputs[-1] = replace(before, hidden_BtM=hidden_BtM)
            x_BtM = self.run_layer(self.config.num_layers + number, x_BtM, replace(calls, of_mixer=of_mixer))
            if stream is None:
                x_BtM = block.norm(x_BtM)
            inputs.append(HeadInput(x_BtM, stream, block.norm))
        return inputs

    def embed_images(self, pixels_BtN: Tensor | None, positions_Bt: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Compute the initial residual stream from patches. Raise ConfigError without pixels."""
        if pixels_BtN is None:
            raise ConfigError(
                f"model.image.patch={self.config.image.patch}: the model reads pixels, and the batch has none. Read a "
                "folder of images."
            )
        return self._embed(self.embed_patches(pixels_BtN, positions_Bt), positions_Bt, None, dropout)

    def _embed(
        self, x_BtM: Tensor, positions_Bt: Tensor, segments_Bt: Tensor | None, dropout: Dropout | None
    ) -> Tensor:
        """Compute the initial residual stream from token table rows or patches."""
        config = self.config
        if config.position == "learned":
            x_BtM = x_BtM + self.embed_positions(positions_Bt + config.position_offset)
        if config.position in ("sinusoidal", "sinusoidal_halves"):
            halves = config.position == "sinusoidal_halves"
            sinusoids = sinusoidal_embedding(positions_Bt, config.embedding_dim, x_BtM.dtype, halves=halves)
            x_BtM = x_BtM + sinusoids.to(x_BtM.dtype)
        if config.segments:
            if segments_Bt is None:
                # One row for all tokens: its gradient is one sum, not rounded once per token.
                segments_Bt = positions_Bt.new_zeros(1)
            x_BtM = x_BtM + self.embed_segments(segments_Bt)
        if config.embedding_norm:
            x_BtM = self.embed_norm(x_BtM)
        if dropout is not None:
            x_BtM = dropout(x_BtM, -1)
        if config.embedding_size:
            x_BtM = self.embed_projection(x_BtM)
        return x_BtM

    def _scaled(self, x_BtM: Tensor) -> Tensor:
        factor = self._factor(x_BtM.dtype, x_BtM.device)
        return x_BtM if factor is None else x_BtM * factor

    def _factor(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return the embedding scale; None if it is 1."""
        if self.config.embedding_scale == 1:
            return None
        # Rounded to the model's dtype first, as Gemma was trained.
        return torch.tensor(self.config.embedding_scale, dtype=dtype).to(device, non_blocking=True)

    def scores(self, device: torch.device) -> ScoreRules:
        """Build the score rules, which all layers share."""
        config = self.config
        slopes, bias = None, None
        if config.position == "alibi":
            slopes = alibi_slopes(config.num_heads).to(device, non_blocking=True)
        if config.position == "t5":
            farthest = config.relative_max_distance
            bias = RelativeBias(self.relative_bias(), max_distance=farthest, bidirectional=not config.causal)
        return ScoreRules(
            scale=config.scale,
            softcap=config.attention_softcap or None,
            alibi_slopes_H=slopes,
            relative_bias=bias,
        )

    def tables(self, positions_Bt: Tensor, longest: int, dtype: torch.dtype) -> list[RotaryTable | None]:
        """Build rotary tables for queries and keys in ``dtype``; layers with one rope share a table."""
        return [self._build_table(rope, size, positions_Bt, longest, dtype) for rope, size in self._rope_kinds]

    def _build_table(
        self, rope: Rope | None, rotary_size: int, positions_Bt: Tensor, longest: int, dtype: torch.dtype
    ) -> RotaryTable | None:
        if rope is not None:
            is_whole = self.config.is_latent or rope.is_full_head
            return RotaryTable.build(positions_Bt, rope, rotary_size, dtype, length=longest, is_whole=is_whole)
        if self.config.position == "relative":
            return RotaryTable(*sinusoid_table(positions_Bt, self.config.hidden_size, dtype))
        return None


def enters_by_rows(config: ModelConfig) -> bool:
    """Return whether chunked residual streams start with plain rows from a large table.

    The caller excludes dropout, which would change the rows.
    """
    changes = config.segments or config.embedding_norm or config.embedding_size
    is_added = config.position in ("learned", "sinusoidal", "sinusoidal_halves")
    return not changes and not is_added and is_summed_by_rows(config.vocab_size * config.hidden_size)
