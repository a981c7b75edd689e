"""``build_run``: everything of a run that is built once, before its first step."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_pipeline.loader import Loader, ValidationLoader, build_loader, build_validation_loader, held_out_of
from data_pipeline.mixture.file import is_mixture
from data_pipeline.shards.manifest import VALIDATION_FOLDER
from data_pipeline.shards.reader import ShardSet, open_for_model
from data_pipeline.stores.urls import below, locate
from launcher.checkpoint.load import load_checkpoint, load_weights
from launcher.checkpoint.tokenizers import check_same_data, check_same_tokenizer, uncompared_files
from launcher.cluster.stopping import Stop
from launcher.config.lockstep import in_lockstep
from launcher.config.resolve import Choice, Data, Machine, resolve, settle
from launcher.config.resolved import AUTO, ResolvedConfig
from launcher.config.sections import DataSection, RunConfig
from launcher.config.side_by_side import padded_documents
from launcher.config.zero import zero_options
from launcher.metrics.throughput import training_flops
from launcher.metrics.trackers.thread import check_trackers
from launcher.plan.memory import check_memory, free_bytes, memory_of_rank
from launcher.plan.world import World
from launcher.run_folder import LOGS, hold_folder, prepare_folder, start_logging
from launcher.training.data_check import check_data
from launcher.training.data_fetch import fetch_data
from launcher.training.history import History
from launcher.training.machine import device_of_ranks, machine_of_ranks
from launcher.training.model import build_causal_lm, build_layout
from launcher.training.origin import Kind, Origin, converted, find_origin, hf_type
from launcher.training.planned import Expected, check_planned_memory, expect
from launcher.training.routing_files import RoutingFiles
from launcher.training.run import Progress, Run
from launcher.training.summary import Start, summary, warnings
from launcher.training.swap_folder import check_swap_folders
from longctx.config import ModelConfig
from longctx.conversion.companions import read_notices
from longctx.errors import ConfigError
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.load import has_tokenizer
from parallel.comm.world import on_every_rank, on_rank_0
from parallel.mesh import Mesh
from parallel.runtime.device import device_name
from parallel.runtime.watch.spans import begin
from parallel.schedule.degrees import Degrees, degrees_of
from parallel.zero.cpu_adam import compile_cpu_adam
from parallel.zero.engine import ZeroEngine
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.options import check_device

log = logging.getLogger(__name__)


def build_run(asked: RunConfig, device: torch.device, stop: Stop | None = None) -> Run:
    """Resolve what was asked for, check and build everything; every rank alike. The process group must be up.

    Without a ``stop`` nothing asks the run to end before its last step.
    Collective. What a resumed run did after its checkpoint is still in the folder: ``Trainer.train`` sets it aside.
    """
    machine = device_of_ranks(device)
    settled = settle(asked, machine)
    # The leanest that it may come to: nothing is known of the data yet, and of the memory only what a run is sure of.
    config = resolve(settled, replace(machine, fits=lambda _: False), Data(is_packed=True))
    model, parallel = config.model.config(), config.parallel
    mesh = Mesh.build(
        context=parallel.context,
        ulysses=parallel.ulysses,
        expert=parallel.expert,
        check_rows=parallel.check_rows == "on",
    )
    check_device(zero_options(config.zero), device.type)
    on_every_rank(lambda: check_memory(config, model, mesh.world_size, mesh.ranks_per_node, device))
    folder = on_every_rank(lambda: prepare_folder(config))
    on_rank_0(lambda: hold_folder(folder))
    start_logging(folder, mesh.rank)
    log.info("Every rank's log: %s/rank_N.log", folder / LOGS)
    on_every_rank(lambda: check_swap_folders(config, model, mesh.world_size, mesh.ranks_per_node))
    on_rank_0(lambda: check_trackers(config.run.trackers))
    if config.zero.offload != "none":
        on_every_rank(compile_cpu_adam)

    begin("opening the data")
    # Before anything is allocated: what the run goes on from, and what it reads.
    origin = find_origin(config, model, folder)
    loader, validation = on_every_rank(lambda: _open_data(config, model, mesh, origin.kind))
    _check_data(config, loader, validation)
    tokenizer_files = on_every_rank(lambda: _tokenizer_files(origin.folder, loader, validation, mesh))
    on_every_rank(lambda: _take_order(origin, loader, config.data))
    machine = machine_of_ranks(machine, settled, mesh, device)
    # Rank 0 for all: a profile that was measured lies in its working folder.
    config, choices = on_rank_0(lambda: _resolved(settled, machine, loader, has_held_out=validation is not None))
    for choice in choices:
        say_choice(choice)
    # The others wait: rank 0 alone needs a first block of rows now.
    expected = on_rank_0(lambda: _say_start(config, model, device, origin, loader, mesh=mesh))
    origin = converted(origin, folder)

    begin("building the model")
    # Allocates the model: from here on an error costs the start-up time of every rank.
    engine = build_engine(config, mesh, accumulation=loader.micro_batches_per_step)
    progress = Progress()
    begin("setting the weights", disk=True)
    if origin.kind == "resumed":
        progress = _resume(origin, engine, model)
    elif origin.kind == "started":
        _start(origin, engine, model)
    else:
        engine.initialize(config.run.seed)

    # Last, because only now the steps that this process takes are known.
    goes_on = origin.kind == "resumed" or origin.begins_again
    routing = _open_routing(config, model, first_step=progress.step + 1, resumes=goes_on)
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
        origin=origin.kind,
        begins_again=origin.begins_again,
        model_type=hf_type(origin),
        progress=progress,
        tokenizer_files=tokenizer_files,
        expected=expected,
        stop=stop or Stop(),
    )


def _resolved(
    settled: RunConfig, machine: Machine, loader: Loader, *, has_held_out: bool
) -> tuple[ResolvedConfig, list[Choice]]:
    """The config of the run, and what was chosen for it."""
    choices: list[Choice] = []
    # Lengths of documents are read for the layout alone.
    is_packed = settled.parallel.layout == AUTO and leaves_remainders(loader.folders, settled.data.seq_len)
    data = Data(is_packed=is_packed, has_held_out=has_held_out, name=str(settled.data.train))
    return resolve(settled, machine, data, say=choices.append), choices


def say_choice(choice: Choice) -> None:
    """Log what a step of ``resolve`` chose, and why."""
    level = logging.INFO
    if choice.is_warning:
        level = logging.WARNING
    log.log(level, "%s", choice.why)


def _say_start(
    config: ResolvedConfig,
    model: ModelConfig,
    device: torch.device,
    origin: Origin,
    loader: Loader,
    *,
    mesh: Mesh,
) -> Expected:
    """Log what the run is, what it may not have meant, and what it will take; ConfigError where it has less memory."""
    start = Start(
        config=config,
        model=model,
        mesh=mesh,
        device=device_name(device),
        origin=origin,
        memory=memory_of_rank(config, model, mesh.world_size),
        free_bytes=free_bytes(device),
        free_disk_bytes=shutil.disk_usage(config.run.output_dir).free,
        packing=loader.pack_report(),
        forecast=loader.forecast(max(0, config.last_step - origin.step)),
        degrees=first_degrees(config, mesh, loader),
    )
    for line in summary(start):
        log.info("%s", line)
    for line in warnings(start):
        log.warning("%s", line)
    expected = expect(
        config,
        World(ranks=mesh.world_size, ranks_per_node=mesh.ranks_per_node),
        padded_documents(config, loader.next_documents()[0]),
        device_name=device_name(device),
        steps=start.num_steps,
    )
    check_planned_memory(config, expected, ranks_here=mesh.ranks_per_node, free_bytes=start.free_bytes)
    log.info("%s", expected.line())
    return expected


def first_degrees(config: ResolvedConfig, mesh: Mesh, loader: Loader) -> list[Degrees]:
    """How the micro-batches of the next step come to lie on this rank's group; none where the degree is fixed."""
    if not config.parallel.tokens_per_rank:
        return []
    found = []
    for documents in loader.next_documents():
        padded = padded_documents(config, documents)
        found.append(degrees_of(build_layout(config, mesh, padded), padded))
    return found


