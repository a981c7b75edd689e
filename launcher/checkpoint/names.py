"""Where a checkpoint is: under its own name once it is committed, hidden until then."""

from __future__ import annotations

import shutil
from pathlib import Path

from longctx.files import CHECKPOINTS


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
