"""Checkpoint paths: the final name once committed, a hidden name while being written or removed."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longctx.files import CHECKPOINTS

_REMOVED = "removed"
"""Suffix for folders that are being removed."""
_SAVING_SECONDS = 3600.0
"""A save folder modified within this time may still be in use."""


def folder_of(run_folder: Path, step: int) -> Path:
    """Return a step's checkpoint folder."""
    return run_folder / CHECKPOINTS / f"step_{step:06d}"


def step_of(folder: Path) -> int:
    """Return a checkpoint's step, parsed from its folder name."""
    return int(folder.name.removeprefix("step_"))


def hidden_folder(target: Path) -> Path:
    """Return the folder used until commit; its hidden name keeps readers from taking it for a checkpoint."""
    return target.with_name(f".{target.name}.partial")


def make_empty(folder: Path) -> None:
    """Create an empty folder, deleting leftovers from a killed save."""
    shutil.rmtree(folder, ignore_errors=True)
    # Do not create the run's folder: if it is missing, it was removed during the run.
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir()


def set_aside(path: Path) -> None:
    """Rename a checkpoint to ``*.discarded``, replacing an older one with that name."""
    aside = path.with_name(f"{path.name}.discarded")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def remove_checkpoint(path: Path) -> None:
    """Rename a checkpoint's folder to a hidden name, then remove it. Raise OSError if the file system refuses."""
    if path.name.startswith("."):
        # Hidden already: no reader takes it for a checkpoint.
        shutil.rmtree(path)
        return
    hidden = path.with_name(f".{path.name}.{_REMOVED}")
    # Left by a killed removal.
    shutil.rmtree(hidden, ignore_errors=True)
    # A rename is atomic: a killed removal leaves no folder with a manifest and half of its files.
    path.rename(hidden)
    shutil.rmtree(hidden)


@dataclass(frozen=True)
class Leftover:
    """Discarded or unfinished checkpoint folder."""

    path: Path
    description: str


def leftovers(run: Path, *, is_running: bool) -> list[Leftover]:
    """Return leftovers: killed saves, killed removals, and checkpoints set aside by a resume.

    While the run ``is_running``, skip saves written to within the last hour: they may still be in progress.
    """
    found = []
    folder = run / CHECKPOINTS
    for path in sorted(folder.glob(f".step_*.{_REMOVED}")):
        found.append(Leftover(path, "left by a killed removal"))
    for path in sorted(folder.glob(".step_*.partial")):
        # A save in progress differs from a killed one only by its age.
        if not is_running or time.time() - _last_written(path) > _SAVING_SECONDS:
            found.append(Leftover(path, "left by a killed save"))
    for path in sorted(folder.glob("step_*.discarded")):
        found.append(Leftover(path, "set aside when the run resumed from an earlier one"))
    return found


def _last_written(folder: Path) -> float:
    # A folder's mtime changes only when entries are added or removed, so the files' own times count too.
    times = [folder.stat().st_mtime]
    for inner in folder.iterdir():
        # A save in progress may rename or remove it.
        with suppress(FileNotFoundError):
            times.append(inner.stat().st_mtime)
    return max(times)
