"""Checks before a conversion starts: folders must not overlap, and the checkpoint must be complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, CheckpointReader, check_size, find_checkpoint
from longctx.config import ModelConfig
from longctx.conversion.differences import raise_differences
from longctx.conversion.tensors import parameter_shapes
from longctx.errors import CheckpointError


def check_folders(source: str | Path, output: str | Path) -> None:
    """Raise CheckpointError if the input does not exist, or if the output is within it.

    From a run, only the newest checkpoint is read, so the output may be elsewhere in the run's folder.
    """
    source, output = Path(source), Path(output)
    if not source.is_dir():
        if source.exists():
            raise CheckpointError(f"{source} is no folder.")
        raise CheckpointError(f"{source} does not exist.")
    if (source / CHECKPOINTS).is_dir():
        source = find_checkpoint(source)
    # A folder that changes while it is read matches neither its old hashes nor its old files.
    if output.resolve().is_relative_to(source.resolve()) and output.resolve() != source.resolve():
        beside = source.resolve().with_name(f"{source.resolve().name}-converted")
        raise CheckpointError(f"{output} lies inside of {source}, which is only read. Try {beside}.")


def open_checked(checkpoint: str | Path) -> CheckpointReader:
    """Open a checkpoint, or a run's newest, and check all hashes and tensors."""
    reader = CheckpointReader(find_checkpoint(checkpoint))
    check_hashes(reader)
    check_tensors(reader)
    return reader


def check_hashes(reader: CheckpointReader) -> None:
    """Raise CheckpointError naming every file that differs from the checkpoint's manifest."""
    problems = reader.verify()
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(f"{reader.folder} is damaged:{listed}")
    reader.check_entries()


def check_tensors(reader: CheckpointReader) -> None:
    """Raise CheckpointError unless the checkpoint has exactly its config's tensors, with their shapes."""
    check_model(reader.manifest, str(reader.folder))


def check_model(manifest: dict[str, Any], folder: str) -> None:
    """Check the same from the manifest alone: for ``folder`` in a store, the files may be elsewhere."""
    config = ModelConfig.from_dict(manifest["model"])
    held = {name: tuple(entry["shape"]) for name, entry in manifest["tensors"].items()}
    # First, because it bounds the cost of listing the names and shapes that the config implies.
    check_size(config, held.values(), f"{folder}/{MANIFEST}")
    meant = parameter_shapes(config)
    wrong = [f"{n} {held[n]} instead of {meant[n]}" for n in held.keys() & meant.keys() if held[n] != meant[n]]
    raise_differences(folder, missing=meant.keys() - held.keys(), unexpected=held.keys() - meant.keys(), wrong=wrong)
