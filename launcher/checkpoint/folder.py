"""Find, keep, set aside."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from longctx.checkpoint_format import (
    CHECKPOINTS,
    MANIFEST,
    CheckpointReader,
    find_checkpoint,
    list_checkpoints,
)
from longctx.errors import CheckpointError

log = logging.getLogger(__name__)


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
            set_aside(path)


def set_aside(path: Path) -> None:
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
