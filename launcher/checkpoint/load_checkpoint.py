"""Load a checkpoint into the engine after checking its files and model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from launcher.checkpoint.start_weights import StartWeights
from launcher.config.model_section import MAY_CHANGE, fixed_differences, model_changes
from longctx.checkpoint_format import CheckpointReader, model_config
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from parallel.comm.world import num_ranks, on_every_rank, own_rank

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.zero_engine import ZeroEngine


_TRY_ANOTHER = "Try --run.resume newest-good, which skips damaged checkpoints."
_COPY_AGAIN = "Copy or convert it again, or start from another checkpoint."


def load_checkpoint(folder: Path, engine: ZeroEngine, model: ModelConfig) -> CheckpointReader:
    """Load weights and moments into the engine. Return the reader; its manifest has the rest. Collective.

    Every checksum block is hashed before its values are used. Raise CheckpointError on all ranks if the checkpoint
    belongs to another model or is damaged; the engine must not be used after damage.
    """

    def check(reader: CheckpointReader) -> None:
        check_same_model(reader, model)
        _check_optimizer(reader, engine)
        _check_shapes(reader, {name: reader.shape(name) for name in reader.names()}, engine)

    reader = _open_and_validate(folder, check, _TRY_ANOTHER)
    # Imported and upcycled checkpoints have only weights.
    steps = _optimizer_steps(reader)
    _fill(engine, reader, reader.read_into, _TRY_ANOTHER, step=steps, moments=len(reader.roles) > 1)
    return reader


def load_weights(folder: Path, engine: ZeroEngine, model: ModelConfig, *, seed: int) -> None:
    """Load only weights, with a fresh optimizer at step 0; ``seed`` is for weights that the checkpoint lacks.
    Collective.

    Checks are those in ``load_checkpoint``, except for fields that a start may change (``fixed_differences``).
    """
    shapes = {name: tuple(shape) for name, shape in engine.shapes.items()}

    def check(reader: CheckpointReader) -> None:
        check_start_from(reader, model)
        _check_shapes(reader, StartWeights(reader, model, shapes, seed).stored_shapes(), engine)

    reader = _open_and_validate(folder, check, _COPY_AGAIN)
    weights = StartWeights(reader, model, shapes, seed)
    _fill(engine, reader, weights.read_into, _COPY_AGAIN, step=0, moments=False)
    weights.log_changes()


def _open_and_validate(folder: Path, check: Callable[[CheckpointReader], None], hint: str) -> CheckpointReader:
    """Open a checkpoint. Raise CheckpointError on all ranks if manifest, shapes or files are invalid. Collective."""

    def read_and_check() -> CheckpointReader:
        # Cheap checks first: the manifest, then shapes, then files.
        reader = CheckpointReader(folder, past_cache=True)
        check(reader)
        _check_files(reader, hint)
        return reader

    return on_every_rank(read_and_check)


def check_same_model(reader: CheckpointReader, model: ModelConfig) -> None:
    """Raise CheckpointError unless both models compute the same function from the same weights."""
    mismatches = model_config(reader).differences(model)
    if mismatches:
        raise CheckpointError(
            f"{_mismatch_message(reader, model, mismatches)}\nResume with the run folder's config.toml, or with "
            "--model.preset none and no other model fields: the checkpoint then sets them."
        )


def check_start_from(reader: CheckpointReader, model: ModelConfig) -> None:
    """Raise CheckpointError if the models differ beyond training-only and context-length fields."""
    mismatches = fixed_differences(model_config(reader), model)
    if mismatches:
        raise CheckpointError(f"{_mismatch_message(reader, model, mismatches)}\n{MAY_CHANGE}")


def check_training(reader: CheckpointReader) -> None:
    """Raise CheckpointError unless the manifest's training state allows the run to continue. Reads no other file."""
    training, model = reader.manifest["training"], model_config(reader)
    _optimizer_steps(reader)
    # Converted and upcycled checkpoints have no loader state and start at step 0.
    if "loader" in training and training.get("step") != reader.step:
        raise CheckpointError(
            f"{reader.folder}: training.step={training.get('step')!r} does not match the checkpoint's step "
            f"{reader.step}. Use another checkpoint."
        )
    load = training.get("expert_load") or []
    layers = sum(map(model.has_experts, range(model.depth)))
    if load and (len(load), len(load[0])) != (layers, model.num_experts):
        raise CheckpointError(
            f"{reader.folder}: its expert_load has {len(load)} layers with {len(load[0])} experts, but its model has "
            f"{layers} with {model.num_experts}. Use another checkpoint."
        )


