"""The checkpoints in a run folder: find what a run goes on from, set aside, clear up."""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.stores.urls import is_url
from launcher.checkpoint.load import check_training
from launcher.checkpoint.names import leftovers, set_aside, step_of
from launcher.checkpoint.retention import broken_step_after, is_proved, remove_or_warn
from launcher.checkpoint.store import Store, find_address
from launcher.config.sections import AUTO, NEWEST
from launcher.metrics.record import METRICS_FILE, STOP_EVENT, readable_records
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST, CheckpointReader, list_checkpoints
from longctx.checkpoint_manifest import refuse_deepspeed
from longctx.conversion.checks import check_tensors
from longctx.errors import CheckpointError, DataError, LongCtxError

log = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
"""Of a run folder."""
_RESUME_EVENT = "resume"
_START_ANEW = "start anew: --run.resume no and another --run.output_dir."
_MOST_REASONS = 4
"""Checkpoints whose damage one message tells; a screen has room for no more."""
_MOST_LETTERS = 240
"""Of one reason."""


def find_resume(run_folder: Path, resume: str, store: Store | None = None) -> Path | None:
    """The checkpoint that ``run.resume`` names; None for "no". CheckpointError when there is none such.

    None for "auto" too, where a run begins: no checkpoint of it is there, and none ever was.
    One that the run's ``store`` has, and its folder not, is copied here. So is one that ``resume`` names by its URL.
    """
    if resume == "no":
        return None
    if is_url(resume):
        return _fetch(run_folder, resume)
    if resume not in NEWEST:
        folder = Path(resume)
        if not (folder / MANIFEST).is_file():
            refuse_deepspeed(folder)
            raise CheckpointError(
                f"run.resume={resume!r} is no checkpoint: {folder / MANIFEST} does not exist, nor is it one of "
                f"{', '.join(map(repr, NEWEST))} and 'no'.\n{_offer(run_folder)}"
            )
        return folder
    known = {step_of(path): path for path in list_checkpoints(run_folder)}
    # A run that begins asks its store again, and is refused where that does not answer.
    there = _steps_there(store, is_told=bool(known) or resume != AUTO)
    steps = sorted(known.keys() | there, reverse=True)
    if not steps and resume == AUTO:
        check_never_saved(run_folder)
        return None
    if not steps:
        raise CheckpointError(_none_found(run_folder, resume, store))
    return _newest(run_folder, resume, known, store if there else None, steps=steps)


def _newest(run_folder: Path, resume: str, known: Mapping[int, Path], store: Store | None, *, steps: list[int]) -> Path:
    """The newest of these whose files are whole, unless training broke right after it and nothing proves it.

    Those that are not ``known`` here, or damaged, are looked for in the ``store``. CheckpointError, with why, where
    none is whole.
    """
    # "latest" trusts the files: loading checks their hashes anyway, and then says which one is damaged.
    is_checked, newest_whole = resume != "latest", None
    reasons: list[str] = []
    before = math.inf
    for step in steps:
        next_step, before = before, step
        path = known.get(step)
        if is_checked and path is not None and (problems := problems_of(path)):
            reason = _on_one_line(problems).removeprefix(f"{path}/").removeprefix(f"{path}: ")
            log.warning("%s is passed over: %s", path, reason)
            reasons.append(f"{path.name}: {reason}")
            path = None
        path = path or _brought(run_folder, step, store, reasons)
        if path is None:
            continue
        if not is_checked or is_proved(path, CheckpointReader(path).manifest["hash"]):
            return path
        broken = broken_step_after(run_folder, step, next_step)
        if broken is None:
            log.info("%s is whole; no later step has proved it yet.", path)
            return path
        log.warning("%s is passed over: step %d after it was not finite, and no step has proved it.", path, broken)
        newest_whole = newest_whole or path
    if newest_whole is None:
        raise CheckpointError(_none_good(run_folder, resume, store, reasons))
    log.warning("No other checkpoint is good: %s is taken all the same.", newest_whole)
    return newest_whole


def _steps_there(store: Store | None, *, is_told: bool) -> set[int]:
    """The checkpoints of a store; none, and where that ``is_told`` a warning, if it cannot be reached."""
    if store is None:
        return set()
    try:
        return set(store.committed())
    except DataError as error:
        if is_told:
            log.warning("checkpoint.store: %s\nOnly the run's folder is looked at.", error)
        return set()


