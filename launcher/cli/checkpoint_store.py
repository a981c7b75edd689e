"""``checkpoint list|verify|prune|export`` for checkpoints that are in an object store."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.cli.console import human_bytes, progress
from longctx.errors import CheckpointError

if TYPE_CHECKING:  # torch takes a second to import, which a help text is not to wait for
    from launcher.checkpoint.health import Summary
    from launcher.checkpoint.retention import Retention


def summaries(address: str, *, check: bool) -> tuple[list[Summary], dict[int, str] | None]:
    """The checkpoints of the run at an address, and which of them stay."""
    from launcher.checkpoint.health import staying_there, stored_summaries
    from launcher.checkpoint.store import find_run

    store = find_run(address)
    return stored_summaries(store, check=check), staying_there(store)


def problems(address: str) -> list[dict[str, Any]]:
    """What is wrong with a checkpoint at an address, or with each of a run's, every byte read."""
    from launcher.checkpoint.store import find_address

    store, step = find_address(address)
    there = store.committed()
    # Of a step that was named also what was never finished: it is then said to have no manifest.
    if step is not None:
        there = {step: store.of_step(step)}
    if not there:
        raise CheckpointError(f"{store} holds no committed checkpoint to verify.")
    rows = []
    for stored in there.values():
        done = 0
        with progress(f"reading {stored.place}", total=stored.num_bytes) as update:

            def see(count: int) -> None:
                nonlocal done
                done += count
                update(done, note=human_bytes(done))

            rows.append({"folder": str(stored.place), "problems": stored.verify(seen=see)})
    return rows


def prune(address: str, retention: Retention, *, dry_run: bool) -> tuple[list[dict[str, Any]], set[int]]:
    """Remove what does not stay of a run at an address, and what was never finished; returns these and what stays.

    The newest of those that never were finished may be under way: it is left alone.
    """
    from launcher.checkpoint.store import find_run

    steps = find_run(address).steps()
    candidates = {step: stored.candidate(step) for step, stored in steps.items() if stored.is_committed}
    kept = set(retention.reasons(list(candidates.values())))
    readable = [step for step in candidates if _is_readable(steps[step])]
    if readable and not kept & set(readable):
        raise CheckpointError(
            f"of the checkpoints that would be kept none has a manifest that can be read; step {readable[-1]} has.\n"
            f"Try --keep-last {sum(step >= readable[-1] for step in candidates)}."
        )
    # Whoever runs it need not know whether a run sends to the store at this time.
    unfinished = [step for step, stored in steps.items() if not stored.is_committed]
    removed = []
    for step, stored in steps.items():
        if step in kept or step == max(unfinished, default=None):
            continue
        why = ""
        if not stored.is_committed:
            why = "never finished"
        if not dry_run:
            stored.remove()
        removed.append({"folder": str(stored.place), "bytes": stored.num_bytes, "why": why})
    return removed, kept


def export(address: str, output: Path, dtype: str | None) -> None:
    """Copy a checkpoint here, for as long as it takes to export it beside ``output``."""
    from launcher.checkpoint.store import find_address
    from launcher.cli.convert import convert

    store, step = find_address(address)
    if step is None:
        step = max(store.committed(), default=None)
    if step is None:
        raise CheckpointError(f"{store} holds no committed checkpoint to export.")
    # On the disk that needs room for the export anyway.
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as name:
        done = 0
        with progress(f"copying {store}", total=store.of_step(step).num_bytes) as update:

            def see(count: int) -> None:
                nonlocal done
                done += count
                update(done, note=human_bytes(done))

            folder = store.fetch(step, Path(name), seen=see)
        convert(folder, output, to="hf", dtype=dtype)


def _is_readable(stored: Any) -> bool:
    """Whether the manifest of a checkpoint is whole."""
    try:
        stored.manifest()
    except CheckpointError:
        return False
    return True
