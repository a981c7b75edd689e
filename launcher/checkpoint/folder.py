"""The checkpoints in a run folder: find, prune and set aside."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, CheckpointReader, list_checkpoints
from longctx.checkpoint_manifest import refuse_deepspeed
from longctx.errors import CheckpointError

log = logging.getLogger(__name__)


def find_resume(run_folder: Path, resume: str) -> Path | None:
    """The checkpoint that ``run.resume`` names; None for "no". CheckpointError when there is none such."""
    if resume == "no":
        return None
    if resume not in ("latest", "newest-good"):
        folder = Path(resume)
        if not (folder / MANIFEST).is_file():
            refuse_deepspeed(folder)
            raise CheckpointError(
                f"run.resume={resume!r} is no checkpoint: {folder / MANIFEST} does not exist.\n{_offer(run_folder)}"
            )
        return folder
    for path in reversed(list_checkpoints(run_folder)):
        # "latest" trusts the files: loading checks their hashes anyway, and then says which one is damaged.
        if resume == "latest":
            return path
        problems = _problems(path)
        if not problems:
            return path
        log.warning("%s is passed over: %s", path, "; ".join(problems))
    raise CheckpointError(
        f"run.resume={resume!r}, but {run_folder / CHECKPOINTS} holds no committed checkpoint.\n"
        "Name a checkpoint folder, or start anew: --run.resume no and another --run.output_dir."
    )


def prune(run_folder: Path, keep_last: int) -> None:
    """Remove all but the newest ``keep_last`` checkpoints; 0 keeps all."""
    if keep_last == 0:
        return
    for path in list_checkpoints(run_folder)[:-keep_last]:
        # A checkpoint that cannot be removed costs disk, and must not cost the run.
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
    """Rename a checkpoint to ``*.discarded``, in place of an older one of that name."""
    aside = path.with_name(f"{path.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _offer(run_folder: Path) -> str:
    """The checkpoints that a user can name instead."""
    known = [p.name for p in list_checkpoints(run_folder)]
    if not known:
        return (
            f"{run_folder / CHECKPOINTS} holds none either; start anew: --run.resume no and another --run.output_dir."
        )
    return f"Checkpoints of this run: {', '.join(known)}, or --run.resume latest."


def _problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint's files; every byte is read."""
    try:
        return CheckpointReader(path).verify()
    except CheckpointError as error:
        return [str(error)]
