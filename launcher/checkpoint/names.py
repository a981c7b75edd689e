"""Paths of checkpoints: the final name when complete, a hidden name while written or removed."""

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
    """Return the folder of the checkpoint of a step."""
    return run_folder / CHECKPOINTS / f"step_{step:06d}"


def step_of(folder: Path) -> int:
    """Return the step of a checkpoint from its folder's name."""
    return int(folder.name.removeprefix("step_"))


def hidden_folder(target: Path) -> Path:
    """Return the folder used until commit. Its name is hidden, so that no reader takes it for a checkpoint."""
    return target.with_name(f".{target.name}.partial")


def make_empty(folder: Path) -> None:
    """Create the folder empty, removing the remains of a killed save."""
    shutil.rmtree(folder, ignore_errors=True)
    # Do not create the run's folder: if it is missing, it was removed during the run.
    folder.parent.mkdir(exist_ok=True)
    folder.mkdir()


def set_aside(path: Path) -> None:
    """Rename a checkpoint to ``*.discarded``, replacing an older one of that name."""
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
    """Folder of a discarded or unfinished checkpoint."""

    path: Path
    what: str


def leftovers(run: Path, *, is_running: bool) -> list[Leftover]:
    """Return killed saves, killed removals and checkpoints that a resumed run set aside.

    If the run ``is_running``, a save written to within the last hour may be under way and is left out.
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
        # A save under way may rename or remove it.
        with suppress(FileNotFoundError):
            times.append(inner.stat().st_mtime)
    return max(times)
