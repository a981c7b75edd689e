"""``build_run``: everything of a run that is built once, before its first step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from data_pipeline.loader import Loader, ValidationLoader, build_loader, build_validation_loader
from launcher.checkpoint.folder import find_resume, find_start
from launcher.checkpoint.load import load_checkpoint, load_weights
from launcher.checkpoint.tokenizers import check_same_data, check_same_tokenizer
from launcher.config.sections import RunConfig
from launcher.metrics.tensorboard import check_tensorboard
from launcher.run_folder import prepare_folder, start_logging
from launcher.training.expert_record import expert_layers
from launcher.training.routing_files import RoutingFiles
from longctx.batch import Batch
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.processor import fastest_products
from longctx.model.training_pass import Execution
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.load import has_tokenizer
from parallel.layout.select import AUTO, choose_layout
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.runtime.process import broadcast_object, on_every_rank
from parallel.zero.engine import ZeroEngine
from parallel.zero.options import OptimizerOptions

log = logging.getLogger(__name__)

Origin = Literal["new", "resumed", "started"]
"""A run begins with initial weights, goes on from a checkpoint of its own, or takes the weights of another."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands between two steps. Each step returns a new one."""

    step: int = 0
    """Optimiser steps taken."""
    expert_load_LE: Tensor | None = None
    """How many tokens chose each expert in the last step; None before the first, and in a dense model."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the steps of a run share. Built once, by ``build_run``; nothing in it is replaced afterwards."""

    config: RunConfig
    model: ModelConfig
    mesh: Mesh
    device: torch.device
    folder: Path
    loader: Loader
    validation: ValidationLoader | None
    """None where the run never validates."""
    engine: ZeroEngine
    routing: RoutingFiles
    origin: Origin
    progress: Progress
    """Where the run begins."""
    tokenizer_files: dict[str, bytes]
    """What every checkpoint holds of the tokenizer, by name; read by rank 0 alone."""

    @property
    def is_rank_0(self) -> bool:
        """Whether this process writes the run's files and the console."""
        return self.mesh.rank == 0

    @property
    def expert_layers(self) -> list[int]:
        """The layers that have experts: the rows of every tensor with an L axis."""
        return expert_layers(self.model)

    def shard_batch(self, batch: Batch) -> Batch:
        """This rank's tokens of a micro-batch, where the batch is: on the CPU."""
        mesh, documents = self.mesh, batch.documents
        layout = SequenceLayout.build(
            self.config.parallel.layout, documents.num_tokens, mesh.context, documents, mesh.ulysses
        )
        # The plans of attention start from the same layout: it travels with the batch.
        shard = batch.flatten_rows().map_tokens(lambda x: layout.split(x, mesh.context_rank, 1))
        return replace(shard, placement=layout)

    def first_token(self, micro_batch: int) -> int:
        """The index, among all tokens of a step, of the first one of this rank's micro-batch."""
        # The loader gives micro-batch after micro-batch, and within one the data ranks in order.
        row = (micro_batch * self.mesh.data + self.mesh.data_rank) * self.config.train.micro_batch_rows
        return row * self.config.data.seq_len

    def token_indices(self, shards: Sequence[Batch]) -> list[Tensor]:
        """For each of a step's micro-batches the indices, among all tokens of the step, of those on this rank."""
        rank = self.mesh.context_rank
        return [self.first_token(number) + shard.placement.indices(rank) for number, shard in enumerate(shards)]


def build_run(config: RunConfig, device: torch.device) -> Run:
    """Check and build everything; every rank alike. The process group must be up.

    Collective. What a resumed run did after its checkpoint is still in the folder: ``Trainer.train`` sets it aside.
    """
    model, parallel = config.model.config(), config.parallel
    mesh = Mesh.build(context=parallel.context, ulysses=parallel.ulysses, expert=parallel.expert)
    folder = on_every_rank(lambda: prepare_folder(config))
    start_logging(folder, mesh.rank)
    on_every_rank(check_tensorboard)

    # Before anything is allocated: what the run goes on from, and what it reads.
    resume_from, start_from = _find_origin(config, folder, mesh)
    loader, validation = on_every_rank(lambda: _open_data(config, model, mesh))
    on_every_rank(lambda: _check_tokenizers(resume_from or start_from, loader, validation, is_rank_0=mesh.rank == 0))
    tokenizer_files = on_every_rank(lambda: _tokenizer_files(resume_from or start_from, loader, mesh))
    config = settle_layout(config, model, loader)

    # Allocates the model: from here on an error costs the start-up time of every rank.
    engine = _build_engine(config, model, mesh, accumulation=loader.micro_batches_per_step)
    origin, progress = "new", Progress()
    if resume_from is not None:
        origin, progress = "resumed", _resume(resume_from, engine, model, loader)
    elif start_from is not None:
        origin = "started"
        _start(start_from, engine, model)

    # Last, because only now the steps that this process takes are known.
    routing = _open_routing(config, model, first_step=progress.step + 1, resumes=origin == "resumed")
    return Run(
        config=config,
        model=model,
        mesh=mesh,
        device=device,
        folder=folder,
        loader=loader,
        validation=validation,
        engine=engine,
        routing=routing,
        origin=origin,
        progress=progress,
        tokenizer_files=tokenizer_files,
    )


def _find_origin(config: RunConfig, folder: Path, mesh: Mesh) -> tuple[Path | None, Path | None]:
    """The checkpoint to resume from, and else the one whose weights to start with. Collective."""

    def find_on_rank_0() -> Path | None:
        # Rank 0 alone looks and hashes; a warning about a checkpoint passed over is then printed once.
        if mesh.rank != 0:
            return None
        return find_resume(folder, config.run.resume)

    resume_from = broadcast_object(on_every_rank(find_on_rank_0))
    if resume_from is not None:
        return resume_from, None
    return None, on_every_rank(lambda: find_start(config.run.start_from))


