"""Remove checkpoints so that no moment of it leaves one that looks whole and is not."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longctx.checkpoint_format import CHECKPOINTS

_REMOVED = "removed"
"""How the name of a folder ends that is being removed."""
_SAVING_SECONDS = 3600.0
"""A save whose folder was written to within this time may be under way."""


@dataclass(frozen=True)
class Leftover:
    """What is no checkpoint any more, or never became one."""

    path: Path
    what: str


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


def kept_steps(steps: Sequence[int], *, last: int, every: int) -> set[int]:
    """The newest ``last`` of these steps, and those that ``every`` divides (0: none)."""
    kept = set(sorted(steps)[-last:])
    return kept | {step for step in steps if every and step % every == 0}


def leftovers(run: Path) -> list[Leftover]:
    """Saves and removals that were killed, and checkpoints that a resumed run set aside."""
    found = []
    folder = run / CHECKPOINTS
    for path in sorted(folder.glob(f".step_*.{_REMOVED}")):
        found.append(Leftover(path, "a removal that was killed"))
    for path in sorted(folder.glob(".step_*.partial")):
        newest = max((inner.stat().st_mtime for inner in [path, *path.iterdir()]), default=0.0)
        if time.time() - newest > _SAVING_SECONDS:
            found.append(Leftover(path, "a save that was killed"))
    for path in sorted(folder.glob("step_*.discarded")):
        found.append(Leftover(path, "set aside when the run went on from an earlier one"))
    return found
