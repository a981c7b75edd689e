"""Save a checkpoint of a run (the format itself: ``longctx/checkpoint_format.py``).

Every rank writes the ranges it owns into one safetensors file of a hidden folder; rank 0 writes the manifest and
renames the folder. Until that rename the previous checkpoint is the newest one, whatever is killed. All ranks need to
see the same folder: on a cluster, a shared file system.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from launcher.checkpoint.folder import set_aside
from launcher.checkpoint.pieces import piece_key, write_pieces
from longctx.checkpoint_format import (
    CHECKPOINTS,
    FORMAT,
    MANIFEST,
    ROLES,
    VERSION,
    canonical_hash,
    is_buffer,
)
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from longctx.files import hash_file, sync_path
from parallel.runtime.process import agree_or_raise, broadcast_object, gather_on_rank_0

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.engine import ZeroEngine


class _WrittenFile(NamedTuple):
    """One rank's file, and what the manifest says of it."""

    name: str
    num_bytes: int
    hash: str
    pieces: list[tuple[str, str, dict[str, Any]]]
    """(tensor, role, where its values lie in the file)."""


def save_checkpoint(
    run_folder: Path,
    engine: ZeroEngine,
    *,
    step: int,
    model: ModelConfig,
    training: dict[str, Any],
    tokenizer_files: Mapping[str, bytes],
    sync: Callable[[Path], None] = sync_path,
) -> Path:
    """Commit the state after ``step`` optimiser steps and return its folder. Collective.

    ``tokenizer_files`` are copied along by rank 0: a checkpoint is of use without its run's data. ``sync`` puts a file
    or folder on the disk. CheckpointError on every rank when any of them cannot write; nothing is left behind and older
    checkpoints stay.
    """
    # 1. A hidden folder, which no reader takes for a checkpoint.
    target = run_folder / CHECKPOINTS / f"step_{step:06d}"
    partial = target.with_name(f".{target.name}.partial")
    _on_rank_0(lambda: _make_empty(partial), partial)

    # 2. Every rank writes what it owns. An error waits until all ranks have tried: a rank that raised here would leave
    # the others in the next collective.
    written, problem = None, None
    try:
        written = _write_own_ranges(partial, engine, sync)
    except OSError as error:
        problem = _explain(error, partial)

    # 3. Rank 0 writes the manifest and renames the folder, once every byte of every rank is on the disk.
    def commit() -> None:
        for name, content in tokenizer_files.items():
            files.append(_write_beside(partial / name, content, sync))
        manifest = _manifest(engine, files, step, model, training)
        _commit(partial, target, manifest, sync)

    try:
        agree_or_raise(problem)
        files = gather_on_rank_0(written)
        _on_rank_0(commit, partial)
    except CheckpointError:
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _write_own_ranges(folder: Path, engine: ZeroEngine, sync: Callable[[Path], None]) -> _WrittenFile:
    """Write this rank's ranges into one file; returns what the manifest says of it."""
    path = folder / f"rank_{dist.get_rank():05d}.safetensors"
    pieces = engine.owned_pieces()
    # Views of what ZeRO holds: values leave the device, or a disk that holds them, a part at a time.
    with closing(engine.owned_ranges()) as ranges:
        digest = write_pieces(path, pieces, (one.values for one in ranges))
    sync(path)
    written = []
    for one in pieces:
        where = {"file": path.name, "key": piece_key(one), "start": one.start, "numel": one.numel}
        written.append((one.name, one.role, where))
    return _WrittenFile(path.name, path.stat().st_size, digest, written)


def _write_beside(path: Path, content: bytes, sync: Callable[[Path], None]) -> _WrittenFile:
    """Write a file beside the pieces; returns what the manifest says of it."""
    path.write_bytes(content)
    sync(path)
    return _WrittenFile(path.name, path.stat().st_size, hash_file(path), [])


def _manifest(
    engine: ZeroEngine, files: list[_WrittenFile], step: int, model: ModelConfig, training: dict[str, Any]
) -> dict[str, Any]:
    """The contents of ``manifest.json``, its own hash included."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "dtype": str(engine.dtype).removeprefix("torch."),
        "model": dataclasses.asdict(model),
        "tensors": _tensor_table(engine, files),
        "files": {file.name: {"bytes": file.num_bytes, "hash": file.hash} for file in files},
        "training": training,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    manifest["hash"] = canonical_hash(manifest)
    return manifest


def _tensor_table(engine: ZeroEngine, files: list[_WrittenFile]) -> dict[str, Any]:
    """Every tensor's shape, and for each of its roles the pieces that hold it."""
    table: dict[str, Any] = {}
    for name, shape in engine.shapes.items():
        # A buffer is no parameter: it has a value and no moments.
        roles = ROLES
        if is_buffer(name):
            roles = ROLES[:1]
        table[name] = {"shape": list(shape), "roles": {role: [] for role in roles}}
    for file in files:
        for name, role, piece in file.pieces:
            table[name]["roles"][role].append(piece)
    return table


def _commit(partial: Path, target: Path, manifest: dict[str, Any], sync: Callable[[Path], None]) -> None:
    """Write the manifest beside the pieces and rename the folder: from here on the checkpoint exists."""
    (partial / MANIFEST).write_text(json.dumps(manifest))
    # Before the rename: a power cut must not leave a committed folder with an empty manifest.
    sync(partial / MANIFEST)
    sync(partial)
    # The run has taken this step before, and was resumed from an earlier checkpoint.
    if target.exists():
        set_aside(target)
    partial.rename(target)
    # A rename is on the disk when its parent folder is.
    sync(target.parent)


def _on_rank_0(action: Callable[[], None], path: Path) -> None:
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


def _explain(error: OSError, path: Path) -> CheckpointError:
    """The error that a user reads, with what to do."""
    advice = "Mend that"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "The disk is full: free some space, or set checkpoint.keep_last lower"
    return CheckpointError(
        f"the checkpoint could not be written to {path.parent}: {error}.\n"
        f"{advice}, then go on with --run.resume latest. Earlier checkpoints are untouched."
    )


def _make_empty(folder: Path) -> None:
    """Make the folder anew, without what a killed save has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