def _brought(run_folder: Path, step: int, store: Store | None, reasons: list[str]) -> Path | None:
    """A checkpoint copied here from the store, whole; None, a warning and one more of the ``reasons`` if that fails."""
    if store is None:
        return None
    try:
        path = store.fetch(step, run_folder)
    except LongCtxError as error:
        reason = _on_one_line([str(error)])
        log.warning("step_%06d of %s is passed over: %s", step, store, reason)
        reasons.append(f"step_{step:06d} of {store}: {reason}")
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
    """What is wrong with a checkpoint; every byte of its files is read, unless its manifest says enough.

    Its hashes alone prove nothing, for anybody can form them: the manifest has to be one that a run can load.
    """
    try:
        reader = CheckpointReader(path)
        # By arithmetic and names, so whatever sizes a manifest claims, they cost nothing.
        check_tensors(reader)
        check_training(reader)
        problems = reader.verify()
        if not problems:
            reader.check_entries()
    except LongCtxError as error:
        return [str(error)]
    return problems


def _on_one_line(problems: list[str]) -> str:
    """Problems for the log, cut to a line: of a damaged checkpoint every file may be one."""
    first = problems[0].splitlines()[0]
    if len(first) > _MOST_LETTERS:
        first = f"{first[:_MOST_LETTERS]}…"
    if len(problems) > 1:
        first += f"; and {len(problems) - 1} more (longctx checkpoint verify)"
    return first


def _none_good(run_folder: Path, resume: str, store: Store | None, reasons: list[str]) -> str:
    """The message where checkpoints are there, and a run can go on from none of them."""
    lines = [f"run.resume={resume!r}, and no checkpoint of {run_folder / CHECKPOINTS} can be gone on from:"]
    lines += [f"  {reason}" for reason in reasons[:_MOST_REASONS]]
    if len(reasons) > _MOST_REASONS:
        lines.append(f"  and {len(reasons) - _MOST_REASONS} older ones.")
    if store is not None:
        lines.append(f"{store} has none that is whole either.")
    lines.append(f"Nothing was changed. Put a whole copy of one there, or {_START_ANEW}")
    return "\n".join(lines)


def _none_found(run_folder: Path, resume: str, store: Store | None) -> str:
    neither = ""
    if store is not None:
        neither = f" Nor does {store}."
    return (
        f"run.resume={resume!r}, but {run_folder / CHECKPOINTS} holds no committed checkpoint.{neither}\n"
        f"Name a checkpoint folder, or {_START_ANEW}"
    )


def _offer(run_folder: Path) -> str:
    """The checkpoints that a user can name instead."""
    known = [p.name for p in list_checkpoints(run_folder)]
    if not known:
        return f"{run_folder / CHECKPOINTS} holds none either; {_START_ANEW}"
    return f"Checkpoints of this run: {', '.join(known)}, or --run.resume latest."


# Whether a run without a checkpoint may begin: one that has saved before has lost something, and must not.


def check_never_saved(run_folder: Path) -> None:
    """CheckpointError where a run whose folder has no committed checkpoint once had one."""
    lost = _remains(run_folder) or _recorded(run_folder)
    if lost:
        raise CheckpointError(
            f"run.resume='auto', and {run_folder / CHECKPOINTS} holds no committed checkpoint, but the run has had "
            f"one: {lost}.\nIt does not begin anew by itself, and nothing was changed. Put the checkpoints back (is "
            f"the disk mounted?), or {_START_ANEW}"
        )


def _remains(run_folder: Path) -> str:
    """What is left of a checkpoint; empty where nothing is."""
    # Saves that were killed begin with a dot. A folder of this name is renamed to it once it is whole.
    for path in sorted((run_folder / CHECKPOINTS).glob("step_*")):
        if path.name.endswith(".discarded"):
            return f"{path.name} is there, which an earlier start has set aside"
        return f"{path.name} is there, without its {MANIFEST}"
    return ""


def _recorded(run_folder: Path) -> str:
    """What the metrics say of an earlier checkpoint; empty where they speak of none."""
    last = 0
    for record in readable_records(run_folder / METRICS_FILE):
        step, event = record["step"], record.get("event")
        if event in (_RESUME_EVENT, STOP_EVENT):
            return f"{METRICS_FILE} has a {event} at step {step}, which needs a checkpoint"
        last = max(last, step)
    every = _save_interval(run_folder)
    # The second save waits until the first one is committed, and step 2 * every is recorded before that.
    if every and last > 2 * every:
        return f"{METRICS_FILE} reaches step {last}, with checkpoint.every_steps={every}"
    return ""


def _save_interval(run_folder: Path) -> int:
    """The ``checkpoint.every_steps`` of the start before; 0 where nothing says it."""
    section = checkpoint_section(run_folder)
    every = section.get("every_steps", 0) if isinstance(section, dict) else 0
    if type(every) is not int:
        return 0
    return every


def checkpoint_section(run_folder: Path) -> Any:
    """Return what a run's ``config.toml`` has as its section ``checkpoint``; None if it cannot be read."""
    try:
        return tomllib.loads((run_folder / CONFIG_FILE).read_text()).get("checkpoint", {})
    except (OSError, ValueError):
        return None
