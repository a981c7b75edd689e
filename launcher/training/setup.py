"""``build_run``: build all parts of a run once, before its first step."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from data_pipeline.loader import Loader
from launcher.checkpoint.load import load_checkpoint, load_weights
from launcher.cluster.stopping import Stop
from launcher.config.resolve import Choice, Data, Machine, resolve, settle
from launcher.config.resolved import AUTO, ResolvedConfig
from launcher.config.sections import RunConfig
from launcher.config.zero import zero_options
from launcher.training.data import leaves_remainders, open_data
from launcher.training.history import History
from launcher.training.machine import device_of_ranks, machine_of_ranks
from launcher.training.model import build_task
from launcher.training.origin import Origin, carried_by, converted, find_origin, hf_type
from launcher.training.place import prepare_place
from launcher.training.routing_files import RoutingFiles
from launcher.training.run import Progress, Run
from launcher.training.start import say_choice, say_start
from longctx.config import ModelConfig
from parallel.comm.world import on_every_rank, on_rank_0
from parallel.mesh import Mesh
from parallel.runtime.spans import begin
from parallel.zero.engine import ZeroEngine
from parallel.zero.optimizer import OptimizerOptions


def build_run(asked: RunConfig, device: torch.device, stop: Stop | None = None) -> Run:
    """Resolve the config, check and build everything, on all ranks. Requires a process group. Collective.

    Without ``stop`` the run cannot be asked to end before its last step. If it resumes, results after its checkpoint
    are still in the folder: ``Trainer.train`` sets them aside.
    """
    machine = device_of_ranks(device)
    settled = settle(asked, machine)
    # The leanest possible result: data and free memory are still unknown, so assume packed rows, and that no larger
    # setting fits.
    config = resolve(settled, replace(machine, fits=lambda _: False), Data(is_packed=True))
    model, parallel = config.model.config(), config.parallel
    mesh = Mesh.build(
        context=parallel.context,
        ulysses=parallel.ulysses,
        expert=parallel.expert,
        check_rows=parallel.check_rows == "on",
    )
    folder = prepare_place(config, model, mesh, device)

    begin("opening the data")
    # Before any allocation: find the run's origin and its data.
    origin = find_origin(config, model, folder)
    loader, validation, tokenizer_files = open_data(config, model, mesh, origin)
    machine = machine_of_ranks(machine, settled, mesh, device)
    # Rank 0 decides for all: a measured profile is in its working folder.
    config, choices = on_rank_0(lambda: _resolved(settled, machine, loader, has_held_out=validation is not None))
    for choice in choices:
        say_choice(choice)
    # The others wait: only rank 0 needs a first block of rows now.
    expected = on_rank_0(lambda: say_start(config, model, device, origin, loader, mesh=mesh))
    origin = converted(origin, folder)
    carried = None
    if mesh.rank == 0:
        carried = carried_by(origin)

    begin("building the model")
    # Allocates the model: from here on, an error costs every rank its start-up time.
    engine = build_engine(config, mesh, accumulation=loader.micro_batches_per_step)
    begin("setting the weights", disk=True)
    progress = set_weights(origin, engine, model, seed=config.run.seed)

    # Last, because this process's steps are only known now.
    train = config.train
    routing = RoutingFiles(train.record_routing, train.replay_routing, model, train.tokens_per_step)
    steps = range(progress.step + 1, config.last_step + 1)
    on_every_rank(lambda: routing.prepare(steps, resumes=origin.goes_on))
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
        model_type=hf_type(origin),
        progress=progress,
        tokenizer_files=tokenizer_files,
        carried=carried,
        expected=expected,
        stop=stop or Stop(),
    )


def _resolved(
    settled: RunConfig, machine: Machine, loader: Loader, *, has_held_out: bool
) -> tuple[ResolvedConfig, list[Choice]]:
    choices: list[Choice] = []
    # Document lengths are only read to choose the layout.
    is_packed = settled.parallel.layout == AUTO and leaves_remainders(loader.folders, settled.data.seq_len)
    data = Data(is_packed=is_packed, has_held_out=has_held_out, name=str(settled.data.train))
    return resolve(settled, machine, data, say=choices.append), choices


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


def set_weights(origin: Origin, engine: ZeroEngine, model: ModelConfig, *, seed: int) -> Progress:
    """Set the weights: from a run's checkpoint with its moments, from other weights, or at random. Collective.

    Return the run's progress.
    """
    if origin.kind == "resumed":
        return _resume(origin, engine, model)
    if origin.kind == "started":
        _start(origin, engine, model)
    else:
        engine.initialize(seed)
    return Progress()


def _resume(origin: Origin, engine: ZeroEngine, model: ModelConfig) -> Progress:
    """Load weights and moments from a checkpoint; return its run's progress. Collective."""
    assert origin.folder is not None
    training = load_checkpoint(origin.folder, engine, model).manifest["training"]
    load_LE = None
    if training.get("expert_load"):
        load_LE = torch.tensor(training["expert_load"])
    log.info("Resumed from %s at step %d.", origin.folder, origin.step)
    due = bool(training.get("validation_due", False))
    return Progress(step=origin.step, expert_load_LE=load_LE, history=History.of(training), validation_due=due)


def _start(origin: Origin, engine: ZeroEngine, model: ModelConfig) -> None:
    assert origin.folder is not None
    load_weights(origin.folder, engine, model)
    log.info("Started from the weights of %s.", origin.folder)
