"""The model of a run under ZeRO, and the weights that it begins with."""

from __future__ import annotations

import logging

import torch

from launcher.checkpoint.load import load_checkpoint, load_weights
from launcher.config.resolved import ResolvedConfig
from launcher.config.zero import zero_options
from launcher.training.history import History
from launcher.training.model import build_task
from launcher.training.origin import Origin
from launcher.training.run import Progress
from longctx.config import ModelConfig
from parallel.mesh import Mesh
from parallel.zero.engine import ZeroEngine
from parallel.zero.optimizer import OptimizerOptions

log = logging.getLogger(__name__)


def build_engine(config: ResolvedConfig, mesh: Mesh, *, accumulation: int) -> ZeroEngine:
    """Return the model over the mesh's ranks, under ZeRO; its weights are unset."""
    train = config.train
    options = OptimizerOptions(
        betas=(train.beta1, train.beta2), eps=train.eps, weight_decay=train.weight_decay, clip_norm=train.clip_norm
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
    """Set the weights: from a run's checkpoint with its moments, from other weights, or drawn. Collective.

    Returns where the run stands.
    """
    if origin.kind == "resumed":
        return _resume(origin, engine, model)
    if origin.kind == "started":
        _start(origin, engine, model)
    else:
        engine.initialize(seed)
    return Progress()


def _resume(origin: Origin, engine: ZeroEngine, model: ModelConfig) -> Progress:
    """Take weights and moments from a checkpoint; return where its run stood. Collective."""
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
