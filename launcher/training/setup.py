"""``build_run``: build all parts of a run once, before its first step."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from data_pipeline.loader import Loader
from launcher.checkpoint.load_checkpoint import load_checkpoint, load_weights
from launcher.cluster.stop_request import StopRequest
from launcher.config.config_sections import RunConfig
from launcher.config.resolve import Choice, Data, TargetMachine, resolve, resolve_without_data
from launcher.config.resolved import AUTO, ResolvedConfig
from launcher.config.zero_section import zero_options
from launcher.training.history import History
from launcher.training.rank_machine import device_of_ranks, machine_of_ranks
from launcher.training.routing_files import RoutingFiles
from launcher.training.run_data import leaves_remainders, open_data
from launcher.training.run_origin import RunOrigin, converted, find_extra_files, find_origin, hf_type
from launcher.training.run_preparation import prepare_run
from launcher.training.run_state import Progress, TrainingRun
from launcher.training.start import say_choice, say_start
from launcher.training.task_builder import build_task
from longctx.config import ModelConfig
from parallel.comm.world import on_every_rank, on_rank_0
from parallel.mesh import Mesh
from parallel.runtime.activity import begin
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine


def build_run(requested: RunConfig, device: torch.device, stop: StopRequest | None = None) -> TrainingRun:
    """Resolve the config, check and build everything, on all ranks. Requires a process group. Collective.

    Without ``stop`` the run cannot be asked to end before its last step. If it resumes, results after its checkpoint
    are still in the folder: ``Trainer.train`` sets them aside.
    """
    machine = device_of_ranks(device)
    resolved = resolve_without_data(requested, machine)
    # The leanest possible result: data and free memory are still unknown, so assume packed rows, and that no larger
    # setting fits.
    config = resolve(resolved, replace(machine, fits=lambda _: False), Data(is_packed=True))
    model, parallel = config.model.config(), config.parallel
    mesh = Mesh.build(
        context=parallel.context,
        ulysses=parallel.ulysses,
        expert=parallel.expert,
        check_rows=parallel.check_rows == "on",
    )
    folder = prepare_run(config, model, mesh, device)

    begin("opening the data")
    # Before any allocation: find the run's origin and its data.
    origin = find_origin(config, model, folder)
    loader, validation, tokenizer_files = open_data(config, model, mesh, origin)
    machine = machine_of_ranks(machine, resolved, mesh, device)
    # Rank 0 decides for all: a measured profile is in its working folder.
    config, choices = on_rank_0(lambda: _resolved(resolved, machine, loader, has_held_out=validation is not None))
    for choice in choices:
        say_choice(choice)
    # The others wait: only rank 0 needs a first epoch block now.
    expected = on_rank_0(lambda: say_start(config, model, device, origin, loader, mesh=mesh))
    origin = converted(origin, folder)
    extra_files = None
    if mesh.rank == 0:
        extra_files = find_extra_files(origin)

    begin("building the model")
    # Allocates the model: from here on, an error costs every rank its start-up time.
    engine = build_engine(config, mesh, accumulation=loader.micro_batches_per_step)
    begin("setting the weights", disk=True)
    progress = set_weights(origin, engine, model, seed=config.run.seed)

    # Last, because this process's steps are only known now.
    train = config.train
    routing = RoutingFiles(train.record_routing, train.replay_routing, model, train.tokens_per_step)
    steps = range(progress.step + 1, config.last_step + 1)
    on_every_rank(lambda: routing.prepare(steps, resumes=origin.continues))
    return TrainingRun(
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
        model_type=hf_type(origin),
        progress=progress,
        tokenizer_files=tokenizer_files,
        extra_files=extra_files,
        expected=expected,
        stop=stop or StopRequest(),
    )


def _resolved(
    resolved: RunConfig, machine: TargetMachine, loader: Loader, *, has_held_out: bool
) -> tuple[ResolvedConfig, list[Choice]]:
    choices: list[Choice] = []
    # Document lengths are only read to choose the layout.
    is_packed = resolved.parallel.layout == AUTO and leaves_remainders(loader.folders, resolved.data.seq_len)
    data = Data(is_packed=is_packed, has_held_out=has_held_out, name=str(resolved.data.train))
    return resolve(resolved, machine, data, say=choices.append), choices


log = logging.getLogger(__name__)


def build_engine(config: ResolvedConfig, mesh: Mesh, *, accumulation: int) -> ZeroEngine:
    """Build the model over the mesh's ranks, under ZeRO, without initializing weights."""
    train = config.train
    options = OptimizerOptions(
        name=train.optimizer,
        momentum=train.momentum,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
        clip_norm=train.clip_norm,
    )
    return ZeroEngine(
        build_task(config, mesh),
        stage=config.zero.stage,
        dtype=config.dtype,
        accumulation=accumulation,
        options=options,
        zero=zero_options(config.zero),
    )


def set_weights(origin: RunOrigin, engine: ZeroEngine, model: ModelConfig, *, seed: int) -> Progress:
    """Set the weights: from a run's checkpoint with its moments, from other weights, or at random. Collective.

    Return the run's progress.
    """
    if origin.kind == "resumed":
        return _resume(origin, engine, model)
    if origin.kind == "started":
        _start(origin, engine, model, seed=seed)
    else:
        engine.initialize(seed)
    return Progress()


def _resume(origin: RunOrigin, engine: ZeroEngine, model: ModelConfig) -> Progress:
    """Load weights and moments from a checkpoint; return its run's progress. Collective."""
    assert origin.folder is not None
    training = load_checkpoint(origin.folder, engine, model).manifest["training"]
    load_LE = None
    if training.get("expert_load"):
        load_LE = torch.tensor(training["expert_load"])
    log.info("Resumed from %s at step %d.", origin.folder, origin.step)
    due = bool(training.get("validation_due", False))
    return Progress(step=origin.step, expert_load_LE=load_LE, history=History.of(training), validation_due=due)


def _start(origin: RunOrigin, engine: ZeroEngine, model: ModelConfig, *, seed: int) -> None:
    assert origin.folder is not None
    load_weights(origin.folder, engine, model, seed=seed)
    log.info("Started from the weights in %s.", origin.folder)
