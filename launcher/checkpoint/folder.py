"""The checkpoints in a run folder: find, set aside, clear up."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path

from data_pipeline.stores.urls import is_url
from launcher.checkpoint.names import set_aside, step_of
from launcher.checkpoint.proof import broken_step_after, is_proved
from launcher.checkpoint.remove import leftovers
from launcher.checkpoint.retention import remove_or_warn
from launcher.checkpoint.store import Store, find_address
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, CheckpointReader, list_checkpoints
from longctx.checkpoint_manifest import refuse_deepspeed
from longctx.errors import CheckpointError, DataError

log = logging.getLogger(__name__)


def find_resume(run_folder: Path, resume: str, store: Store | None = None) -> Path | None:
    """The checkpoint that ``run.resume`` names; None for "no". CheckpointError when there is none such.

    One that the run's ``store`` has, and its folder not, is copied here. So is one that ``resume`` names by its URL.
    """
    if resume == "no":
        return None
    if is_url(resume):
        return _fetch(run_folder, resume)
    if resume not in ("latest", "newest-good"):
        folder = Path(resume)
        if not (folder / MANIFEST).is_file():
            refuse_deepspeed(folder)
            raise CheckpointError(
                f"run.resume={resume!r} is no checkpoint: {folder / MANIFEST} does not exist.\n{_offer(run_folder)}"
            )
        return folder
    known = {step_of(path): path for path in list_checkpoints(run_folder)}
    there = _steps_there(store)
    if not known and not there:
        raise CheckpointError(_none_found(run_folder, resume, store))
    steps = sorted(known.keys() | there, reverse=True)
    # "latest" trusts the files: loading checks their hashes anyway, and then says which one is damaged.
    if resume == "latest":
        found = next((path for path in (known.get(s) or _brought(run_folder, s, store) for s in steps) if path), None)
    else:
        found = _newest_good(run_folder, steps, known, store if there else None)
    if found is None:
        raise CheckpointError(_none_found(run_folder, resume, store))
    return found


def _newest_good(run_folder: Path, steps: list[int], known: Mapping[int, Path], store: Store | None) -> Path | None:
    """The newest of these whose files are whole, unless training broke right after it and nothing proves it.

    Those that are not ``known`` here, or damaged, are looked for in the ``store``.
    """
    newest_whole = None
    before = math.inf
    for step in steps:
        next_step, before = before, step
        path = known.get(step)
        if path is not None and (problems := problems_of(path)):
            log.warning("%s is passed over: %s", path, "; ".join(problems))
            path = None
        path = path or _brought(run_folder, step, store)
        if path is None:
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


def _steps_there(store: Store | None) -> set[int]:
    """The checkpoints of a store; none, and a warning, where it cannot be reached."""
    if store is None:
        return set()
    try:
        return set(store.committed())
    except DataError as error:
        log.warning("checkpoint.store: %s\nOnly the run's folder is looked at.", error)
        return set()


def _brought(run_folder: Path, step: int, store: Store | None) -> Path | None:
    """A checkpoint copied here from the store, whole; None, and a warning, where that is not possible."""
    if store is None:
        return None
    try:
        path = store.fetch(step, run_folder)
    except (CheckpointError, DataError) as error:
        log.warning("step_%06d of %s is passed over: %s", step, store, error)
        return None
    log.info("Copied %s from %s: every hash is right.", path, store)
    return path


def _fetch(run_folder: Path, address: str) -> Path:
    """Copy the checkpoint of this URL, or the newest one of a run's, into the run's folder."""
    store, step = find_address(address)
    if step is None:
        there = store.committed()
        if not there:
            raise CheckpointError(f"run.resume={address!r}: there is no checkpoint below {store}/{CHECKPOINTS}.")
        step = max(there)
    path = store.fetch(step, run_folder)
    log.info("Copied %s from %s: every hash is right.", path, store)
    return path


def remove_leftovers(run_folder: Path) -> None:
    """Remove what killed saves and removals and earlier resumes left; the log says what. Nobody may be saving."""
    for leftover in leftovers(run_folder, is_running=False):
        if remove_or_warn(leftover.path):
            log.info("Removed %s: %s.", leftover.path, leftover.what)


def set_aside_newer(run_folder: Path, step: int) -> None:
    """Rename checkpoints of steps after ``step`` to ``*.discarded``: a resumed run writes that history anew."""
    for path in list_checkpoints(run_folder):
        if step_of(path) > step:
            set_aside(path)


def problems_of(path: Path) -> list[str]:
    """What is wrong with a checkpoint's files; every byte is read."""
    try:
        return CheckpointReader(path).verify()
    except CheckpointError as error:
        return [str(error)]


def _none_found(run_folder: Path, resume: str, store: Store | None) -> str:
    neither = ""
    if store is not None:
        neither = f" Nor does {store}."
    return (
        f"run.resume={resume!r}, but {run_folder / CHECKPOINTS} holds no committed checkpoint.{neither}\n"
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
