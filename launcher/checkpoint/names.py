"""Where a checkpoint is: under its own name while it is whole, hidden while it is written or removed."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longctx.files import CHECKPOINTS

_REMOVED = "removed"
"""How the name of a folder ends that is being removed."""
_SAVING_SECONDS = 3600.0
"""A save whose folder was written to within this time may be under way."""


def folder_of(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of a step will be."""
    return run_folder / CHECKPOINTS / f"step_{step:06d}"


def step_of(folder: Path) -> int:
    """The step of a checkpoint, by its folder's name."""
    return int(folder.name.removeprefix("step_"))


def hidden_folder(target: Path) -> Path:
    """Where it is until it is committed: no reader takes that for a checkpoint."""
    return target.with_name(f".{target.name}.partial")


def make_empty(folder: Path) -> None:
    """Make the folder anew, without what a killed save has left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    # Not the run's folder: one that is gone was removed while the run went on.
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir()


def set_aside(path: Path) -> None:
    """Rename a checkpoint to ``*.discarded``, in place of an older one of that name."""
    aside = path.with_name(f"{path.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint's folder, under another name first; OSError where the file system refuses."""
    if path.name.startswith("."):
        # Nobody takes it for a checkpoint.
        shutil.rmtree(path)
        return
    hidden = path.with_name(f".{path.name}.{_REMOVED}")
    # Of a removal that was killed.
    shutil.rmtree(hidden, ignore_errors=True)
    # In one stroke: a removal that is killed leaves no folder with a manifest and half of its files.
    path.rename(hidden)
    shutil.rmtree(hidden)


@dataclass(frozen=True)
class Leftover:
    """What is no checkpoint any more, or never became one."""

    path: Path
    what: str


def leftovers(run: Path, *, is_running: bool) -> list[Leftover]:
    """Saves and removals that were killed, and checkpoints that a resumed run set aside.

    Of a run that ``is_running``, as far as one knows, a save that was written to within the last hour is none.
    """
    found = []
    folder = run / CHECKPOINTS
    for path in sorted(folder.glob(f".step_*.{_REMOVED}")):
        found.append(Leftover(path, "a removal that was killed"))
    for path in sorted(folder.glob(".step_*.partial")):
        if not is_running or time.time() - _last_written(path) > _SAVING_SECONDS:
            found.append(Leftover(path, "a save that was killed"))
    for path in sorted(folder.glob("step_*.discarded")):
        found.append(Leftover(path, "set aside when the run went on from an earlier one"))
    return found


def _last_written(folder: Path) -> float:
    times = [folder.stat().st_mtime]
    for inner in folder.iterdir():
        # A save that is under way may give it another name, or remove it.
        with suppress(FileNotFoundError):
            times.append(inner.stat().st_mtime)
    return max(times)
