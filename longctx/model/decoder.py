"""Decoder with an optional encoder: tokens in, hidden states and losses out.

Axes: B rows, t tokens of this rank, M model width, V vocabulary, L layers, S documents, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from longctx.architecture.fields import encoder_of
from longctx.architecture.layer_specs import mixers_of
from longctx.architecture.mixers.mixer import Mixer
from longctx.batch import PackedDocuments, ReadTokens, Stream
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.graphs import exclude_from_graphs
from longctx.kernels.quantized_weights import PackedLayout
from longctx.kernels.regions import RegionRunner, call_function, run_with
from longctx.model.activation_offload import HostStore
from longctx.model.adapters import add_adapters, copy_quantized
from longctx.model.async_copies import AsyncCopies
from longctx.model.attention.core import AttentionCore, PassCore
from longctx.model.attention.kv_cache import KVCache, TokenChunk
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.sequences import PassCache, SequencesCache, SequencesCore
from longctx.model.block import LayerCall
from longctx.model.chunks.chunked_head import chunked_loss_sums, chunked_token_nll
from longctx.model.chunks.chunked_layer import chunked_layer
from longctx.model.chunks.residual_stream import ResidualStream, new_stream
from longctx.model.document_head import build_class_head, build_pair_head
from longctx.model.experts.dispatch import ExpertRun, TokenDispatcher
from longctx.model.experts.experts import is_expert_weight
from longctx.model.experts.moe_layer import MoECall
from longctx.model.experts.router import RouterStats
from longctx.model.head import LMHead
from longctx.model.image_stages import ImageStages, run_stages
from longctx.model.layers.initialize import InitialTensor, initial_buffer
from longctx.model.layers.linear import set_matmul_mode
from longctx.model.mixers.cross_projections import CrossCall
from longctx.model.mixers.mixer_networks import CROSS, with_local_cores
from longctx.model.plans import cross_call, plan_layers, plan_read, resolve_positions
from longctx.model.rotary import RotaryTable
from longctx.model.source import EncodedSource, join_sources
from longctx.model.stack import PassCalls, Stack, StackInput
from longctx.model.training_pass import (
    EVALUATION,
    Execution,
    Random,
    TrainingPass,
    document_ids_of,
)


class Decoder(nn.Module):
    """Causal language model network. Its attention cores decide which keys a query sees, on all ranks."""

    def __init__(
        self,
        config: ModelConfig,
        cores: Mapping[str, AttentionCore] | None = None,
        *,
        dispatcher: TokenDispatcher | None = None,
        execution: Execution | None = None,
        seed: int | None = 0,
    ) -> None:
        """Build the network with initial weights from ``seed``; None leaves memory unset, for a state dict to fill.

        ``cores`` serve the layers with mixers that name them; missing ones default to single-process cores. The decoder
        holds the experts that its ``dispatcher`` assigns to this rank; without one, all.
        """
        super().__init__()
        self.config = config
        self.execution = execution = execution or Execution()
        self.cores = with_local_cores(cores or {}, execution.matmul_mode)
        self.dispatcher = dispatcher or TokenDispatcher()
        # The last norm of a model with stages is in its last stage.
        self.model: Any = ImageStages(config) if config.image.depths else Stack(config, self.dispatcher.local_experts)
        self.encoder: Stack | None = None
        if config.encoder_layers:
            self.encoder = Stack(encoder_of(config), owns_table=False)
        self.joined_sources: tuple[list[EncodedSource], EncodedSource] | None = None  # cached for several sequences
        self.run_region = run_with(execution.compiler)
        self.lm_head: Any = None
        if config.predicts_tokens:
            self.lm_head = LMHead(config, execution.matmul_mode, self.run_region)
        self.pair_head: Any = build_pair_head(config)
        self.class_head: Any = build_class_head(config)
        # Layouts of the quantized weights, by parameter name, with this process's experts.
        self.layouts: dict[str, PackedLayout] = add_adapters(self, config.adapter) if config.adapter.is_used else {}
        set_matmul_mode(self, execution.matmul_mode)
        if seed is not None:
            self.initialize(seed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set every weight to its initial value, which depends only on ``seed`` and the tensor's name."""
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            # Generate only this rank's experts, at their offset: values do not depend on the number of expert ranks.
            whole = torch.Size(self.logical_shape(name, parameter.shape))
            initial, first = InitialTensor(name, whole.numel(), self.config, seed), 0
            if is_expert_weight(name):
                first = (self.dispatcher.local_experts.start or 0) * whole[1:].numel()
            copy_quantized(initial, parameter.view(-1), first, self.layouts.get(name))
        for name, buffer in self.named_buffers():
            buffer.fill_(initial_buffer(name))

    def logical_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the full tensor's shape for parameter ``name``, given this rank's shape; of values if quantized."""
        if name in self.layouts:
            shape = self.layouts[name].shape
        return (self.config.num_experts, *shape[1:]) if is_expert_weight(name) else tuple(shape)

    @exclude_from_graphs  # ``Regions`` compiles its parts; planning uses numbers that no graph may hold
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
        source: EncodedSource | None = None,
        segments: Tensor | None = None,
        pixels: Tensor | None = None,
        mtp_tokens: Sequence[Tensor] = (),
        read: ReadTokens | None = None,
    ) -> Any:
        """Compute hidden states [B, t, M]; with ``return_stats`` also ``RouterStats`` for each expert layer.

        * ``cu_seqlens``: global document boundaries; None makes every row one document.
        * ``document_ids`` [B, t]: each token's document in ``cu_seqlens``, negative for padding. It may be omitted if
          these are all tokens of ``cu_seqlens``.
        * ``row_tokens``: length of rows that were laid end to end, since expert capacity is per row; 0 if they were
          not.
        * ``placement``: location of the sequence's tokens.
        * ``training_pass``: seed and token indices; without it the pass is deterministic.
        * ``cache``: past tokens that these continue, as ``chunk``; by default a chunk that every process has in full.
        * ``stream``: residual stream; its handle is returned instead of hidden states.
        * ``source``: result of ``encode``, for a model with an encoder.
        * ``segments`` [B, t]: each token's segment in its document; None means the first for all.
        * ``pixels`` [B, t, C·P·P]: each token's patch, for a model of images in patches; token ids are then not read.
        * ``mtp_tokens`` [B, t] each: the following tokens, one token further per MTP block. The result is then a list
          of ``HeadInput`` instead of hidden states.
        * ``read``: tokens whose hidden states are read; the result is then [1, F, M]. Only without ``stream`` and
          ``mtp_tokens``, and not in a hierarchical model.
        """
        source = self._resolve_source(cache, source)
        given = StackInput(
            tokens_Bt=tokens_Bt,
            positions_Bt=positions_Bt,
            cu_seqlens=cu_seqlens,
            document_ids=document_ids,
            row_tokens=row_tokens,
            placement=placement,
            segments=segments,
            pixels=pixels,
            read=read,
        )
        if self.config.image.depths:
            core: Any = self.cores["image_windows"]
            images = run_stages(self.model, given, core, lambda stage, x: self._run_stack(stage, x, EVALUATION)[0])
            return (images, []) if return_stats else images
        hidden_BtM, stats = self._run_stack(
            self.model,
            given,
            training_pass or EVALUATION,
            return_stats=return_stats,
            cache=cache,
            chunk=chunk,
            stream=stream,
            source=source,
            mtp_tokens=mtp_tokens,
        )
        return (hidden_BtM, stats) if return_stats else hidden_BtM

    @exclude_from_graphs
    def encode(
        self, source: Stream, training_pass: TrainingPass | None = None, *, keeps_keys: bool = False
    ) -> EncodedSource:
        """Encode a source; ``forward`` reads the resulting hidden states in cross attention.

        With ``keeps_keys`` layers cache the keys and values that they project from it, for a generation's later tokens.
        """
        if self.encoder is None:
            raise ConfigError("the model has no encoder (model.encoder_layers=0), and a source was given.")
        given = StackInput(
            tokens_Bt=source.tokens,
            positions_Bt=source.positions,
            cu_seqlens=source.documents,
            **stream_arguments(source),
        )
        hidden_BsM, _ = self._run_stack(self.encoder, given, (training_pass or EVALUATION).of_source())
        return EncodedSource(hidden_BsM, source.documents, source.placement, keys={} if keeps_keys else None)

    def new_cache(self) -> KVCache:
        """Return an empty cache for this process or those that share its sequences, which serves all mixers."""
        return self.cores["softmax"].new_cache()

    def new_caches(self, most: int) -> Callable[[], KVCache]:
        """Return a factory for empty caches; at most ``most`` are in use at a time."""
        return self.cores["softmax"].new_caches(most)

    def logits(self, hidden_BtM: Tensor) -> Tensor:
        """Compute next-token logits [B, t, V] in the model's dtype."""
        return self.lm_head(hidden_BtM, table=self.model.embed_tokens)

    def loss_sums(
        self,
        hidden_BtM: Tensor,
        targets_Bt: Tensor,
        *,
        stream: ResidualStream | None = None,
        norm: nn.Module | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return Σ weight · objective (with gradient) and Σ negative log-likelihood (without) in float32.

        With a ``stream`` its handle from ``forward`` replaces the hidden states, and its last ``norm``, by default the
        model's, is applied here. A target's objective is its label-smoothed negative log-likelihood plus the z-loss;
        ``options`` are the two in ``LossOptions``, and ``weights_Bt`` as in the kernel's ``loss_sums``.
        """
        by_chunks = None if stream is None else partial(chunked_loss_sums, stream, self._before_head(norm))
        table = self.model.embed_tokens
        return self.lm_head(hidden_BtM, table=table, targets_Bt=targets_Bt, by_chunks=by_chunks, **options)

    def token_nll(self, hidden_BtM: Tensor, targets_Bt: Tensor, stream: ResidualStream | None = None) -> Tensor:
        """Compute each token's negative log-likelihood [B, t], float32, without gradient; 0 for ignored targets."""
        table = self.model.embed_tokens
        by_chunks = None if stream is None else partial(chunked_token_nll, stream, self._before_head())
        return self.lm_head(hidden_BtM, table=table, targets_Bt=targets_Bt, per_token=True, by_chunks=by_chunks)

    def selection_biases(self) -> list[Tensor]:
        """Return the buffers [E] that routers add to choose experts, one per expert layer if the model has them."""
        return [buffer for name, buffer in self.named_buffers() if name.endswith("e_score_correction_bias")]

    def external_parameters(self) -> list[tuple[nn.Module, nn.Parameter]]:
        """Return (module, parameter) for each parameter that a module other than its owner reads, for ZeRO-3."""
        external: list[tuple[nn.Module, nn.Parameter]] = []
        if self.config.tie_embeddings and self.lm_head is not None:
            table: Any = self.model.embed_tokens.weight
            external.append((self.lm_head, table))
        if not self.execution.chunk_tokens:
            return external
        # By chunks a head applies the last norm, and the token head calls its own modules once per chunk.
        norms = [norm for norm in (self.model.norm,) if norm is not None]
        for head in (self.pair_head, self.class_head):
            if head is not None:
                external.extend((head, p) for norm in norms for p in norm.parameters())
        norms.extend(block.norm for block in self.model.mtp)
        if self.lm_head is not None:
            parts = norms.copy()
            if self.lm_head.transform is not None:
                parts.append(self.lm_head.transform)
            external.extend((self.lm_head, p) for part in parts for p in part.parameters())
        # The join before an MTP block applies the preceding norm.
        for norm, block in zip(norms, self.model.mtp, strict=False):
            external.extend((block.join, p) for p in norm.parameters())
        return external

    # One pass through a stack, in a fixed order. Plans come first: ranks compare them before any layer computes, so a
    # mismatch fails at once instead of hanging in a collective. Positions and document ids follow, then everything
    # random, which hashes token indices; all of it is built once and shared by every layer, so that recomputation reads
    # the same values.
    def _run_stack(
        self,
        stack: Stack,
        given: StackInput,
        training_pass: TrainingPass,
        *,
        return_stats: bool = False,
        cache: PassCache | None = None,
        chunk: TokenChunk | None = None,
        stream: ResidualStream | None = None,
        source: EncodedSource | None = None,
        mtp_tokens: Sequence[Tensor] = (),
    ) -> tuple[Any, list[RouterStats]]:
        """Run tokens through one stack; return hidden states or their stand-in, and router statistics if requested."""
        config, tokens_Bt, placement, document_ids = stack.config, given.tokens_Bt, given.placement, given.document_ids
        new_tokens, stream_of_caller, dtype = chunk, stream, self.model.dtype
        if cache is not None and chunk is None:
            new_tokens = cache.chunk(tokens_Bt.shape[1])
        if new_tokens is not None:
            placement = new_tokens.placement
        if stream is None and cache is None:
            stream = new_stream(self.execution, tokens_Bt)
        head_groups = 1 if stream is None else stream.head_groups
        cores = self._pass_cores(config, new_tokens)
        # Collective if ranks must agree on their plans.
        documents, plans = plan_layers(
            config,
            cores,
            given.cu_seqlens,
            tokens_Bt,
            dtype,
            placement=placement,
            chunk=new_tokens,
            head_groups=head_groups,
        )
        cross = self._build_cross_call(documents, source, tokens_Bt, placement, head_groups, cache, new_tokens)
        positions_Bt, longest = resolve_positions(config, documents, given.positions_Bt, document_ids, cache, chunk)
        if training_pass.replay is not None:
            training_pass.replay.check(config, positions_Bt.numel())
        # Both break a compiled graph, so they are built only if they are read.
        if document_ids is None and (return_stats or training_pass.is_random(config)):
            document_ids = document_ids_of(documents, tokens_Bt)
        random = training_pass.build_random(config, documents, positions_Bt, document_ids, row_tokens=given.row_tokens)
        # Router statistics cost a pass over the scores, so they are computed on request only.
        stats_documents_Bt = document_ids if return_stats else None
        scores, tables = stack.scores(tokens_Bt.device), stack.tables(positions_Bt, longest, dtype)
        experts = self._build_moe_call(training_pass, random, documents.num_documents, stats_documents_Bt, new_tokens)
        store = None
        if cache is None and stream is None:
            store = self._build_host_store(config, tokens_Bt, tables, source)
        call = partial(
            LayerCall,
            scores=scores,
            cache=cache,
            dropout=random.dropout,
            experts=experts,
            keep=self.execution.keep,
            store=store,
            by_chunks=None if stream is None else partial(chunked_layer, stream),
            run=self._region_runner(cache),
            cross=cross,
        )
        # Experts count all tokens, dropout draws for them, and chunks and compiled regions take them as they are.
        takes_all = random.dropout is not None or config.has_experts(config.num_layers - 1)
        takes_all = takes_all or stream is not None or self.execution.compiler is not None
        read = None if takes_all else plan_read(config, cores, documents, given.read, plans)
        calls = PassCalls(tables, {mixer: call(core=cores[mixer], plan=plan) for mixer, plan in plans.items()}, read)
        # An encoder has no token table and reads the decoder's.
        table = self.model.embed_tokens if stack is self.encoder else None
        hidden_BtM = stack(given, positions_Bt, calls, dropout=random.dropout, stream=stream, embed_tokens=table)
        # A stream from the caller stays open: its head applies the last norm chunk by chunk.
        if stream is not None and stream_of_caller is None:
            hidden_BtM = stack.last_norm(stream.leave(hidden_BtM))
        if given.read is not None and takes_all:
            hidden_BtM = given.read.select(hidden_BtM)
        if cache is not None and new_tokens is not None:
            cache.extend(new_tokens)
        head_inputs = stack.build_head_inputs(hidden_BtM, stream_of_caller, mtp_tokens, calls)
        return head_inputs, [RouterStats.from_tensors(of_layer) for of_layer in calls.stats if return_stats]

    def _resolve_source(self, cache: PassCache | None, given: EncodedSource | None) -> EncodedSource | None:
        """Return the source that a pass reads: its cache's, or the given one.

        Raise ConfigError for a source without an encoder, and for an encoder without a source.
        """
        assert cache is None or given is None, "a cache has its own source"
        source = given if cache is None else self._join_cached_sources(cache)
        if (source is None) == (self.encoder is None):
            return source
        if source is None:
            raise ConfigError(
                f"model.encoder_layers={self.config.encoder_layers}: the decoder reads a source, and none was given. "
                "Give the batch one (Batch.source), or set model.encoder_layers=0."
            )
        raise ConfigError("the model has no encoder (model.encoder_layers=0), and a source was given.")

    def _join_cached_sources(self, cache: PassCache) -> EncodedSource | None:
        """Return the source for a cache's sequences; join several once, until a sequence enters or leaves."""
        if not isinstance(cache, SequencesCache):
            return cache.source
        # A sequence's beams share one source.
        different = [source for _, (source, *_) in groupby(cache.sources, key=id) if source is not None]
        if not different:
            return None
        known = self.joined_sources
        if known is None or list(map(id, known[0])) != list(map(id, different)):
            known = self.joined_sources = different, join_sources(different)
        return known[1]

    def _build_cross_call(
        self,
        documents: PackedDocuments,
        source: EncodedSource | None,
        tokens_Bt: Tensor,
        placement: Any,
        head_groups: int,
        cache: PassCache | None,
        chunk: TokenChunk | None,
    ) -> CrossCall | None:
        """Build the pass's cross attention arguments, if it has a source."""
        if source is None:
            return None
        core = self.cores[CROSS]
        if cache is not None and chunk is not None:
            # Every process has the full source, and its documents are the sequences.
            core, placement = LocalAttention(matmul_mode=self.execution.matmul_mode), None
            documents = PackedDocuments.of_lengths(cache.tokens_per_source(chunk))
        return cross_call(self.config, core, documents, source, tokens_Bt, placement, head_groups)

    def _pass_cores(self, config: ModelConfig, chunk: TokenChunk | None) -> dict[Mixer, PassCore]:
        """Return the core for each mixer in a stack."""
        cores = {mixer: self.cores[mixer.core] for mixer in mixers_of(config)}
        if chunk is not None and chunk.sequences:
            return {mixer: SequencesCore(core, chunk.sequences) for mixer, core in cores.items()}
        return {**cores}

    def _build_moe_call(
        self,
        training_pass: TrainingPass,
        random: Random,
        num_documents: int,
        stats_documents_Bt: Tensor | None,
        chunk: TokenChunk | None,
    ) -> MoECall:
        """Build the arguments for all expert layers; router statistics cover ``stats_documents_Bt``."""
        execution, dispatcher = self.execution, self.dispatcher
        if chunk is not None and chunk.is_replicated:
            dispatcher = dispatcher.of_replicated()
        recompute = execution.recompute_experts
        if not torch.is_grad_enabled():
            recompute = "all"  # without backward, experts save no activations
        return MoECall(
            ExpertRun(
                dispatcher,
                tile_tokens=execution.expert_tile_tokens,
                recompute=recompute,
                matmul_mode=execution.matmul_mode,
            ),
            documents_Bt=stats_documents_Bt,
            num_documents=num_documents,
            jitter=random.jitter,
            capacity=random.capacity,
            replay=training_pass.replay,
        )

    def _build_host_store(
        self,
        config: ModelConfig,
        tokens_Bt: Tensor,
        tables: Sequence[RotaryTable | None],
        source: EncodedSource | None,
    ) -> HostStore | None:
        """Build the host store for tensors that layers save for backward; None keeps them on the device."""
        if self.execution.store != "host" or not torch.is_grad_enabled():
            return None
        shared = [x for table in tables if table is not None for x in table.tensors()]
        if source is not None:
            shared.append(source.hidden_BsM)
        # A tensor under one byte per token does not grow with the row: moving it costs more than keeping it.
        return HostStore(AsyncCopies(tokens_Bt.device), config.depth, least_bytes=tokens_Bt.numel(), shared=shared)

    def _region_runner(self, cache: PassCache | None) -> RegionRunner:
        """Return the function that calls blocks' parts: compiled in training only."""
        # Evaluation has other lengths and generation few tokens: compiling would not pay off.
        if cache is not None or not torch.is_grad_enabled():
            return call_function
        return self.run_region

    def _before_head(self, norm: nn.Module | None = None) -> nn.Module | None:
        """Return the modules before the output matrix: the last ``norm``, by default the model's, and the transform."""
        parts = [part for part in (norm or self.model.norm, self.lm_head.transform) if part is not None]
        if len(parts) > 1:
            return nn.Sequential(*parts)
        return next(iter(parts), None)


def stream_arguments(stream: Stream) -> dict[str, Any]:
    """Return the ``Decoder.forward`` arguments that describe a stream, except ids, positions and documents."""
    names = ("document_ids", "row_tokens", "placement", "segments", "pixels")
    return {name: getattr(stream, name) for name in names}
