"""Whether a run without a checkpoint may begin: one that has saved before has lost something, and must not."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from launcher.metrics.record import METRICS_FILE, STOP_EVENT, readable_records
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST
from longctx.errors import CheckpointError

_CONFIG_FILE = "config.toml"
"""Of a run folder."""
_RESUME_EVENT = "resume"


def check_never_saved(run_folder: Path) -> None:
    """CheckpointError where a run whose folder has no committed checkpoint once had one."""
    lost = _remains(run_folder) or _recorded(run_folder)
    if lost:
        raise CheckpointError(
            f"run.resume='auto', and {run_folder / CHECKPOINTS} holds no committed checkpoint, but the run has had "
            f"one: {lost}.\nIt does not begin anew by itself, and nothing was changed. Put the checkpoints back (is "
            "the disk mounted?), or start anew: --run.resume no and another --run.output_dir."
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
    try:
        section: Any = tomllib.loads((run_folder / _CONFIG_FILE).read_text()).get("checkpoint", {})
        every = section.get("every_steps", 0)
    except (OSError, ValueError, AttributeError):
        return 0
    if type(every) is not int:
        return 0
    return every
