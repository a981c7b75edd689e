"""The verbs ``checkpoint list|verify``."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Annotated, Any

from tyro.conf import Positional, arg

from launcher.cli.console import Json, human_bytes, note, progress, say, say_json, table
from launcher.cluster.exit import DONE, FAILED
from longctx.errors import CheckpointError, LongCtxError

_COLUMNS = {"step": "step", "bytes": "size", "ranks": "ranks", "dtype": "dtype", "folder": "folder"}


def list_checkpoints(run: Annotated[Positional[Path], arg(metavar="RUN")], *, json: Json = False) -> None:
    """List the committed checkpoints of a run, oldest first.

    Only manifests are read; `checkpoint verify` reads the files.

    Args:
        run: Run folder.
    """
    rows = [_summary(folder) for folder in _checkpoints_of(run)]
    if json:
        say_json(rows)
        return
    if not rows:
        say(f"{run} holds no committed checkpoint yet.")
        return
    say(table(list(_COLUMNS.values()), [[_cell(key, row[key]) for key in _COLUMNS] for row in rows]))
    for row in rows:
        if row["problem"]:
            note(f"warning: {row['problem']}")


def verify(folder: Annotated[Positional[Path], arg(metavar="DIR")], *, json: Json = False) -> int:
    """Read every byte of checkpoints and name every damaged file.

    Sizes, hashes and tensors are compared with the manifest. The exit code is 1 when a file is damaged.

    Args:
        folder: Checkpoint, or run folder: all of its checkpoints.
    """
    from longctx.checkpoint_format import MANIFEST

    if (folder / MANIFEST).is_file():
        folders = [folder]
    else:
        folders = _checkpoints_of(folder)
    if not folders:
        raise CheckpointError(f"{folder} holds no committed checkpoint to verify.")
    rows = [{"folder": str(path), "problems": _problems(path)} for path in folders]
    damaged = [row for row in rows if row["problems"]]
    if json:
        say_json(rows)
    else:
        for row in rows:
            if not row["problems"]:
                say(f"{row['folder']} is whole.")
                continue
            say(f"{row['folder']} is damaged:")
            for problem in row["problems"]:
                say(indent(problem, "  "))
        # Where none is whole there is nothing to go on from.
        if damaged and len(damaged) < len(rows):
            say("Go on from the newest whole one with --run.resume newest-good.")
    if damaged:
        return FAILED
    return DONE


def _checkpoints_of(run: Path) -> list[Path]:
    """Committed checkpoints of a run folder, oldest first; CheckpointError where there can be none."""
    from longctx import checkpoint_format
    from longctx.checkpoint_format import CHECKPOINTS, MANIFEST

    if (run / MANIFEST).is_file():
        raise CheckpointError(f"{run} is a checkpoint, not a run. Give the run's folder, which has checkpoints/ in it.")
    if not (run / CHECKPOINTS).is_dir() and not (run / "config.toml").is_file():
        what = "does not exist"
        if run.is_dir():
            what = "holds neither checkpoints/ nor a config.toml"
        raise CheckpointError(f"{run} is not a run folder: it {what}. Give the folder that run.output_dir named.")
    return checkpoint_format.list_checkpoints(run)


def _summary(folder: Path) -> dict[str, Any]:
    """What the manifest says; where it is damaged, what is wrong with it."""
    from longctx.checkpoint_format import CheckpointReader

    # From the folder's name, which is there even when the manifest cannot be read.
    step = int(folder.name.removeprefix("step_"))
    try:
        manifest = CheckpointReader(folder).manifest
    except LongCtxError as error:
        read = {"bytes": None, "ranks": None, "dtype": None, "problem": str(error)}
    else:
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        ranks = manifest["training"].get("world_size")
        read = {"bytes": size, "ranks": ranks, "dtype": manifest["dtype"], "problem": None}
    return {"step": step, "folder": str(folder), **read}


def _cell(key: str, value: Any) -> str:
    """A value of ``_summary`` as text; a dash where the manifest is damaged."""
    if value is None:
        return "–"
    if key == "bytes":
        return human_bytes(value)
    return str(value)


def _problems(folder: Path) -> list[str]:
    """Everything that is wrong with one checkpoint, its files read one by one."""
    from longctx.checkpoint_format import CheckpointReader
    from longctx.conversion.checks import check_tensors

    try:
        reader = CheckpointReader(folder)
        check_tensors(reader)
    except LongCtxError as error:
        return [str(error)]
    files = reader.manifest["files"]
    problems, done = [], 0
    with progress(f"reading {folder}", total=sum(entry["bytes"] for entry in files.values())) as update:
        for name, entry in files.items():
            problems += reader.verify([name])
            done += entry["bytes"]
            update(done, note=human_bytes(done))
    return problems