def _open_data(
    config: ResolvedConfig, model: ModelConfig, mesh: Mesh, origin: Kind
) -> tuple[Loader, ValidationLoader | None]:
    """The loaders of the training data and of the validation data; ConfigError when the model has too few tokens."""
    common: dict[str, Any] = {
        "seq_len": config.data.seq_len,
        "micro_batch_rows": config.train.micro_batch_rows,
        "data_rank": mesh.data_rank,
        "data_degree": mesh.data,
    }
    # What has to be read whole is not read here, by every rank: ``check_data`` deals the files out.
    opening: dict[str, Any] = {"verify": config.data.verify != "off", "cache": config.data.cache}
    open_folder = partial(ShardSet.open, **opening)
    if origin != "new":
        open_folder = partial(open_for_model, vocab_size=model.vocab_size, **opening)
    # Ranks of one context group get the same rows: each cuts its own shard out of them (``Run.shard_batch``).
    cost = None
    if config.data.balance:
        cost = partial(training_flops, model)
    loader = build_loader(
        config.data.train,
        rows_per_step=config.rows_per_step,
        seed=config.run.seed,
        packing=config.packing,
        cost=cost,
        lockstep=in_lockstep(config),
        open_folder=open_folder,
        **common,
    )
    vocab_size = loader.shards.manifest.vocab_size
    if vocab_size > model.vocab_size and origin == "new":
        raise ConfigError(
            f"data.train={config.data.train!r} holds token ids below {vocab_size}, but "
            f"model.vocab_size={model.vocab_size}.\nTry --model.vocab_size {vocab_size}."
        )
    validation, held_out = _validation_data(config.data)
    if not config.validation.rows or validation is None:
        return loader, None
    options = {"even": config.parallel.tokens_per_rank > 0, "open_folder": open_folder, "held_out": held_out}
    return loader, build_validation_loader(validation, max_rows=config.validation.rows, **options, **common)


