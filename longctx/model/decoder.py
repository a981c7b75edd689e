"""The decoder: tokens in, hidden states out, under Hugging Face's parameter names.

Axes: B rows, t tokens of this rank, M model width, V vocabulary, L layers, S documents, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longctx.architecture.layers import layer_specs, mixers_of
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.rope import Rope
from longctx.batch import PackedDocuments
from longctx.config import ModelConfig
from longctx.kernels.attention.bias import alibi_slopes
from longctx.kernels.attention.contract import RelativeBias, Scores
from longctx.kernels.graphs import outside_graphs
from longctx.kernels.regions import Run, call_function, run_with
from longctx.model.attention.cache import KVCache, TokenChunk
from longctx.model.attention.core import AttentionCore, PassCore
from longctx.model.attention.sequences import PassCache, SequencesCore
from longctx.model.block import Block, Call
from longctx.model.chunks.head import chunked_loss_sums
from longctx.model.chunks.layer import chunked_layer
from longctx.model.chunks.stream import ResidualStream, new_stream
from longctx.model.copies import Copies
from longctx.model.experts.dispatch import ExpertRun, TokenDispatcher
from longctx.model.experts.experts import is_expert_weight
from longctx.model.experts.layer import MoECall
from longctx.model.experts.router import RouterStats
from longctx.model.head import LMHead
from longctx.model.kept import HostStore
from longctx.model.layers.dropout import Dropout
from longctx.model.layers.initialize import InitialTensor
from longctx.model.layers.linear import Embedding, Linear, Weight, set_products
from longctx.model.layers.norms import build_norm
from longctx.model.mixers.table import with_local_cores
from longctx.model.plans import place, plan_layers
from longctx.model.rotary import RotaryTable, sinusoid_table, sinusoidal_embedding
from longctx.model.training_pass import (
    EVALUATION,
    Execution,
    Random,
    TrainingPass,
    build_random,
    document_ids_of,
    is_random,
)


class Backbone(nn.Module):
    """Embedding, blocks and the final norm: everything named ``model.*``."""

    def __init__(self, config: ModelConfig, experts: slice = slice(None)) -> None:
        super().__init__()
        self.config = config
        E = config.embedding_dim
        self.embed_tokens = Embedding(config.vocab_size, E)
        if config.position == "learned":
            self.embed_positions = Embedding(config.max_positions + config.position_offset, E)
        if config.segments:
            self.embed_segments = Embedding(config.segments, E)
        if config.embedding_norm:
            self.embed_norm = build_norm(config, E)
        if config.embedding_size:
            self.embed_projection = Linear(E, config.hidden_size)
        if config.position == "t5":
            self.relative_bias = Weight(config.relative_buckets, config.num_heads)
        num_blocks = 1 if config.shared_layers else config.num_layers
        self.layers = nn.ModuleList(Block(config, layer, experts) for layer in range(num_blocks))
        self.norm: nn.Module | None = None
        if config.norm_order != "post":
            self.norm = build_norm(config, config.hidden_size)
        # Layers of one rope share their table; None stands for layers without rotary channels.
        self._specs = layer_specs(config)
        ropes = [spec.rope for spec in self._specs]
        self._ropes = tuple(dict.fromkeys(ropes))
        self._rope_of_layer = tuple(self._ropes.index(rope) for rope in ropes)

    def forward(
        self,
        tokens_Bt: Tensor,
        positions_Bt: Tensor,
        tables: Sequence[RotaryTable | None],
        calls: Mapping[Mixer, Call],
        *,
        dropout: Dropout | None,
        stream: ResidualStream | None,
    ) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        """Hidden states [B, t, M] and the ``RouterStats.tensors`` of every expert layer.

        With ``stream`` its handle, before the final norm, stands for hidden states. ``tables`` are those of ``tables``.
        """
        x_BtM = self._embed(tokens_Bt, positions_Bt, dropout)
        if stream is not None:
            x_BtM = stream.enter(x_BtM)
        stats: list[tuple[Tensor, ...]] = []
        for layer, (spec, rope) in enumerate(zip(self._specs, self._rope_of_layer, strict=True)):
            block = self.layers[layer % len(self.layers)]
            x_BtM, *of_layer = block(x_BtM, tables[rope], call=replace(calls[spec.mixer], layer=layer))
            if spec.ffn == "experts":
                stats.append(tuple(of_layer))
        if stream is None:
            x_BtM = self.last_norm(x_BtM)
        return x_BtM, stats

    def last_norm(self, x_BtM: Tensor) -> Tensor:
        """Hidden states of the residual stream behind the last layer."""
        # A post-norm block ends in a norm of its own, so the stream needs no last one.
        if self.norm is None:
            return x_BtM
        return self.norm(x_BtM)

    def _embed(self, tokens_Bt: Tensor, positions_Bt: Tensor, dropout: Dropout | None) -> Tensor:
        config = self.config
        x_BtM = self.embed_tokens(tokens_Bt)
        if config.embedding_scale != 1:
            # rounded to the model's dtype first, as Gemma was trained
            scale = torch.tensor(config.embedding_scale, dtype=x_BtM.dtype)
            x_BtM = x_BtM * scale.to(x_BtM.device, non_blocking=True)
        if config.position == "learned":
            x_BtM = x_BtM + self.embed_positions(positions_Bt + config.position_offset)
        if config.position == "sinusoidal":
            x_BtM = x_BtM + sinusoidal_embedding(positions_Bt, config.embedding_dim, x_BtM.dtype).to(x_BtM.dtype)
        if config.segments:
            # One row for all tokens: its gradient is one sum, and not rounded once a token.
            x_BtM = x_BtM + self.embed_segments(positions_Bt.new_zeros(1))
        if config.embedding_norm:
            x_BtM = self.embed_norm(x_BtM)
        if dropout is not None:
            x_BtM = dropout(x_BtM, -1)
        if config.embedding_size:
            x_BtM = self.embed_projection(x_BtM)
        return x_BtM

    def scores(self, device: torch.device) -> Scores:
        """How queries and keys become scores: the same in all layers."""
        config = self.config
        slopes, bias = None, None
        if config.position == "alibi":
            slopes = alibi_slopes(config.num_heads).to(device, non_blocking=True)
        if config.position == "t5":
            farthest = config.relative_max_distance
            bias = RelativeBias(self.relative_bias(), max_distance=farthest, bidirectional=not config.causal)
        return Scores(
            scale=config.scale,
            softcap=config.attention_softcap or None,
            alibi_slopes_H=slopes,
            relative_bias=bias,
        )

    def tables(self, positions_Bt: Tensor, longest: int) -> list[RotaryTable | None]:
        """What rotates queries and keys: layers of one rope share a table."""
        dtype = self.embed_tokens.weight.dtype
        return [self._table(rope, positions_Bt, longest, dtype) for rope in self._ropes]

    def _table(self, rope: Rope | None, positions_Bt: Tensor, longest: int, dtype: torch.dtype) -> RotaryTable | None:
        config = self.config
        if rope is not None:
            rotated = config.head_dim
            if config.is_latent:
                rotated = config.rope_head_dim
            return RotaryTable.build(positions_Bt, rope, config.rotary_size, dtype, length=longest, head_dim=rotated)
        if config.position == "relative":
            return RotaryTable(*sinusoid_table(positions_Bt, config.hidden_size, dtype))
        return None


class Decoder(nn.Module):
    """A causal language model's network. Its attention cores decide which keys a query sees, on whatever rank."""

    def __init__(
        self,
        config: ModelConfig,
        cores: Mapping[str, AttentionCore] | None = None,
        *,
        dispatcher: TokenDispatcher | None = None,
        execution: Execution | None = None,
        seed: int | None = 0,
    ) -> None:
        """Build the network with the initial weights of ``seed``; None leaves memory unset, for a state dict to fill.

        ``cores`` serve the layers whose mixers name them; those that are left out are of one process. The decoder holds
        the experts that its ``dispatcher`` names: without one, all.
        """
        super().__init__()
        self.config = config
        self.execution = execution = execution or Execution()
        self.cores = with_local_cores(cores or {}, execution.products)
        self.dispatcher = dispatcher or TokenDispatcher()
        self.model = Backbone(config, self.dispatcher.local_experts)
        self.lm_head = LMHead(config, execution.products, run_with(execution.compiler))
        set_products(self, execution.products)
        if seed is not None:
            self.initialize(seed)

    def initialize(self, seed: int) -> None:
        """Set every weight to its initial value, which depends on ``seed`` and the tensor's name alone."""
        _initialize(self, seed)

    def logical_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole model's tensor of which the parameter ``name``, of this shape, is here."""
        return (self.config.num_experts, *shape[1:]) if is_expert_weight(name) else tuple(shape)

    @outside_graphs  # parts of it are compiled by ``Regions``; it plans by numbers that no graph may hold
    def forward(
        self,
        tokens_Bt: Tensor,
        positions_Bt: Tensor,
        cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None = None,
        *,
        document_ids: Tensor | None = None,
        row_tokens: int = 0,
        placement: Any = None,
        training_pass: TrainingPass | None = None,
        return_stats: bool = False,
        cache: PassCache | None = None,
        chunk: TokenChunk | None = None,
        stream: ResidualStream | None = None,
    ) -> Any:
        """Hidden states [B, t, M]; with ``return_stats`` also a list of ``RouterStats``, one a layer (none if dense).

        ``cu_seqlens`` are the global document boundaries; None makes every row one document. ``document_ids`` [B, t]
        tells which segment of them each token belongs to, negative for padding; it may be left out when these tokens
        are the whole of ``cu_seqlens``. ``row_tokens`` is the length of rows laid end to end in these (an expert's
        capacity is one of a row); 0 if none were. ``placement`` tells where the sequence's tokens live. Without a
        ``training_pass`` nothing is random. With a ``cache`` the tokens continue its sequences: those of ``chunk``, by
        default one that every process has whole. A ``stream``'s handle stands for the hidden states.
        """
        config, training_pass = self.config, training_pass or EVALUATION
        new_tokens, given = chunk, stream
        if cache is not None and chunk is None:
            new_tokens = cache.chunk(tokens_Bt.shape[1])
        if new_tokens is not None:
            placement = new_tokens.placement
        if stream is None and cache is None:
            stream = new_stream(self.execution, tokens_Bt)
        head_groups = 1 if stream is None else stream.head_groups
        cores = _cores_of(self, new_tokens)
        # Ranks agree on their plans before the first layer computes: a difference fails at once, not in a collective.
        dtype = self.model.embed_tokens.weight.dtype
        documents, plans = plan_layers(
            config, cores, cu_seqlens, tokens_Bt, dtype, placement=placement, chunk=new_tokens, head_groups=head_groups
        )
        positions_Bt, longest = place(config, documents, positions_Bt, document_ids, cache, chunk)
        if training_pass.replay is not None:
            training_pass.replay.check(config, positions_Bt.numel())
        # Both break a compiled graph, so they are made only for what reads them.
        if document_ids is None and (return_stats or is_random(config, training_pass)):
            document_ids = document_ids_of(documents, tokens_Bt)
        random = build_random(config, training_pass, documents, positions_Bt, document_ids, row_tokens=row_tokens)
        # Statistics of routers cost a pass over their scores: without documents to count for, none are made.
        counted_Bt = document_ids if return_stats else None
        tables, scores = self.model.tables(positions_Bt, longest), self.model.scores(tokens_Bt.device)
        experts = _build_moe_call(self, training_pass, random, documents.num_documents, counted_Bt, new_tokens)
        store = _host_store(self, tokens_Bt, tables, cache, stream)
        by_chunks = None if stream is None else partial(chunked_layer, stream)
        calls: dict[Mixer, Call] = {}
        for mixer, plan in plans.items():
            calls[mixer] = Call(
                core=cores[mixer],
                plan=plan,
                scores=scores,
                cache=cache,
                dropout=random.dropout,
                experts=experts,
                keep=self.execution.keep,
                store=store,
                by_chunks=by_chunks,
                run=_run_of(self, cache),
            )
        hidden_BtM, stats = self.model(tokens_Bt, positions_Bt, tables, calls, dropout=random.dropout, stream=stream)
        if stream is not None and given is None:
            hidden_BtM = self.model.last_norm(stream.leave(hidden_BtM))
        if cache is not None and new_tokens is not None:
            cache.extend(new_tokens)
        if not return_stats:
            return hidden_BtM
        return hidden_BtM, [RouterStats.from_tensors(layer) for layer in stats]

    def new_cache(self) -> KVCache:
        """Return an empty cache, on this process or on those that share its sequences: the softmax core's, for all."""
        return self.cores["softmax"].new_cache()

    def new_caches(self, most: int) -> Callable[[], KVCache]:
        """Makes empty caches, of which at most so many are in use together."""
        return self.cores["softmax"].new_caches(most)

    def selection_biases(self) -> list[Tensor]:
        """The buffers [E] that routers add where they choose experts, one a layer of experts; none if it has none."""
        return [buffer for name, buffer in self.named_buffers() if name.endswith("e_score_correction_bias")]

    def logits(self, hidden_BtM: Tensor) -> Tensor:
        """Next-token logits [B, t, V] in the model's dtype."""
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens)

    def loss_sums(
        self,
        hidden_BtM: Tensor,
        targets_Bt: Tensor,
        *,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        stream: ResidualStream | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Σ objective, with gradient, and Σ negative log-likelihood, without: float32, and the logits are never whole.

        With a ``stream`` hidden states are never whole either: its handle, which ``forward`` gave, stands for them.
        The objective of a target is its negative log-likelihood with smoothed labels plus the z-loss (``LossOptions``).
        """
        by_chunks = None if stream is None else partial(chunked_loss_sums, stream, _before_head(self))
        options = {"z_loss": z_loss, "label_smoothing": label_smoothing, "by_chunks": by_chunks}
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens, targets_Bt=targets_Bt, **options)

    def token_nll(self, hidden_BtM: Tensor, targets_Bt: Tensor) -> Tensor:
        """Each token's negative log-likelihood [B, t], float32, without gradient; 0 where the target is ignored."""
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens, targets_Bt=targets_Bt, per_token=True)


