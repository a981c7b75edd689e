"""Checks before a conversion starts: folders must not overlap, and the checkpoint must be complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longctx.architecture.adapter import is_adapter
from longctx.checkpoint_format import (
    CHECKPOINTS,
    MANIFEST,
    CheckpointReader,
    check_model_size,
    find_checkpoint,
    is_buffer,
)
from longctx.config import ModelConfig
from longctx.conversion.tensor_layouts import parameter_shapes
from longctx.conversion.tensor_mismatches import raise_mismatches
from longctx.errors import CheckpointError


def check_folders(source: str | Path, output: str | Path) -> None:
    """Raise CheckpointError if the input does not exist, or if the output is within it.

    From a run, only the newest checkpoint is read, so the output may be elsewhere in the run's folder.
    """
    source, output = Path(source), Path(output)
    if not source.is_dir():
        if source.exists():
            raise CheckpointError(f"{source} is not a folder.")
        raise CheckpointError(f"{source} does not exist.")
    if (source / CHECKPOINTS).is_dir():
        source = find_checkpoint(source)
    # A folder that changes while it is read matches neither its old hashes nor its old files.
    if output.resolve().is_relative_to(source.resolve()) and output.resolve() != source.resolve():
        suggestion = source.resolve().with_name(f"{source.resolve().name}-converted")
        raise CheckpointError(f"{output} is inside of {source}, which must not change. Try {suggestion}.")


def open_verified_checkpoint(checkpoint: str | Path) -> CheckpointReader:
    """Open a checkpoint, or a run's newest, and check all hashes and tensors."""
    reader = CheckpointReader(find_checkpoint(checkpoint))
    check_hashes(reader)
    check_checkpoint_tensors(reader)
    return reader


def check_hashes(reader: CheckpointReader) -> None:
    """Raise CheckpointError naming every file that differs from the checkpoint's manifest."""
    problems = reader.verify()
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise CheckpointError(f"{reader.folder} is damaged:{lines}")
    reader.check_entries()


def check_checkpoint_tensors(reader: CheckpointReader) -> None:
    """Raise CheckpointError unless the checkpoint has exactly its config's tensors, with their shapes."""
    check_manifest_tensors(reader.manifest, str(reader.folder))


def check_manifest_tensors(manifest: dict[str, Any], folder: str) -> None:
    """Check the same from the manifest alone: for ``folder`` in a store, the files may be elsewhere."""
    config = ModelConfig.from_dict(manifest["model"])
    actual = {name: tuple(entry["shape"]) for name, entry in manifest["tensors"].items()}
    # First, because it bounds the cost of listing the names and shapes that the config implies.
    if "base" not in manifest:
        check_model_size(config, actual.values(), f"{folder}/{MANIFEST}")
    expected = parameter_shapes(config)
    if "base" in manifest:
        # Buffers are the base's unless training has moved them.
        expected = {name: x for name, x in expected.items() if is_adapter(name) or (is_buffer(name) and name in actual)}
    mismatched = [
        f"{n} {actual[n]} instead of {expected[n]}" for n in actual.keys() & expected.keys() if actual[n] != expected[n]
    ]
    raise_mismatches(
        folder,
        missing=expected.keys() - actual.keys(),
        unexpected=actual.keys() - expected.keys(),
        mismatched=mismatched,
    )
