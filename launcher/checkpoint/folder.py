"""The checkpoints in a run folder: find, set aside, clear up."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path

from launcher.checkpoint.proof import broken_step_after, is_proved
from launcher.checkpoint.remove import leftovers
from launcher.checkpoint.retention import remove_or_warn
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
    known = list_checkpoints(run_folder)
    if not known:
        raise CheckpointError(_none_found(run_folder, resume))
    # "latest" trusts the files: loading checks their hashes anyway, and then says which one is damaged.
    if resume == "latest":
        return known[-1]
    found = _newest_good(run_folder, known)
    if found is None:
        raise CheckpointError(_none_found(run_folder, resume))
    return found


def _newest_good(run_folder: Path, known: list[Path]) -> Path | None:
    """The newest of these whose files are whole, unless training broke right after it and nothing proves it."""
    newest_whole = None
    before = math.inf
    for path in reversed(known):
        step, next_step = _step_of(path), before
        before = step
        problems = problems_of(path)
        if problems:
            log.warning("%s is passed over: %s", path, "; ".join(problems))
            continue
        if is_proved(path, CheckpointReader(path).manifest["hash"]):
            return path
        broken = broken_step_after(run_folder, step, next_step)
        if broken is None:
            log.info("%s is whole; no later step has proved it yet.", path)
            return path
        log.warning("%s is passed over: step %d after it was not finite, and no step has proved it.", path, broken)
        newest_whole = newest_whole or path
    if newest_whole is not None:
        log.warning("No other checkpoint is good: %s is taken all the same.", newest_whole)
    return newest_whole


def remove_leftovers(run_folder: Path) -> None:
    """Remove what killed saves and removals and earlier resumes left; the log says what. Nobody may be saving."""
    for leftover in leftovers(run_folder, is_running=False):
        if remove_or_warn(leftover.path):
            log.info("Removed %s: %s.", leftover.path, leftover.what)


def set_aside_newer(run_folder: Path, step: int) -> None:
    """Rename checkpoints of steps after ``step`` to ``*.discarded``: a resumed run writes that history anew."""
    for path in list_checkpoints(run_folder):
        if _step_of(path) > step:
            set_aside(path)


def set_aside(path: Path) -> None:
    """Rename a checkpoint to ``*.discarded``, in place of an older one of that name."""
    aside = path.with_name(f"{path.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def problems_of(path: Path) -> list[str]:
    """What is wrong with a checkpoint's files; every byte is read."""
    try:
        return CheckpointReader(path).verify()
    except CheckpointError as error:
        return [str(error)]


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _none_found(run_folder: Path, resume: str) -> str:
    return (
        f"run.resume={resume!r}, but {run_folder / CHECKPOINTS} holds no committed checkpoint.\n"
        "Name a checkpoint folder, or start anew: --run.resume no and another --run.output_dir."
    )


def _offer(run_folder: Path) -> str:
    """The checkpoints that a user can name instead."""
    known = [p.name for p in list_checkpoints(run_folder)]
    if not known:
        return (
            f"{run_folder / CHECKPOINTS} holds none either; start anew: --run.resume no and another --run.output_dir."
        )
    return f"Checkpoints of this run: {', '.join(known)}, or --run.resume latest."