def _before_head(decoder: Decoder) -> nn.Module | None:
    """What stands between the residual stream and the output matrix."""
    parts = [part for part in (decoder.model.norm, decoder.lm_head.transform) if part is not None]
    if len(parts) > 1:
        return nn.Sequential(*parts)
    return next(iter(parts), None)


def _cores_of(decoder: Decoder, chunk: TokenChunk | None) -> dict[Mixer, PassCore]:
    """The core of each mixer."""
    cores = {mixer: decoder.cores[mixer.core] for mixer in mixers_of(decoder.config)}
    if chunk is not None and chunk.sequences:
        return {mixer: SequencesCore(core, chunk.sequences) for mixer, core in cores.items()}
    return {**cores}


def _run_of(decoder: Decoder, cache: PassCache | None) -> Run:
    """How blocks call their parts: compiled in training alone."""
    # evaluation has other lengths, generation few tokens
    if cache is not None or not torch.is_grad_enabled():
        return call_function
    return decoder.lm_head.run


def _host_store(
    decoder: Decoder,
    tokens_Bt: Tensor,
    tables: Sequence[RotaryTable | None],
    cache: PassCache | None,
    stream: ResidualStream | None,
) -> HostStore | None:
    """Where the pass's layers keep what they save for backward; None is the device, or a stream's own store."""
    if decoder.execution.store != "host" or stream is not None or cache is not None or not torch.is_grad_enabled():
        return None
    return _new_host_store(tokens_Bt, tables, decoder.config.num_layers)