def _open_data(config: RunConfig, model: ModelConfig, mesh: Mesh) -> tuple[Loader, ValidationLoader | None]:
    """The loaders of the training data and of the validation data; ConfigError when the model has too few tokens."""
    common: dict[str, Any] = {
        "seq_len": config.data.seq_len,
        "micro_batch_rows": config.train.micro_batch_rows,
        "data_rank": mesh.data_rank,
        "data_degree": mesh.data,
    }
    # Ranks of one context group get the same rows: each cuts its own shard out of them (``Run.shard_batch``).
    loader = build_loader(config.data.train, rows_per_step=config.rows_per_step, seed=config.run.seed, **common)
    vocab_size = loader.shards.manifest.vocab_size
    if vocab_size > model.vocab_size:
        raise ConfigError(
            f"data.train={config.data.train!r} holds token ids below {vocab_size}, but "
            f"model.vocab_size={model.vocab_size}.\nTry --model.vocab_size {vocab_size}."
        )
    if not config.validation.rows:
        return loader, None
    return loader, build_validation_loader(config.validation_folder, max_rows=config.validation.rows, **common)


def _check_tokenizers(
    origin: Path | None, loader: Loader, validation: ValidationLoader | None, *, is_rank_0: bool
) -> None:
    """DataError unless checkpoint, training data and validation data have one tokenizer. Rank 0 alone reads it."""
    if not is_rank_0:
        return
    if origin is not None:
        check_same_tokenizer(origin, loader.shards)
    if validation is not None:
        check_same_data(loader.shards, validation.shards)


def _tokenizer_files(origin: Path | None, loader: Loader, mesh: Mesh) -> dict[str, bytes]:
    """The tokenizer's files for the run's checkpoints: those of the checkpoint that it goes on from, else the data's.

    An import may have files that its data was not built with, such as a chat template.
    """
    if mesh.rank != 0:
        return {}
    if origin is not None and has_tokenizer(origin):
        return load_tokenizer(origin).files
    return load_tokenizer(loader.shards.folder).files


def settle_layout(config: RunConfig, model: ModelConfig, loader: Loader) -> RunConfig:
    """The config with ``parallel.layout = "auto"`` replaced by what it comes to; the log says why."""
    parallel = config.parallel
    if parallel.layout != AUTO:
        return config
    # What remains of a document after its whole rows shares a row with others, or with padding. Lengths say so for
    # every epoch, however it is packed: a run that resumes gets the same answer.
    has_remainders = bool((loader.shards.lengths % config.data.seq_len).any())
    layout, reason = choose_layout(
        num_tokens=config.data.seq_len * config.train.micro_batch_rows,
        degree=parallel.context,
        ulysses=parallel.ulysses,
        packed=has_remainders or config.train.micro_batch_rows > 1,
        layers=model.layers,
        window=model.window,
    )
    log.info("parallel.layout=auto is %s: %s.", layout, reason)
    return config.with_layout(layout)


def _build_engine(config: RunConfig, model: ModelConfig, mesh: Mesh, *, accumulation: int) -> ZeroEngine:
    """The model over the mesh's ranks, under ZeRO."""
    train, parallel = config.train, config.parallel
    communication_dtype = None
    if parallel.communication_dtype != "float32":
        communication_dtype = getattr(torch, parallel.communication_dtype)
    products = train.products
    if products == "auto":
        products = fastest_products()
    causal_lm = build_parallel_model(
        model,
        mesh,
        layout=parallel.layout,
        kernel=parallel.kernel,
        transport=parallel.transport,
        communication_dtype=communication_dtype,
        deterministic=parallel.deterministic,
        execution=Execution(train.recompute, train.recompute_experts, parallel.expert_tile_tokens, products),
        z_loss=train.z_loss,
        label_smoothing=train.label_smoothing,
        seed=config.run.seed,
    )
    options = OptimizerOptions(
        betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay, clip_norm=train.clip_norm
    )
    return ZeroEngine(
        causal_lm, stage=config.zero.stage, dtype=config.dtype, accumulation=accumulation, options=options
    )


def _resume(checkpoint: Path, engine: ZeroEngine, model: ModelConfig, loader: Loader) -> Progress:
    """Take weights, moments and data order from a checkpoint; returns where its run stood. Collective."""
    training = load_checkpoint(checkpoint, engine, model).manifest["training"]
    step, load_LE = 0, None
    # A checkpoint that was converted or upcycled has no loader state: it begins at step 0 of this run's data.
    if "loader" in training:
        on_every_rank(lambda: loader.load_state_dict(training["loader"]))
        step = training["step"]
    if training.get("expert_load"):
        load_LE = torch.tensor(training["expert_load"])
    log.info("Resumed from %s at step %d.", checkpoint, step)
    return Progress(step=step, expert_load_LE=load_LE)


def _start(checkpoint: Path, engine: ZeroEngine, model: ModelConfig) -> None:
    """Take a checkpoint's weights and nothing else. Collective."""
    load_weights(checkpoint, engine, model)
    log.info("Started from the weights of %s.", checkpoint)


def _open_routing(config: RunConfig, model: ModelConfig, *, first_step: int, resumes: bool) -> RoutingFiles:
    """The files that the run's routing is recorded in and replayed from. Collective."""
    train = config.train
    routing = RoutingFiles(train.record_routing, train.replay_routing, model, train.tokens_per_step)
    on_every_rank(lambda: routing.prepare(range(first_step, config.last_step + 1), resumes=resumes))
    return routing
