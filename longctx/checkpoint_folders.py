"""Where a run's checkpoints are: names and paths alone."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""

_COMMITTED = re.compile(r"step_(\d{6,})")


def list_checkpoints(run_folder: str | Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first: folders ``checkpoints/step_NNNNNN`` that have a manifest."""
    steps: list[tuple[int, Path]] = []
    for path in (Path(run_folder) / CHECKPOINTS).glob("step_*"):
        # Not ``step_000100.discarded``, and no folder that somebody has begun to copy.
        match = _COMMITTED.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            steps.append((int(match[1]), path))
    # By number, not by name: seven digits come after six.
    return [path for _, path in sorted(steps)]
