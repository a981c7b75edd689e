"""Writer for streamed weights as a step-0 checkpoint: float32 master weights, no optimizer moments."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.architecture.adapter import is_adapter
from longctx.checkpoint_format import (
    FORMAT,
    MANIFEST,
    ROLES,
    VERSION,
    CheckpointReader,
    base_entry,
    canonical_hash,
)
from longctx.config import ModelConfig
from longctx.conversion.casts import dtype_name
from longctx.conversion.hf import Progress
from longctx.conversion.passthrough import PassthroughPart
from longctx.conversion.tensor_layouts import each_once, parameter_shapes
from longctx.conversion.weights.json_files import write_json
from longctx.errors import CheckpointError
from longctx.files import staged_folder
from longctx.storage.hashed_blocks import describe_file
from longctx.storage.safetensors import SafetensorsShardWriter


def save_master_weights(
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    output: Path,
    *,
    dtype: torch.dtype,
    training: dict[str, Any],
    auxiliary_files: Mapping[str, Path | bytes] | None = None,
    passthrough: PassthroughPart | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
    base: CheckpointReader | None = None,
) -> Path:
    """Write a decoder's tensors as a step-0 checkpoint and return its folder, which appears complete or not at all.

    ``tensors`` come in any order, each exactly once; memory holds one. ``dtype`` is the checkpoint's default export
    dtype, ``training`` the manifest entry with that name, written after the last tensor. ``auxiliary_files`` maps new
    names to files to copy, including the tokenizer, or to their content. ``passthrough`` come from the same model as
    the decoder. With a ``base`` the tensors are adapters on it. Every tensor is read back. Raise CheckpointError if the
    tensors do not match the config.
    """
    shapes = parameter_shapes(config)
    if base is not None:
        shapes = {name: shape for name, shape in shapes.items() if is_adapter(name)}
    # Renamed into place at the end, so that readers never see a partial checkpoint.
    with staged_folder(output, error=CheckpointError) as staging:
        writer = SafetensorsShardWriter(staging, ROLES[0], shard_bytes)
        for done, (name, tensor) in enumerate(each_once(tensors, shapes), start=1):
            writer.add_flat(name, tensor.reshape(-1), torch.float32, (tensor.numel(),))
            if progress is not None:
                progress(done, len(shapes))
        # Files have their final names now, so the manifest can list them.
        file_of = writer.finish()
        if passthrough is not None:
            passthrough.write(staging, shard_bytes)
        for name, file in (auxiliary_files or {}).items():
            if isinstance(file, bytes):
                (staging / name).write_bytes(file)
            else:
                shutil.copyfile(file, staging / name)
        files = sorted(staging.iterdir())
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": 0,
            "dtype": dtype_name(dtype),
            "model": dataclasses.asdict(config),
            "tensors": {name: _tensor_entry(name, shape, file_of[name]) for name, shape in shapes.items()},
            "files": {path.name: _file_entry(path) for path in files},
            "training": training,
        }
        if base is not None:
            manifest["base"] = base_entry(base, output.absolute().parent.parent)
        write_json(staging / MANIFEST, manifest | {"hash": canonical_hash(manifest)})
        # Opening it checks that one file holds every value of every tensor.
        if base is None:
            CheckpointReader(staging).close()
    # A base may be named relative to the final folder.
    CheckpointReader(output).close()
    return output


def _file_entry(path: Path) -> dict[str, Any]:
    """Return a file's manifest entry; only files that are read in ranges have hashes per checksum block."""
    entry = describe_file(path)
    # A tokenizer is small and read in full: one hash is enough.
    if path.suffix != ".safetensors":
        del entry["blocks"]
    return entry


def _tensor_entry(name: str, shape: tuple[int, ...], file: str) -> dict[str, Any]:
    """Return the manifest entry for a tensor in one file."""
    piece = {"file": file, "key": name, "start": 0, "numel": torch.Size(shape).numel()}
    return {"shape": list(shape), "roles": {ROLES[0]: [piece]}}