def _validation_data(data: DataSection) -> tuple[str | Path | None, bool]:
    """The folder or mixture to validate on, None where there is none; and whether it is what the mixture holds out."""
    if data.validation:
        return data.validation, False
    if is_mixture(data.train):
        if held_out_of(data.train).sources:
            return data.train, True
        return None, False
    folder = below(data.train, VALIDATION_FOLDER)
    if locate(folder).exists():
        return folder, False
    return None, False


def _check_data(config: ResolvedConfig, loader: Loader, validation: ValidationLoader | None) -> None:
    """Read the files that data.verify asks for; the log says how much that was. Collective.

    What is not here yet is fetched first.
    """
    folders = _all_folders(loader, validation)
    fetch_data(folders)
    checked = check_data(folders, config.data.verify)
    log.info(
        "data.verify=%s: %d shards (%.1f GB); read here against their checksums: %d (%.1f GB).",
        config.data.verify,
        checked.files,
        checked.bytes / 1e9,
        checked.read_files,
        checked.read_bytes / 1e9,
    )
    if checked.without_sums:
        log.info(
            "Built by a release without sums of blocks: %s. What a run reads there cannot be checked as it is read, so "
            "the files are read before the first step, as with data.verify=start. Build the data again to change that.",
            " and ".join(checked.without_sums),
        )


def _take_order(origin: Origin, loader: Loader, data: DataSection) -> None:
    """Let the loader go on where the checkpoint's stood; DataError where it cannot."""
    if origin.order is not None:
        loader.load_state_dict(origin.order)


def _all_folders(loader: Loader, validation: ValidationLoader | None) -> list[ShardSet]:
    """The shard folders of training and validation."""
    folders = list(loader.folders)
    if validation is not None:
        folders += validation.folders
    return folders


