"""Checkpoints in a run folder: find the one to resume from, set newer ones aside, remove leftovers."""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.stores.urls import is_url
from launcher.checkpoint.checkpoint_store import CheckpointStore, find_address
from launcher.checkpoint.load_checkpoint import check_training
from launcher.checkpoint.names import leftovers, set_aside, step_of
from launcher.checkpoint.retention import first_nonfinite_step, is_stable, remove_or_warn
from launcher.config.config_sections import AUTO, NEWEST
from launcher.metrics.record import METRICS_FILE, STOP_EVENT, readable_records
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, CheckpointReader, list_checkpoints
from longctx.checkpoint_manifest import reject_other_formats
from longctx.conversion.checkpoint_checks import check_checkpoint_tensors
from longctx.errors import CheckpointError, DataError, LongCtxError

log = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
"""File name in a run folder."""
_RESUME_EVENT = "resume"
_START_FRESH = "start a new run: --run.resume no and another --run.output_dir."
_MOST_REASONS = 4
"""Damaged checkpoints listed in one message, so that it fits on a screen."""
_MOST_LETTERS = 240
"""Longest reason, in characters."""


def find_resume(run_folder: Path, resume: str, store: CheckpointStore | None = None) -> Path | None:
    """Return the checkpoint selected by ``run.resume``; None for "no", and for "auto" in a new run.

    A run is new if it has no checkpoint and never had one. Checkpoints that exist only in the run's ``store``, or are
    given by URL, are first copied into the run folder. Raise CheckpointError if the checkpoint does not exist.
    """
    if resume == "no":
        return None
    if is_url(resume):
        return _fetch(run_folder, resume)
    if resume not in NEWEST:
        folder = Path(resume)
        if not (folder / MANIFEST).is_file():
            reject_other_formats(folder)
            raise CheckpointError(
                f"run.resume={resume!r} is neither a checkpoint ({folder / MANIFEST} does not exist) nor one of "
                f"{', '.join(map(repr, NEWEST))} and 'no'.\n{_offer(run_folder)}"
            )
        return folder
    known = {step_of(path): path for path in list_checkpoints(run_folder)}
    # A new run does not warn: ``check_unused`` queries the store later and fails if it is unreachable.
    stored_steps = _stored_steps(store, should_warn=bool(known) or resume != AUTO)
    steps = sorted(known.keys() | stored_steps, reverse=True)
    if not steps and resume == AUTO:
        check_never_saved(run_folder)
        return None
    if not steps:
        raise CheckpointError(_not_found_message(run_folder, resume, store))
    return _newest(run_folder, resume, known, store if stored_steps else None, steps=steps)


def _newest(
    run_folder: Path, resume: str, known: Mapping[int, Path], store: CheckpointStore | None, *, steps: list[int]
) -> Path:
    """Return the newest good checkpoint. Raise CheckpointError with the reasons if all are damaged.

    Steps missing from ``known``, or damaged locally, are fetched from the ``store``.
    """
    # "latest" trusts the files: loading verifies the hashes and reports a damaged one.
    verify_files, newest_valid = resume != "latest", None
    reasons: list[str] = []
    before = math.inf
    # Newest first. Intact files are not enough: if training became non-finite right after a save, the saved weights may
    # already be bad. Such a checkpoint counts only if a later step or a validation has proved it; otherwise the search
    # goes on, and the newest intact checkpoint remains as the last resort.
    for step in steps:
        next_step, before = before, step
        path = known.get(step)
        if verify_files and path is not None and (problems := problems_of(path)):
            reason = _on_one_line(problems).removeprefix(f"{path}/").removeprefix(f"{path}: ")
            log.warning("Skipped %s: %s", path, reason)
            reasons.append(f"{path.name}: {reason}")
            path = None
        path = path or _fetch_or_warn(run_folder, step, store, reasons)
        if path is None:
            continue
        if not verify_files or is_stable(path, CheckpointReader(path).manifest["hash"]):
            return path
        nonfinite_step = first_nonfinite_step(run_folder, step, next_step)
        if nonfinite_step is None:
            log.info("%s is intact; no later step has proved it yet.", path)
            return path
        log.warning("Skipped %s: step %d after it was not finite, and no step has proved it.", path, nonfinite_step)
        newest_valid = newest_valid or path
    if newest_valid is None:
        raise CheckpointError(_all_invalid_message(run_folder, resume, store, reasons))
    log.warning("No other checkpoint is good: %s is used anyway.", newest_valid)
    return newest_valid


def _stored_steps(store: CheckpointStore | None, *, should_warn: bool) -> set[int]:
    """Return the checkpoint steps in a store; empty if it is unreachable, with a warning if ``should_warn``."""
    if store is None:
        return set()
    try:
        return set(store.checkpoints())
    except DataError as error:
        if should_warn:
            log.warning("checkpoint.store: %s\nOnly the run's folder is searched.", error)
        return set()


def _fetch_or_warn(run_folder: Path, step: int, store: CheckpointStore | None, reasons: list[str]) -> Path | None:
    """Copy a checkpoint from the store and return its folder. On failure, warn, add to ``reasons`` and return None."""
    if store is None:
        return None
    try:
        path = store.fetch(step, run_folder)
    except LongCtxError as error:
        reason = _on_one_line([str(error)])
        log.warning("Skipped step_%06d of %s: %s", step, store, reason)
        reasons.append(f"step_{step:06d} of {store}: {reason}")
        return None
    log.info("Copied %s from %s: all hashes match.", path, store)
    return path


