"""Writing, finding and loading checkpoints of a run (the format itself: ``longctx/checkpoint_format.py``).

Every rank writes the ranges it owns into one safetensors file of a hidden folder; rank 0 writes the manifest and
renames the folder. Until that rename the previous checkpoint is the newest one, whatever is killed. All ranks need to
see the same folder: on a cluster, a shared file system.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from longctx.checkpoint_format import (
    CHECKPOINTS,
    FORMAT,
    MANIFEST,
    ROLES,
    TOKENIZER,
    VERSION,
    CheckpointReader,
    canonical_hash,
    find_checkpoint,
    hash_file,
    is_buffer,
    list_checkpoints,
    model_config,
)
from longctx.config import ModelConfig
from longctx.errors import CheckpointError
from parallel.process import agree_or_raise, broadcast_object, gather_objects, on_every_rank
from parallel.zero import ZeroEngine

log = logging.getLogger(__name__)


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


def load_checkpoint(folder: Path, engine: ZeroEngine, model: ModelConfig) -> CheckpointReader:
    """Load weights and moments into the engine; returns the reader, whose manifest has the rest. Collective.

    Every file's hash is checked first, the files dealt out over the ranks. CheckpointError on all ranks when the
    checkpoint is damaged or is of another model.
    """

    def read_and_check() -> CheckpointReader:
        reader = CheckpointReader(folder)
        _check_model(reader, model)
        _check_shapes(reader, engine)
        _check_files(reader, "Try --run.resume newest-good, which passes damaged ones over.")
        return reader

    reader = on_every_rank(read_and_check)
    engine.load(reader.read_range, step=reader.step, moments=set(ROLES) <= set(reader.roles))
    reader.close()
    return reader


def load_weights(folder: Path, engine: ZeroEngine, model: ModelConfig) -> None:
    """Load weights alone: the optimiser starts afresh, at step 0. Collective.

    Checked like ``load_checkpoint``, except that ``model`` may reach further than the checkpoint's does: ``rope`` (how
    positions are stretched, not which channels turn), ``max_positions`` and ``window`` may be others.
    """

    def read_and_check() -> CheckpointReader:
        reader = CheckpointReader(folder)
        _check_start(reader, model)
        _check_shapes(reader, engine)
        _check_files(reader, "Copy or convert it again, or start from another one.")
        return reader

    reader = on_every_rank(read_and_check)
    engine.load(reader.read_range, step=0, moments=False)
    reader.close()


def find_start(start_from: str) -> Path | None:
    """The checkpoint that ``run.start_from`` names, of a run folder its newest; None for "no"."""
    if start_from == "no":
        return None
    folder = Path(start_from)
    if (folder / "config.json").is_file() and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"run.start_from={start_from!r} is a Hugging Face folder, not a checkpoint.\n"
            f"Convert it first: python -m launcher convert --from hf {start_from} OUT"
        )
    try:
        return find_checkpoint(folder)
    except CheckpointError as error:
        raise CheckpointError(f"run.start_from={start_from!r}: {error}") from error


def find_resume(run_folder: Path, resume: str) -> Path | None:
    """The checkpoint that ``run.resume`` names; None for "no". CheckpointError when there is none such."""
    if resume == "no":
        return None
    if resume not in ("latest", "newest-good"):
        folder = Path(resume)
        if not (folder / MANIFEST).is_file():
            raise CheckpointError(
                f"run.resume={resume!r} is no checkpoint: {folder / MANIFEST} does not exist.\n{_offer(run_folder)}"
            )
        return folder
    for path in reversed(list_checkpoints(run_folder)):
        if resume == "latest":
            return path
        if problems := _problems(path):
            log.warning("%s is passed over: %s", path, "; ".join(problems))
        else:
            return path
    raise CheckpointError(
        f"run.resume={resume!r}, but {run_folder / CHECKPOINTS} holds no committed checkpoint.\n"
        "Name a checkpoint folder, or start anew: --run.resume no and another --run.output_dir."
    )


def prune(run_folder: Path, keep_last: int) -> None:
    """Remove all but the newest ``keep_last`` checkpoints; 0 keeps all."""
    for path in list_checkpoints(run_folder)[:-keep_last] if keep_last else []:
        shutil.rmtree(path, ignore_errors=True)


def remove_partial(run_folder: Path) -> None:
    """Remove what killed saves left."""
    for path in (run_folder / CHECKPOINTS).glob(".step_*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def set_aside_newer(run_folder: Path, step: int) -> None:
    """Rename checkpoints of steps after ``step`` to ``*.discarded``: a resumed run writes that history anew."""
    for path in list_checkpoints(run_folder):
        if int(path.name.removeprefix("step_")) > step:
            _set_aside(path)


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _offer(run_folder: Path) -> str:
    known = [p.name for p in list_checkpoints(run_folder)]
    if not known:
        return (
            f"{run_folder / CHECKPOINTS} holds none either; start anew: --run.resume no and another --run.output_dir."
        )
    return f"Checkpoints of this run: {', '.join(known)}, or --run.resume latest."


def _problems(path: Path) -> list[str]:
    try:
        return CheckpointReader(path).verify()
    except CheckpointError as error:
        return [str(error)]


def _check_model(reader: CheckpointReader, model: ModelConfig) -> None:
    if differing := model_config(reader).differences(model):
        raise CheckpointError("\n".join([f"{reader.folder} is of another model:", *_lines(differing)]))


def _check_start(reader: CheckpointReader, model: ModelConfig) -> None:
    """Beyond what ``differences`` lets pass, only how far positions reach may change."""
    differing = model_config(reader).differences(model)
    differing.pop("window", None)
    if "rope" in differing:
        theirs, ours = differing.pop("rope")
        for name in ("partial", "interleaved"):  # which channels turn together is what the weights have learned
            if getattr(theirs, name) != getattr(ours, name):
                differing[f"rope.{name}"] = getattr(theirs, name), getattr(ours, name)
    if differing:
        raise CheckpointError(
            "\n".join([f"{reader.folder} is of another model:", *_lines(differing), *_MAY_CHANGE.splitlines()])
        )


_MAY_CHANGE = """A run that starts from it may change model.max_positions, model.window and how model.rope is stretched
(kind, factor, theta, …). Set the other fields as the checkpoint has them."""


def _lines(differing: dict[str, tuple[Any, Any]]) -> list[str]:
    return [f"  model.{k}: checkpoint {a!r}, run {b!r}" for k, (a, b) in differing.items()]


def _check_shapes(reader: CheckpointReader, engine: ZeroEngine) -> None:
    shapes = {name: tuple(shape) for name, shape in engine.shapes.items()}
    stored = {name: reader.shape(name) for name in reader.names()}
    if shapes != stored:
        wrong = sorted(set(shapes.items()) ^ set(stored.items()))[:6]
        raise CheckpointError(f"{reader.folder} holds other tensors than the model: {wrong}.")


def _check_files(reader: CheckpointReader, advice: str) -> None:
    """This rank's share of the files is whole."""
    names = sorted(reader.manifest["files"])[dist.get_rank() :: dist.get_world_size()]
    if problems := reader.verify(names):
        raise CheckpointError(f"{reader.folder}: {'; '.join(problems)}.\n{advice}")


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
        _set_aside(target)
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
