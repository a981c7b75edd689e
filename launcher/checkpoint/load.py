"""Load a checkpoint into the engine, once its files and its model are checked."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from launcher.config.model import MAY_CHANGE, fixed_differences, model_changes
from longctx.checkpoint_format import (
    ROLES,
    CheckpointReader,
    model_config,
)
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from parallel.runtime.process import on_every_rank

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.engine import ZeroEngine


def load_checkpoint(folder: Path, engine: ZeroEngine, model: ModelConfig) -> CheckpointReader:
    """Load weights and moments into the engine; returns the reader, whose manifest has the rest. Collective.

    Every file's hash is checked first, each rank checking some of the files. CheckpointError on all ranks when the
    checkpoint is damaged or is of another model.
    """

    def read_and_check() -> CheckpointReader:
        # From cheap to expensive: the manifest, then shapes, then every byte.
        reader = CheckpointReader(folder)
        check_model(reader, model)
        _check_shapes(reader, engine)
        _check_files(reader, "Try --run.resume newest-good, which passes damaged ones over.")
        return reader

    # All ranks agree that it is whole before any weight changes.
    reader = on_every_rank(read_and_check)
    # Each rank reads the ranges that it owns, whatever world and ZeRO stage wrote them. Imported and upcycled
    # checkpoints have weights alone.
    engine.load(reader.read_range, step=_optimizer_steps(reader), moments=set(ROLES) <= set(reader.roles))
    reader.close()
    return reader


def load_weights(folder: Path, engine: ZeroEngine, model: ModelConfig) -> None:
    """Load weights alone: the optimiser starts afresh, at step 0. Collective.

    Checked like ``load_checkpoint``, except that ``model`` may reach further than the checkpoint's does: ``rope`` (how
    positions are stretched, not which channels are rotated), ``max_positions`` and ``window`` may be others.
    """

    def read_and_check() -> CheckpointReader:
        reader = CheckpointReader(folder)
        check_start(reader, model)
        _check_shapes(reader, engine)
        _check_files(reader, "Copy or convert it again, or start from another one.")
        return reader

    reader = on_every_rank(read_and_check)
    engine.load(reader.read_range, step=0, moments=False)
    reader.close()


def check_model(reader: CheckpointReader, model: ModelConfig) -> None:
    """CheckpointError unless the checkpoint's model and the run's are the same function of the same weights."""
    differing = model_config(reader).differences(model)
    if differing:
        raise CheckpointError(
            f"{_of_another_model(reader, model, differing)}\nResume with the config.toml of the run's folder; or with "
            "--model.preset none and no fields of a model, which are the checkpoint's then."
        )


def check_start(reader: CheckpointReader, model: ModelConfig) -> None:
    """Beyond what training alone reads, only how far positions reach may change."""
    differing = fixed_differences(model_config(reader), model)
    if differing:
        raise CheckpointError(f"{_of_another_model(reader, model, differing)}\n{MAY_CHANGE}")


def _optimizer_steps(reader: CheckpointReader) -> int:
    """Steps that the optimiser has taken: fewer than the run's where some were left out."""
    # Earlier releases left out none, and did not say.
    taken = reader.manifest["training"].get("optimizer_steps", reader.step)
    if type(taken) is not int or not 0 <= taken <= reader.step:
        raise CheckpointError(
            f"{reader.folder}: optimizer_steps={taken!r} must be a number from 0 to {reader.step}. Use another one."
        )
    return taken


def _of_another_model(reader: CheckpointReader, model: ModelConfig, differing: Collection[str]) -> str:
    """The message about fields that differ, one a line; of rope its own keys."""
    lines = [f"{reader.folder} is of another model:"]
    for name, (theirs, ours) in model_changes(model_config(reader), model).items():
        if name in differing or name.partition(".")[0] in differing:
            lines.append(f"  model.{name}: checkpoint {theirs!r}, run {ours!r}")
    return "\n".join(lines)


def _check_shapes(reader: CheckpointReader, engine: ZeroEngine) -> None:
    """CheckpointError unless the checkpoint's tensors are the engine's, by name and shape."""
    shapes = {name: tuple(shape) for name, shape in engine.shapes.items()}
    stored = {name: reader.shape(name) for name in reader.names()}
    if shapes != stored:
        wrong = sorted(set(shapes.items()) ^ set(stored.items()))[:6]
        raise CheckpointError(f"{reader.folder} holds other tensors than the model: {wrong}.")


def _check_files(reader: CheckpointReader, advice: str) -> None:
    """CheckpointError unless this rank's part of the files is whole."""
    names = sorted(reader.manifest["files"])[dist.get_rank() :: dist.get_world_size()]
    if problems := reader.verify(names):
        raise CheckpointError(f"{reader.folder}: {'; '.join(problems)}.\n{advice}")