def _optimizer_steps(reader: CheckpointReader) -> int:
    """Return how many optimizer steps were taken: fewer than the run's steps if some were skipped."""
    # Earlier releases skipped no step and did not record the number.
    taken = reader.manifest["training"].get("optimizer_steps", reader.step)
    if type(taken) is not int or not 0 <= taken <= reader.step:
        raise CheckpointError(
            f"{reader.folder}: optimizer_steps={taken!r} must be a number from 0 to {reader.step}. Use another "
            "checkpoint."
        )
    return taken


def _mismatch_message(reader: CheckpointReader, model: ModelConfig, mismatches: Collection[str]) -> str:
    """Build the message about differing fields, one per line; for ``rope``, one line per key."""
    lines = [f"{reader.folder} has a different model:"]
    for name, (saved, current) in model_changes(model_config(reader), model).items():
        if name in mismatches or name.partition(".")[0] in mismatches:
            lines.append(f"  model.{name}: checkpoint {saved!r}, run {current!r}")
    return "\n".join(lines)


def _check_optimizer(reader: CheckpointReader, engine: ZeroEngine) -> None:
    """Raise CheckpointError if the checkpoint's moments belong to another optimizer."""
    wanted = engine.roles
    # The next check reports tensors with unknown names.
    other = [name for name in reader.names() if name in wanted and reader.roles_of(name) != wanted[name]]
    if len(reader.roles) == 1 or not other:
        return
    name = other[0]
    raise CheckpointError(
        f"{reader.folder} was trained with another optimizer: it stores {', '.join(reader.roles_of(name))} for {name}, "
        f"but this run needs {', '.join(wanted[name])}.\nRestore train.optimizer, or start from its weights: "
        f"--run.start_from {reader.folder}."
    )


def _check_shapes(reader: CheckpointReader, stored: dict[str, tuple[int, ...]], engine: ZeroEngine) -> None:
    """Raise CheckpointError unless the ``stored`` tensors' names and shapes equal the engine's."""
    shapes = {name: tuple(shape) for name, shape in engine.shapes.items()}
    if shapes != stored:
        mismatches = sorted(set(shapes.items()) ^ set(stored.items()))[:6]
        raise CheckpointError(f"{reader.folder}: tensors do not match the model's: {mismatches}.")


def _check_files(reader: CheckpointReader, hint: str) -> None:
    """Raise CheckpointError unless all files have their full size and those without checksum blocks are intact."""
    entries = reader.manifest["files"]
    problems = reader.size_problems()
    if not problems:
        # Checksum blocks are verified while values are read. Earlier releases lack them: the ranks divide the work of
        # hashing such files before the load.
        unhashed = sorted(name for name, entry in entries.items() if "blocks" not in entry)
        problems = reader.verify(unhashed[own_rank() :: num_ranks()])
    if problems:
        raise CheckpointError(f"{reader.folder}: {'; '.join(problems)}.\n{hint}")


def _fill(
    engine: ZeroEngine,
    reader: CheckpointReader,
    read: Callable[[str, str, int, Tensor], None],
    hint: str,
    *,
    step: int,
    moments: bool,
) -> None:
    """Fill the engine by ``read`` from a save by any number of ranks at any ZeRO stage: each rank reads its ranges.

    Raise CheckpointError on all ranks if any of them finds damage. Collective.
    """
    problems: list[str] = []

    def read_into(name: str, role: str, start: int, out: Tensor) -> None:
        try:
            read(name, role, start, out)
        except CheckpointError as error:
            # The other ranks are about to enter collectives: this rank joins them and reports the damage afterwards.
            # NaN keeps the unread values from being mistaken for weights.
            problems.append(str(error))
            out.fill_(math.nan)

    def check() -> None:
        if problems:
            raise CheckpointError(f"{problems[0]}\n{hint}")

    engine.load(read_into, step=step, moments=moments)
    reader.close()
    on_every_rank(check)