def _new_host_store(tokens_Bt: Tensor, tables: Sequence[RotaryTable | None], num_layers: int) -> HostStore:
    shared = [x for table in tables if table is not None for x in (table.cos, table.sin)]
    # What has less than a byte a token does not grow with the row: to move it takes longer than to keep it.
    return HostStore(Copies(tokens_Bt.device), num_layers, least_bytes=tokens_Bt.numel(), shared=shared)


def _build_moe_call(
    decoder: Decoder,
    training_pass: TrainingPass,
    random: Random,
    num_documents: int,
    counted_Bt: Tensor | None,
    chunk: TokenChunk | None,
) -> MoECall:
    """What the pass tells all layers of experts; ``counted_Bt`` are the documents that statistics are made for."""
    execution, dispatcher = decoder.execution, decoder.dispatcher
    if chunk is not None and chunk.is_replicated:
        dispatcher = dispatcher.of_replicated()
    recompute = execution.recompute_experts
    if not torch.is_grad_enabled():
        recompute = "all"  # nothing is saved for a backward pass
    return MoECall(
        ExpertRun(
            dispatcher,
            tile_tokens=execution.expert_tile_tokens,
            recompute=recompute,
            products=execution.products,
        ),
        documents_Bt=counted_Bt,
        num_documents=num_documents,
        jitter=random.jitter,
        capacity=random.capacity,
        replay=training_pass.replay,
    )