def _tokenizer_files(
    origin: Path | None, loader: Loader, validation: ValidationLoader | None, mesh: Mesh
) -> dict[str, bytes]:
    """The tokenizer's files for the run's checkpoints, read by rank 0 alone.

    They are those of the checkpoint that it goes on from (a chat template among them, and licences), else the data's.
    DataError unless checkpoint and data have one tokenizer; the log says where there is none to compare with.
    """
    if mesh.rank != 0:
        return {}
    if validation is not None:
        check_same_data(loader.shards, validation.shards)
    if origin is None:
        return loader.shards.tokenizer().files
    # A licence goes where the weights go; a model card would describe the model before training.
    notices = read_notices(origin)
    if has_tokenizer(origin):
        check_same_tokenizer(origin, loader.shards)
        return load_tokenizer(origin).files | notices
    return uncompared_files(origin, loader.shards.tokenizer()) | notices


_LOOKED_AT = 1 << 16
"""Documents whose lengths are looked at where the manifest does not tell whether rows are packed."""


def leaves_remainders(folders: Sequence[ShardSet], seq_len: int) -> bool:
    """Whether some document is no multiple of a row: what remains of it shares one with others, or with padding.

    A function of the data alone, so a run that resumes gets the same answer. A folder whose first documents fill whole
    rows is taken to be cut for this length all through: to look at every document would take a start as long as there
    are documents. Were that wrong, the layout would be slower, no more.
    """
    # Of a mixture, one source is enough: its rows are laid out as all others are.
    return any(_leaves_remainders(shards, seq_len) for shards in folders)


def _leaves_remainders(shards: ShardSet, seq_len: int) -> bool:
    if sum(entry.tokens for entry in shards.manifest.shards) % seq_len:
        return True
    longest = [2 ** (int(power.removeprefix("2^")) + 1) - 1 for power in shards.manifest.length_histogram]
    if min(longest, default=seq_len) < seq_len:
        return True
    first = shards.lengths_of(np.arange(min(shards.num_documents, _LOOKED_AT)))
    return bool((first % seq_len).any())


def build_engine(config: ResolvedConfig, mesh: Mesh, *, accumulation: int) -> ZeroEngine:
    """The model over the mesh's ranks, under ZeRO; its weights are unset."""
    train = config.train
    options = OptimizerOptions(
        betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay, clip_norm=train.clip_norm
    )
    return ZeroEngine(
        build_causal_lm(config, mesh),
        stage=config.zero.stage,
        dtype=config.dtype,
        accumulation=accumulation,
        options=options,
        zero=zero_options(config.zero),
    )


def _resume(origin: Origin, engine: ZeroEngine, model: ModelConfig) -> Progress:
    """Take weights and moments from a checkpoint; returns where its run stood. Collective."""
    assert origin.folder is not None
    training = load_checkpoint(origin.folder, engine, model).manifest["training"]
    load_LE = None
    if training.get("expert_load"):
        load_LE = torch.tensor(training["expert_load"])
    log.info("Resumed from %s at step %d.", origin.folder, origin.step)
    due = bool(training.get("validation_due", False))
    return Progress(step=origin.step, expert_load_LE=load_LE, history=History.of(training), validation_due=due)


def _start(origin: Origin, engine: ZeroEngine, model: ModelConfig) -> None:
    """Take a checkpoint's weights and nothing else. Collective."""
    assert origin.folder is not None
    load_weights(origin.folder, engine, model)
    log.info("Started from the weights of %s.", origin.folder)


def _open_routing(config: ResolvedConfig, model: ModelConfig, *, first_step: int, resumes: bool) -> RoutingFiles:
    """The files that the run's routing is recorded in and replayed from. Collective."""
    train = config.train
    routing = RoutingFiles(train.record_routing, train.replay_routing, model, train.tokens_per_step)
    on_every_rank(lambda: routing.prepare(range(first_step, config.last_step + 1), resumes=resumes))
    return routing
