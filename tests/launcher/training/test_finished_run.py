"""A run that has taken all its steps, started once more."""

from __future__ import annotations

from pathlib import Path

from tests.launcher.workers import run, train

SHORT = {"train.steps": 2, "parallel.context": 1, "validation.every_steps": 2}


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """When each file was last written and what it holds, but for logs, which say that there is nothing to do."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "logs" not in path.parts)
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def finish_and_start_again(shards: Path, output: Path) -> None:
    train(shards, output, SHORT)
    before = files_of(output)
    assert "config.toml" in before
    # Fewer steps than were taken, and other settings than they were taken with.
    for changed in ({}, {"train.steps": 1}, {"train.lr": 1e-3}):
        train(shards, output, {**SHORT, "run.resume": "latest", **changed})
        assert files_of(output) == before, changed
    log = (output / "logs" / "rank_0.log").read_text()
    assert log.count("Nothing to do: the run is at step 2 of") == 3


def test_nothing_is_written_when_nothing_is_to_be_done(shards, tmp_path):
    run(finish_and_start_again, 1, shards, tmp_path / "run")