def external_parameters(decoder: Decoder) -> list[tuple[nn.Module, nn.Parameter]]:
    """(module, parameter) for each parameter that a module other than its owner reads; ZeRO-3 has to be told."""
    external: list[tuple[nn.Module, nn.Parameter]] = []
    if decoder.config.tie_embeddings:
        table: Any = decoder.model.embed_tokens.weight
        external.append((decoder.lm_head, table))
    # By chunks the head applies the last norm, and what it has itself is called once a chunk.
    if decoder.execution.chunk_tokens:
        parts = (decoder.model.norm, decoder.lm_head.transform)
        external.extend((decoder.lm_head, p) for part in parts if part is not None for p in part.parameters())
    return external


@torch.no_grad()
def _initialize(decoder: Decoder, seed: int) -> None:
    for name, parameter in decoder.named_parameters():
        if parameter.is_meta:
            continue
        # Of experts the own ones alone are drawn: a weight has the same values on any number of expert ranks.
        whole = torch.Size(decoder.logical_shape(name, parameter.shape)).numel()
        initial, first = InitialTensor(name, whole, decoder.config, seed), 0
        if whole != parameter.numel():
            first = (decoder.dispatcher.local_experts.start or 0) * parameter[0].numel()
        initial.copy_to(parameter.view(-1), first)
    # The only buffers are the routers' selection biases, which start even.
    for buffer in decoder.buffers():
        buffer.zero_()
