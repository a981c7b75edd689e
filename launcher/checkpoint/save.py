"""Writing, finding and loading checkpoints of a run (the format itself: ``longctx/checkpoint_format.py``).

Every rank writes the ranges it owns into one safetensors file of a hidden folder; rank 0 writes the manifest and
renames the folder. Until that rename the previous checkpoint is the newest one, whatever is killed. All ranks need to
see the same folder: on a cluster, a shared file system.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from launcher.checkpoint.folder import set_aside
from longctx.checkpoint_format import (
    CHECKPOINTS,
    FORMAT,
    MANIFEST,
    ROLES,
    TOKENIZER,
    VERSION,
    canonical_hash,
    hash_file,
    is_buffer,
)
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from parallel.runtime.process import agree_or_raise, broadcast_object, gather_objects
from parallel.zero.engine import ZeroEngine


def save_checkpoint(
    run_folder: Path,
    engine: ZeroEngine,
    *,
    step: int,
    model: ModelConfig,
    training: dict[str, Any],
    tokenizer: Path,
) -> Path:
    """Commit the state after ``step`` optimiser steps and return its folder. Collective.

    CheckpointError on every rank when any of them cannot write; nothing is left behind and older checkpoints stay.
    """
    target = run_folder / CHECKPOINTS / f"step_{step:06d}"
    partial = target.with_name(f".{target.name}.partial")
    _on_rank_0(lambda: _make_empty(partial), partial)
    entry, problem = None, None
    try:
        entry = _write_own_ranges(partial, engine)
    except (OSError, SafetensorError) as error:  # safetensors wraps what the system says
        problem = error
    try:
        agree_or_raise(None if problem is None else _explain(problem, partial))
        entries = gather_objects(entry)
        _on_rank_0(lambda: _commit(partial, target, entries, engine, step, model, training, tokenizer), partial)
    except CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _write_own_ranges(folder: Path, engine: ZeroEngine) -> dict[str, Any]:
    """Write this rank's ranges into one file; returns what the manifest says of it."""
    file = f"rank_{dist.get_rank():05d}.safetensors"
    tensors, pieces = {}, []
    for name, role, start, values in engine.owned_ranges():
        key = f"{name}/{role}/{start}"
        # A copy: ranges are views into DeepSpeed's flat buffers, and safetensors refuses shared memory.
        tensors[key] = values.detach().to("cpu", torch.float32, copy=True)
        pieces.append((name, role, {"file": file, "key": key, "start": start, "numel": len(values)}))
    save_file(tensors, folder / file)
    _sync(folder / file)
    return {"file": file, "pieces": pieces, "bytes": (folder / file).stat().st_size, "hash": hash_file(folder / file)}


def _commit(
    partial: Path,
    target: Path,
    entries: list[dict[str, Any]],
    engine: ZeroEngine,
    step: int,
    model: ModelConfig,
    training: dict[str, Any],
    tokenizer: Path,
) -> None:
    """Write the manifest beside the pieces and rename the folder: from here on the checkpoint exists."""
    shutil.copyfile(tokenizer, partial / TOKENIZER)
    _sync(partial / TOKENIZER)
    files = {e["file"]: {"bytes": e["bytes"], "hash": e["hash"]} for e in entries}
    files[TOKENIZER] = {"bytes": (partial / TOKENIZER).stat().st_size, "hash": hash_file(partial / TOKENIZER)}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "model": dataclasses.asdict(model),
        "tensors": _tensor_table(engine, entries),
        "files": files,
        "training": training,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    manifest["hash"] = canonical_hash(manifest)
    (partial / MANIFEST).write_text(json.dumps(manifest))
    _sync(partial / MANIFEST)
    _sync(partial)
    if target.exists():
        set_aside(target)
    partial.rename(target)
    _sync(target.parent)


def _tensor_table(engine: ZeroEngine, entries: list[dict[str, Any]]) -> dict[str, Any]:
    table = {
        name: {"shape": list(shape), "roles": {role: [] for role in (ROLES[:1] if is_buffer(name) else ROLES)}}
        for name, shape in engine.shapes.items()
    }
    for entry in entries:
        for name, role, piece in entry["pieces"]:
            table[name]["roles"][role].append(piece)
    return table


def _on_rank_0(action, path: Path) -> None:
    """Run ``action`` on rank 0; CheckpointError everywhere when the system refuses. Collective."""
    problem = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            problem = str(_explain(error, path))
    problem = broadcast_object(problem)
    if problem is not None:
        raise CheckpointError(problem)


def _explain(error: Exception, path: Path) -> CheckpointError:
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
    mend = "The disk is full: free some space, or set checkpoint.keep_last lower" if full else "Mend that"
    return CheckpointError(
        f"the checkpoint could not be written to {path.parent}: {error}.\n"
        f"{mend}, then go on with --run.resume latest. Earlier checkpoints are untouched."
    )


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _sync(path: Path) -> None:
    """Have the system put a file's or folder's content on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