def _fetch(run_folder: Path, address: str) -> Path:
    """Copy the checkpoint at a URL, or the newest one below a run's URL, into the run folder."""
    store, step = find_address(address)
    if step is None:
        stored_steps = store.checkpoints()
        if not stored_steps:
            raise CheckpointError(f"run.resume={address!r}: no checkpoint in {store}/{CHECKPOINTS}.")
        step = max(stored_steps)
    path = store.fetch(step, run_folder)
    log.info("Copied %s from %s: all hashes match.", path, store)
    return path


def remove_checkpoint_leftovers(run_folder: Path) -> None:
    """Remove and log leftovers from killed saves, killed removals and earlier resumes. No save may be in progress."""
    for leftover in leftovers(run_folder, is_running=False):
        if remove_or_warn(leftover.path):
            log.info("Removed %s: %s.", leftover.path, leftover.description)


def set_aside_newer(run_folder: Path, step: int) -> None:
    """Rename checkpoints after ``step`` to ``*.discarded``: the resumed run replaces that history."""
    for path in list_checkpoints(run_folder):
        if step_of(path) > step:
            set_aside(path)


def problems_of(path: Path) -> list[str]:
    """Return a checkpoint's problems. Reads every byte, unless the manifest is already invalid."""
    # Hashes are no signature, because anyone can compute them. The manifest must also describe a model and a training
    # state that a run can load.
    try:
        reader = CheckpointReader(path)
        # By arithmetic and names: cheap even if a manifest claims huge sizes.
        check_checkpoint_tensors(reader)
        check_training(reader)
        problems = reader.verify()
        if not problems:
            reader.check_entries()
    except LongCtxError as error:
        return [str(error)]
    return problems


def _on_one_line(problems: list[str]) -> str:
    """Shorten problems to one log line: a damaged checkpoint may have one per file."""
    first = problems[0].splitlines()[0]
    if len(first) > _MOST_LETTERS:
        first = f"{first[:_MOST_LETTERS]}…"
    if len(problems) > 1:
        first += f"; and {len(problems) - 1} more (longctx checkpoint verify)"
    return first


def _all_invalid_message(run_folder: Path, resume: str, store: CheckpointStore | None, reasons: list[str]) -> str:
    """Build the error message for a run with only unusable checkpoints."""
    lines = [f"run.resume={resume!r}, but no checkpoint in {run_folder / CHECKPOINTS} can be resumed:"]
    lines += [f"  {reason}" for reason in reasons[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        lines.append(f"  and {len(reasons) - _MOST_REASONS} older ones.")
    if store is not None:
        lines.append(f"{store} has no intact checkpoint either.")
    lines.append(f"No file was changed. Restore an intact copy of one, or {_START_FRESH}")
    return "\n".join(lines)


def _not_found_message(run_folder: Path, resume: str, store: CheckpointStore | None) -> str:
    neither = ""
    if store is not None:
        neither = f" {store} holds none either."
    return (
        f"run.resume={resume!r}, but {run_folder / CHECKPOINTS} holds no committed checkpoint.{neither}\n"
        f"Give a checkpoint folder, or {_START_FRESH}"
    )


def _offer(run_folder: Path) -> str:
    """Build the hint that lists the checkpoints the user can name instead."""
    known = [p.name for p in list_checkpoints(run_folder)]
    if not known:
        return f"{run_folder / CHECKPOINTS} holds none either; {_START_FRESH}"
    return f"Checkpoints of this run: {', '.join(known)}, or --run.resume latest."


# A run without a checkpoint may start at step 0 only if it never saved one. Otherwise its checkpoints were lost, and
# the user must decide.


def check_never_saved(run_folder: Path) -> None:
    """Raise CheckpointError if the run has no committed checkpoint but once had one."""
    trace = _remains(run_folder) or _recorded(run_folder)
    if trace:
        raise CheckpointError(
            f"run.resume='auto': {run_folder / CHECKPOINTS} holds no committed checkpoint, but the run had "
            f"one: {trace}.\nThe run does not restart from step 0 by itself, and no file was changed. Restore "
            f"the checkpoints (is the disk mounted?), or {_START_FRESH}"
        )


def _remains(run_folder: Path) -> str:
    """Describe a former checkpoint's remains on disk, or return an empty string."""
    # Only complete checkpoints get this name: killed saves leave folders that start with a dot.
    for path in sorted((run_folder / CHECKPOINTS).glob("step_*")):
        if path.name.endswith(".discarded"):
            return f"an earlier start set {path.name} aside"
        return f"{path.name} exists without its {MANIFEST}"
    return ""


def _recorded(run_folder: Path) -> str:
    """Describe evidence in the metrics for an earlier checkpoint, or return an empty string."""
    last = 0
    for record in readable_records(run_folder / METRICS_FILE):
        step, event = record["step"], record.get("event")
        if event in (_RESUME_EVENT, STOP_EVENT):
            return f"{METRICS_FILE} records a {event} at step {step}, which needs a checkpoint"
        last = max(last, step)
    every = _save_interval(run_folder)
    # The second save starts after the first commit, and step 2 * every is recorded before that. Any later step
    # therefore implies a committed checkpoint.
    if every and last > 2 * every:
        return f"{METRICS_FILE} reaches step {last}, with checkpoint.every_steps={every}"
    return ""


def _save_interval(run_folder: Path) -> int:
    """Return ``checkpoint.every_steps`` from the previous start; 0 if unknown."""
    section = checkpoint_section(run_folder)
    every = section.get("every_steps", 0) if isinstance(section, dict) else 0
    if type(every) is not int:
        return 0
    return every


def checkpoint_section(run_folder: Path) -> Any:
    """Return the ``checkpoint`` section in a run's ``config.toml``; None if the file is unreadable."""
    try:
        return tomllib.loads((run_folder / CONFIG_FILE).read_text()).get("checkpoint", {})
    except (OSError, ValueError):
        return None
