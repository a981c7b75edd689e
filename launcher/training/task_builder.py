"""Build a run's module from its config, for ``pretrain`` to train and ``plan --trace`` to trace."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch

from data_pipeline.rows.row_batches import Share
from launcher.config.resolved import ResolvedConfig
from launcher.config.tokens_per_rank_rules import padded_tokens
from longctx.batch import IGNORED_TARGET, PackedDocuments, Stream
from longctx.model.experts.dispatch import TokenDispatcher
from longctx.model.training_pass import Execution
from longctx.objectives.build import Objective
from longctx.objectives.task import Task
from longctx.preference_options import PreferenceOptions
from parallel.layout.sequence import SequenceLayout, num_parts
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model


def build_task(
    config: ResolvedConfig, mesh: Mesh, *, dispatcher: TokenDispatcher | None = None, device: str = "meta"
) -> Task:
    """Build the decoder over the mesh's ranks, and its objective, on ``device``, without initializing weights.

    ``dispatcher`` defaults to the mesh's.
    """
    train, parallel = config.train, config.parallel
    communication_dtype = None
    if parallel.communication_dtype != "float32":
        communication_dtype = getattr(torch, parallel.communication_dtype)
    return build_parallel_model(
        config.model.config(),
        mesh,
        layout=parallel.layout,
        kernel=parallel.kernel,
        transport=parallel.transport,
        communication_dtype=communication_dtype,
        deterministic=parallel.deterministic,
        execution=Execution(
            keep=train.keep,
            store=train.store,
            store_path=train.store_path,
            chunk_tokens=config.train.chunk_tokens,
            head_groups=train.head_groups,
            recompute_experts=train.recompute_experts,
            expert_tile_tokens=config.parallel.expert_tile_tokens,
            matmul_mode=train.products,
            compiler=compiler_of(config),
        ),
        dispatcher=dispatcher,
        objective=objective_of(config),
        # Weights come later, from a checkpoint or from the engine.
        seed=None,
        device=device,
    )


def objective_of(config: ResolvedConfig) -> Objective:
    """Return the training objective for a run's network."""
    train, preference = config.train, config.preference
    return Objective(
        train.objective,
        z_loss=train.z_loss,
        label_smoothing=train.label_smoothing,
        mtp_weight=train.mtp_weight,
        class_weight=train.class_weight,
        preference=PreferenceOptions(
            loss=preference.loss,
            beta=preference.beta,
            margin=preference.margin,
            nll_weight=preference.nll_weight,
            desirable_weight=preference.desirable_weight,
            undesirable_weight=preference.undesirable_weight,
        ),
    )


def batch_layout(
    config: ResolvedConfig, mesh: Mesh, documents: PackedDocuments, *, of_source: bool = False
) -> SequenceLayout:
    """Build the layout for a micro-batch's tokens, or for its source's; ``config`` has its layout resolved."""
    # An encoder is not causal.
    kind, causal = config.parallel.layout, config.model.config().causal and not of_source
    return SequenceLayout.build(kind, documents.num_tokens, mesh.context, documents, mesh.ulysses, causal=causal)


def share_of(documents: PackedDocuments, config: ResolvedConfig, mesh: Mesh, *, of_source: bool = False) -> Share:
    """Return this rank's shard of a micro-batch's tokens with these documents, or of its source's.

    ``config`` has its layout resolved.
    """
    # Concatenated rows need not divide by the rank count, nor do sources, so they are padded.
    padded = documents.padded(_num_padded(documents.num_tokens, config, of_source=of_source))
    layout = batch_layout(config, mesh, padded, of_source=of_source)
    # Attention is planned from the same layout, so it is passed along with the tokens.
    return Share(padded, layout.rank_runs(mesh.context_rank), layout)


def _num_padded(num_tokens: int, config: ResolvedConfig, *, of_source: bool) -> int:
    """Return the token count in a micro-batch, or in its source, once padded for its ranks."""
    if not of_source:
        return padded_tokens(config, num_tokens)
    parallel = config.parallel
    parts = num_parts(parallel.layout, parallel.context, parallel.ulysses)
    return -(-num_tokens // parts) * parts


Tokens = TypeVar("Tokens", bound=Stream)


def shard_batch(batch: Tokens, config: ResolvedConfig, mesh: Mesh) -> Tokens:
    """Return this rank's tokens from a full micro-batch that did not come from a loader; they stay on the CPU.

    A stream becomes a batch afterwards: an objective's ``prepare`` sees one rank's tokens.
    """
    source = batch.source
    batch = _split(batch, config, mesh)
    if source is not None:
        source = _split(source, config, mesh, of_source=True)
    return dataclasses.replace(batch, source=source)


def _split(stream: Tokens, config: ResolvedConfig, mesh: Mesh, *, of_source: bool = False) -> Tokens:
    stream = stream.padded(_num_padded(stream.documents.num_tokens, config, of_source=of_source))
    layout = batch_layout(config, mesh, stream.documents, of_source=of_source)
    shard = stream.map_tokens(lambda x: layout.split(x, mesh.context_rank, 1))
    label_indices = None
    if shard.labels is not None:
        # On a device the host would wait for them.
        label_indices = (shard.labels.flatten() != IGNORED_TARGET).nonzero().flatten()
    return dataclasses.replace(shard, placement=layout, label_indices=label_indices)


def compiler_of(config: ResolvedConfig) -> str | None:
    """Return ``Execution.compiler`` for a config."""
    if config.train.compile == "on":
        return "inductor"
    return None
