"""Load a checkpoint into the engine, once its files and its model are checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from launcher.config.model import MAY_CHANGE, fixed_differences, model_changes
from longctx.checkpoint_format import CheckpointReader, model_config
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from parallel.comm.world import num_ranks, on_every_rank, own_rank

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.engine import ZeroEngine


_TRY_ANOTHER = "Try --run.resume newest-good, which passes damaged ones over."
_COPY_AGAIN = "Copy or convert it again, or start from another one."


def load_checkpoint(folder: Path, engine: ZeroEngine, model: ModelConfig) -> CheckpointReader:
    """Load weights and moments into the engine; returns the reader, whose manifest has the rest. Collective.

    Every block is hashed before its values are used. CheckpointError on all ranks when the checkpoint is damaged, and
    the engine is then of no use, or is of another model.
    """

    def check(reader: CheckpointReader) -> None:
        check_model(reader, model)
        _check_optimizer(reader, engine)

    reader = _checked(folder, engine, check, _TRY_ANOTHER)
    # Imported and upcycled checkpoints have weights alone.
    _fill(engine, reader, _TRY_ANOTHER, step=_optimizer_steps(reader), moments=len(reader.roles) > 1)
    return reader


def load_weights(folder: Path, engine: ZeroEngine, model: ModelConfig) -> None:
    """Load weights alone: the optimiser starts afresh, at step 0. Collective.

    Checked like ``load_checkpoint``, except that ``model`` may reach further than the checkpoint's does: ``rope`` (how
    positions are stretched, not which channels are rotated), ``max_positions`` and ``window`` may be others.
    """
    reader = _checked(folder, engine, lambda reader: check_start(reader, model), _COPY_AGAIN)
    _fill(engine, reader, _COPY_AGAIN, step=0, moments=False)


def _checked(
    folder: Path, engine: ZeroEngine, check: Callable[[CheckpointReader], None], advice: str
) -> CheckpointReader:
    """Open a checkpoint; CheckpointError on all ranks unless its manifest, shapes and files are right. Collective."""

    def read_and_check() -> CheckpointReader:
        # From cheap to expensive: the manifest, then shapes, then files.
        reader = CheckpointReader(folder, past_cache=True)
        check(reader)
        _check_shapes(reader, engine)
        _check_files(reader, advice)
        return reader

    return on_every_rank(read_and_check)


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


def check_training(reader: CheckpointReader) -> None:
    """CheckpointError unless what the manifest says of the run can be gone on with; nothing but it is read."""
    training, model = reader.manifest["training"], model_config(reader)
    _optimizer_steps(reader)
    # One that was converted or upcycled has no loader, and begins at step 0.
    if "loader" in training and training.get("step") != reader.step:
        raise CheckpointError(
            f"{reader.folder}: training.step={training.get('step')!r} is not the step {reader.step} of the checkpoint. "
            "Use another one."
        )
    load = training.get("expert_load") or []
    layers = sum(map(model.has_experts, range(model.depth)))
    if load and (len(load), len(load[0])) != (layers, model.num_experts):
        raise CheckpointError(
            f"{reader.folder}: its expert_load is of {len(load)} layers with {len(load[0])} experts, and its model has "
            f"{layers} with {model.num_experts}. Use another one."
        )


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


def _check_optimizer(reader: CheckpointReader, engine: ZeroEngine) -> None:
    """CheckpointError if the moments in a checkpoint are another optimiser's."""
    wanted = engine.roles
    # Tensors of another name are the next check's.
    other = [name for name in reader.names() if name in wanted and reader.roles_of(name) != wanted[name]]
    if len(reader.roles) == 1 or not other:
        return
    name = other[0]
    raise CheckpointError(
        f"{reader.folder} was trained by another optimiser: of {name} it keeps {', '.join(reader.roles_of(name))}, and "
        f"this run needs {', '.join(wanted[name])}.\nSet train.optimizer as it was, or begin with its weights: "
        f"--run.start_from {reader.folder}."
    )


def _check_shapes(reader: CheckpointReader, engine: ZeroEngine) -> None:
    """CheckpointError unless the checkpoint's tensors are the engine's, by name and shape."""
    shapes = {name: tuple(shape) for name, shape in engine.shapes.items()}
    stored = {name: reader.shape(name) for name in reader.names()}
    if shapes != stored:
        wrong = sorted(set(shapes.items()) ^ set(stored.items()))[:6]
        raise CheckpointError(f"{reader.folder} holds other tensors than the model: {wrong}.")


def _check_files(reader: CheckpointReader, advice: str) -> None:
    """CheckpointError unless the checkpoint's files are there, and those whole that are not hashed while they are read.

    Each rank hashes some of these: earlier releases listed no hashes of blocks.
    """
    listed = reader.manifest["files"]
    problems = reader.wrong_sizes()
    if not problems:
        unhashed = sorted(name for name, entry in listed.items() if "blocks" not in entry)
        problems = reader.verify(unhashed[own_rank() :: num_ranks()])
    if problems:
        raise CheckpointError(f"{reader.folder}: {'; '.join(problems)}.\n{advice}")


def _fill(engine: ZeroEngine, reader: CheckpointReader, advice: str, *, step: int, moments: bool) -> None:
    """Fill the engine from a checkpoint; each rank reads the ranges that it owns, whatever ranks and stage wrote them.

    CheckpointError on all ranks where any of them met damage. Collective.
    """
    problems: list[str] = []

    def read_into(name: str, role: str, start: int, out: Tensor) -> None:
        try:
            reader.read_into(name, role, start, out)
        except CheckpointError as error:
            # The others are on their way into collectives: this rank goes along, and its damage is told in the end.
            problems.append(str(error))
            out.fill_(math.nan)

    def check() -> None:
        if problems:
            raise CheckpointError(f"{problems[0]}\n{advice}")

    engine.load(read_into, step=step, moments=moments)
    reader.close()
    on_every_rank(check)
