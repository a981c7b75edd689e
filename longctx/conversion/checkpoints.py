"""Between our checkpoints and Hugging Face folders: export, import, and a decoder loaded from either end's result."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from longctx.checkpoint_format import (
    FORMAT,
    MANIFEST,
    TOKENIZER,
    VERSION,
    CheckpointReader,
    canonical_hash,
    find_checkpoint,
    hash_file,
    model_config,
)
from longctx.conversion.families import tensor_specs
from longctx.conversion.files import ShardWriter, staged_folder, write_json
from longctx.conversion.hf import HfReader, Progress, raise_differences, save_hf
from longctx.conversion.tokenizer import SENTENCEPIECE_FILE
from longctx.errors import CheckpointError


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint (or a run's newest) as a Hugging Face folder, with its tokenizer; returns the folder.

    ``dtype`` defaults to what the run computed in; float32 gives the masters themselves. The checkpoint's hashes are
    checked first.
    """
    reader = open_checked(checkpoint)
    tokenizer, origin = reader.folder / TOKENIZER, reader.manifest["training"].get("imported", {})
    return save_hf(
        model_config(reader),
        reader.state_dict(dtype or reader.dtype),
        output,
        tokenizer=tokenizer if tokenizer.exists() else None,
        model_type=origin.get("model_type"),
        token_ids=origin.get("token_ids"),
        shard_bytes=shard_bytes,
        progress=progress,
    )


def import_hf(
    folder: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    progress: Progress | None = None,
) -> Path:
    """Write a Hugging Face folder as a checkpoint of step 0 to train on from; returns its folder.

    It holds fp32 masters and no optimiser moments. ``dtype`` is what exports of it default to (default: the model's
    own). A SentencePiece ``tokenizer.model`` comes along; other tokenizer files do not.
    """
    reader = HfReader(folder)
    names = reader.names()
    with staged_folder(Path(output)) as staging:
        writer = ShardWriter(staging, "master", shard_bytes)
        for done, (name, tensor) in enumerate(reader, start=1):
            writer.add(name, tensor.to(torch.float32).reshape(-1))
            if progress is not None:
                progress(done, len(names))
        file_of = writer.finish()
        if (reader.folder / SENTENCEPIECE_FILE).is_file():
            shutil.copyfile(reader.folder / SENTENCEPIECE_FILE, staging / TOKENIZER)
        write_json(staging / MANIFEST, _manifest(reader, dtype or reader.dtype, staging, file_of))
        open_checked(staging)
    return Path(output)


def open_checked(checkpoint: str | Path) -> CheckpointReader:
    """A checkpoint, or a run's newest, whose files all have their hashes and whose tensors are those of its config."""
    reader = CheckpointReader(find_checkpoint(checkpoint))
    if problems := reader.verify():
        raise CheckpointError("\n".join([f"{reader.folder} is damaged:", *(f"  {problem}" for problem in problems)]))
    check_tensors(reader)
    return reader


def check_tensors(reader: CheckpointReader) -> None:
    """CheckpointError unless the checkpoint has exactly the tensors of its own config, with their shapes."""
    specs = {spec.name: spec.shape for spec in tensor_specs(model_config(reader))}
    held = {name: reader.shape(name) for name in reader.names()}
    wrong = [f"{n} {held[n]} instead of {specs[n]}" for n in held.keys() & specs.keys() if held[n] != specs[n]]
    raise_differences(
        str(reader.folder), missing=specs.keys() - held.keys(), unexpected=held.keys() - specs.keys(), wrong=wrong
    )


def _manifest(reader: HfReader, dtype: torch.dtype, staging: Path, file_of: dict[str, str]) -> dict[str, Any]:
    def entry(name: str) -> dict[str, Any]:
        shape = reader.shape(name)
        piece = {"file": file_of[name], "key": name, "start": 0, "numel": torch.Size(shape).numel()}
        return {"shape": list(shape), "roles": {"master": [piece]}}

    files = sorted(path for path in staging.iterdir() if path.name != MANIFEST)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": 0,
        "dtype": str(dtype).removeprefix("torch."),
        "model": asdict(reader.config),
        "tensors": {name: entry(name) for name in reader.names()},
        "files": {path.name: {"bytes": path.stat().st_size, "hash": hash_file(path)} for path in files},
        "training": {
            "imported": {"from": reader.folder.name, "model_type": reader.model_type, "token_ids": reader.token_ids}
        },
    }
    return manifest | {"hash": canonical_hash(manifest)}
