"""The verbs ``checkpoint list|verify|prune|export``."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from launcher.cli.cli_output import Json, human_bytes, note, print_json, print_line, progress, table
from launcher.cli.shared_options import choice_option
from launcher.cluster.exit import DONE, FAILED
from launcher.wording import format_count, short_duration
from longctx.errors import CheckpointError, ConfigError, LongCtxError

if TYPE_CHECKING:  # torch takes a second to import, and the help must not wait for it
    from launcher.checkpoint.health import Summary
    from launcher.checkpoint.retention import Retention, RetentionCandidate

_UNKNOWN = "–"
_COLUMNS = ("step", "size", "age", "health", "stays", "ranks", "dtype", "folder")


def list_run_checkpoints(
    run: Annotated[Positional[str], arg(metavar="RUN")], *, check: bool = False, json: Json = False
) -> int:
    """List a run's committed checkpoints, oldest first: sizes, ages, health, and why each stays.

    Reads only manifests and file sizes; `checkpoint verify` reads every byte and names the damage.

    Args:
        run: Run folder, or its URL in a store (s3://, gs://).
        check: Read every byte and compare hashes; the exit code is 1 if a file is damaged.
    """
    from data_pipeline.stores.urls import is_url
    from launcher.checkpoint.checkpoint_store import find_run
    from launcher.checkpoint.health import INVALID, kept_steps, kept_steps_in_store, stored_summaries, summaries

    if is_url(run):
        store = find_run(run)
        rows, stay = stored_summaries(store, check=check), kept_steps_in_store(store)
    else:
        # A folder that is not a run is an error, not an empty table.
        _checkpoints_of(Path(run))
        rows, stay = summaries(Path(run), check=check), kept_steps(Path(run))
    if json:
        print_json([_summary_record(row, stay) for row in rows])
    elif not rows:
        print_line(f"{run} holds no committed checkpoint yet.")
    else:
        print_line(table(_COLUMNS, [_cells(row, stay) for row in rows]))
        for row in rows:
            if row.problem:
                note(f"warning: {row.folder.name}: {row.problem}")
    if check and any(row.health == INVALID for row in rows):
        return FAILED
    return DONE


def verify_checkpoints(folder: Annotated[Positional[str], arg(metavar="DIR")], *, json: Json = False) -> int:
    """Read every byte of checkpoints and name every damaged file.

    Sizes, hashes and tensors are compared with the manifest, and unlisted files are named. The exit code is 1 if any
    file is damaged or unlisted.

    Args:
        folder: Checkpoint, or run folder: all its checkpoints. Or the URL of either (s3://, gs://).
    """
    from data_pipeline.stores.urls import is_url

    if is_url(folder):
        rows = _stored_problems(folder)
    else:
        rows = [{"folder": str(path), "problems": _problems(path)} for path in _to_verify(Path(folder))]
    invalid_rows = [row for row in rows if row["problems"]]
    if json:
        print_json(rows)
    else:
        for row in rows:
            if not row["problems"]:
                print_line(f"{row['folder']} is intact.")
                continue
            print_line(f"{row['folder']} is damaged:")
            for problem in row["problems"]:
                print_line(indent(problem, "  "))
        # If all are damaged, there is no checkpoint to continue from.
        if invalid_rows and len(invalid_rows) < len(rows):
            print_line("Resume from the newest intact one with --run.resume newest-good.")
    if invalid_rows:
        return FAILED
    return DONE


def prune(
    run: Annotated[Positional[str], arg(metavar="RUN")],
    *,
    keep_last: int,
    keep_every: int = 0,
    keep_best: int = 0,
    dry_run: bool = False,
    json: Json = False,
) -> None:
    """Remove a run's old checkpoints, and leftovers from killed saves and resumes.

    Kept are the newest ones, the newest proved one and, with --keep-every and --keep-best, periodic ones and those with
    the lowest held-out loss. Each is renamed before its files are deleted, so a killed removal leaves no folder that
    looks complete. If the run is still active, a save in progress is left alone.

    Args:
        run: Run folder, or its URL in a store (s3://, gs://).
        keep_last: Newest checkpoints to keep, at least 1.
        keep_every: Also keep steps divisible by this number; 0 disables this.
        keep_best: Also keep this many with the lowest held-out loss at their own step; 0 disables this.
        dry_run: Print the removals without doing them.
    """
    from data_pipeline.stores.urls import is_url
    from launcher.checkpoint.retention import Retention

    # At least one newest checkpoint stays, so that the run can be resumed.
    limits = (("--keep-last", keep_last, 1), ("--keep-every", keep_every, 0), ("--keep-best", keep_best, 0))
    for name, value, least in limits:
        if value < least:
            raise ConfigError(f"{name} {value} must be at least {least}.")
    retention = Retention(last=keep_last, every=keep_every, best=keep_best)
    if is_url(run):
        removed, kept = _prune_store(run, retention, dry_run=dry_run)
    else:
        removed, kept = _prune(Path(run), retention, dry_run=dry_run)
    if json:
        print_json({"removed": removed, "kept": sorted(kept), "dry_run": dry_run})
        return
    action = "Removed"
    if dry_run:
        action = "Would remove"
    for row in removed:
        print_line(f"{action} {row['folder']}, {human_bytes(row['bytes'])}{row['why'] and ': '}{row['why']}.")
    total = human_bytes(sum(row["bytes"] for row in removed))
    print_line(
        f"{action} {total} in all; {format_count(len(kept), 'checkpoint')} kept: "
        f"{', '.join(map(str, sorted(kept))) or '–'}."
    )


def _prune(run: Path, retention: Retention, *, dry_run: bool) -> tuple[list[dict[str, Any]], set[int]]:
    """Remove the checkpoints in a run folder that are not kept; return them, and the kept steps."""
    from launcher.checkpoint.names import leftovers, remove_checkpoint
    from launcher.checkpoint.retention import RetentionCandidate
    from longctx.checkpoint_format import CheckpointReader

    candidates = [RetentionCandidate.of(folder) for folder in _checkpoints_of(run)]
    kept = _kept(candidates, retention, lambda one: CheckpointReader(one.folder))
    removals = [(one.folder, "") for one in candidates if one.step not in kept]
    removals += [(leftover.path, leftover.description) for leftover in leftovers(run, is_running=True)]
    removed = []
    for path, why in removals:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        if not dry_run:
            remove_checkpoint(path)
        removed.append({"folder": str(path), "bytes": size, "why": why})
    return removed, kept


def _prune_store(address: str, retention: Retention, *, dry_run: bool) -> tuple[list[dict[str, Any]], set[int]]:
    """Do the same for a run at an address, including unfinished checkpoints.

    The newest unfinished one may still be in progress and is left alone.
    """
    from launcher.checkpoint.checkpoint_store import find_run

    steps = find_run(address).steps()
    candidates = [stored.candidate(step) for step, stored in steps.items() if stored.is_complete]
    kept = _kept(candidates, retention, lambda one: steps[one.step].manifest())
    # A run may be sending to the store right now, which cannot be detected from here.
    newest = max((step for step, stored in steps.items() if not stored.is_complete), default=None)
    removed = []
    for step, stored in steps.items():
        if step in kept or step == newest:
            continue
        why = ""
        if not stored.is_complete:
            why = "never finished"
        if not dry_run:
            stored.remove()
        removed.append({"folder": str(stored.place), "bytes": stored.num_bytes, "why": why})
    return removed, kept


def _kept(
    candidates: Collection[RetentionCandidate],
    retention: Retention,
    read_manifest: Callable[[RetentionCandidate], object],
) -> set[int]:
    """Return the steps to keep. Raise CheckpointError if only other steps have a readable manifest."""
    # Retention counts damaged checkpoints like any other. Without this check, pruning could remove the last one that a
    # run can resume from.
    kept, readable = set(retention.reasons(list(candidates))), []
    for one in candidates:
        try:
            read_manifest(one)
        except LongCtxError:
            continue
        readable.append(one.step)
    if readable and not kept & set(readable):
        # Keeping this many of the newest includes the newest readable one.
        enough = sum(one.step >= readable[-1] for one in candidates)
        raise CheckpointError(
            f"no checkpoint to keep has a readable manifest; the one at step {readable[-1]} does.\n"
            f"Remove the damaged ones by hand, or try --keep-last {enough}."
        )
    return kept


def export(
    source: Annotated[Positional[str], arg(metavar="IN")],
    output: Annotated[Positional[Path], arg(metavar="OUT")],
    *,
    dtype: Annotated[str | None, choice_option("float32", "bfloat16", "float16")] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder, read back and verified: `convert --to hf`, which has more options.

    Args:
        source: Checkpoint, or run folder: its newest checkpoint. Or the URL of either (s3://, gs://).
        output: Folder to create.
        dtype: Dtype of the written weights, even if bits are lost.
    """
    from data_pipeline.stores.urls import is_url
    from launcher.cli.convert_command import convert

    if is_url(source):
        _export_stored(source, output, dtype)
    else:
        convert(Path(source), output, to="hf", dtype=dtype)


def _export_stored(address: str, output: Path, dtype: str | None) -> None:
    """Download a checkpoint next to ``output`` for the duration of its export."""
    from launcher.checkpoint.checkpoint_store import find_address
    from launcher.cli.convert_command import convert

    store, step = find_address(address)
    if step is None:
        step = max(store.checkpoints(), default=None)
    if step is None:
        raise CheckpointError(f"{store} holds no committed checkpoint to export.")
    # Use the disk that needs space for the export anyway.
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as name:
        with _byte_progress(f"copying {store}", store.of_step(step).num_bytes) as seen:
            folder = store.fetch(step, Path(name), seen=seen)
        convert(folder, output, to="hf", dtype=dtype)


@contextmanager
def _byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress over ``total`` bytes; yield a function that takes the number of further bytes."""
    done = 0
    with progress(label, total=total) as update:

        def seen(count: int) -> None:
            nonlocal done
            done += count
            update(done, note=human_bytes(done))

        yield seen


def _to_verify(folder: Path) -> list[Path]:
    """Return the checkpoints to verify, at least one. Raise CheckpointError otherwise."""
    from longctx.checkpoint_format import MANIFEST

    folders = [folder]
    if not (folder / MANIFEST).is_file():
        folders = _checkpoints_of(folder)
    if not folders:
        raise CheckpointError(f"{folder} holds no committed checkpoint to verify.")
    return folders


def _checkpoints_of(run: Path) -> list[Path]:
    """Return a run folder's committed checkpoints, oldest first. Raise CheckpointError if it is not a run folder."""
    from longctx import checkpoint_format
    from longctx.checkpoint_format import CHECKPOINTS, MANIFEST

    if (run / MANIFEST).is_file():
        raise CheckpointError(f"{run} is a checkpoint, not a run. Give the run's folder, which contains checkpoints/.")
    if not (run / CHECKPOINTS).is_dir() and not (run / "config.toml").is_file():
        reason = "does not exist"
        if run.is_dir():
            reason = "holds neither checkpoints/ nor a config.toml"
        raise CheckpointError(f"{run} is not a run folder: it {reason}. Give the run's run.output_dir.")
    return checkpoint_format.list_checkpoints(run)


def _summary_record(row: Summary, stay: dict[int, str] | None) -> dict[str, Any]:
    kept = None
    if stay is not None:
        kept = stay.get(row.step, "")
    return {
        "step": row.step,
        "folder": str(row.folder),
        "bytes": row.num_bytes,
        "age_seconds": round(row.age_seconds, 1),
        "health": row.health,
        "stays": kept,
        "ranks": row.ranks,
        "dtype": row.dtype,
        "problem": row.problem,
    }


def _cells(row: Summary, stay: dict[int, str] | None) -> list[str]:
    """Format a checkpoint as a table row, with a dash for unknown values."""
    size = kept = _UNKNOWN
    if row.num_bytes is not None:
        size = human_bytes(row.num_bytes)
    if stay is not None:
        kept = stay.get(row.step, "no")
    ranks, dtype = (str(value or _UNKNOWN) for value in (row.ranks, row.dtype))
    return [str(row.step), size, short_duration(row.age_seconds), row.health, kept, ranks, dtype, str(row.folder)]


def _problems(folder: Path) -> list[str]:
    """Return all problems in one checkpoint, reading its files one by one."""
    from launcher.checkpoint.load_checkpoint import check_training
    from longctx.checkpoint_format import CheckpointReader
    from longctx.conversion.checkpoint_checks import check_checkpoint_tensors

    try:
        reader = CheckpointReader(folder)
        check_checkpoint_tensors(reader)
        check_training(reader)
    except LongCtxError as error:
        return [str(error)]
    files = reader.manifest["files"]
    problems = [f"{name} is not in the manifest: remove it" for name in reader.extra_files()]
    problems += reader.proof_problems()
    with _byte_progress(f"reading {folder}", sum(entry["bytes"] for entry in files.values())) as seen:
        # File by file, so that the progress bar advances.
        for name, entry in files.items():
            problems += reader.verify([name])
            seen(entry["bytes"])
    if not problems:
        try:
            # Intact files may still contradict the manifest if their writer was faulty or malicious.
            reader.check_entries()
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _stored_problems(address: str) -> list[dict[str, Any]]:
    """Return the problems of one checkpoint at an address, or of all checkpoints in a run, reading every byte."""
    from launcher.checkpoint.checkpoint_store import find_address

    store, step = find_address(address)
    checkpoints = store.checkpoints()
    # Include a named step even if it is unfinished; it is then reported to have no manifest.
    if step is not None:
        checkpoints = {step: store.of_step(step)}
    if not checkpoints:
        raise CheckpointError(f"{store} holds no committed checkpoint to verify.")
    rows = []
    for stored in checkpoints.values():
        with _byte_progress(f"reading {stored.place}", stored.num_bytes) as seen:
            rows.append({"folder": str(stored.place), "problems": stored.verify(seen=seen)})
    return rows
