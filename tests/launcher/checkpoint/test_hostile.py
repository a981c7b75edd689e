"""Checkpoints that somebody made up, with consistent hashes, in a run that has a good one: they are passed over.

What is wrong with each is in ``tests/longctx/test_hostile_checkpoints.py``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.checkpoint.health import INVALID, VALID, kept_steps, summaries
from launcher.checkpoint.resume import find_resume
from launcher.config.load_config import load_run_config
from longctx.checkpoint_format import CHECKPOINTS, MANIFEST
from longctx.errors import CheckpointError, LongCtxError
from tests.bounded import check_screen, put_sparse_file, within_bounds
from tests.launcher.cli.calls import call
from tests.longctx.test_hostile_checkpoints import FILE, FORGED, TEXTS, Body, changed, seal, whole

__all__ = ["whole"]

ONLY_BY_READING = {"blocks of another file", "a key that is not there"}
"""What no name or size shows: a list reads no files unless it is asked to."""

UNTRAINABLE: dict[str, tuple[Callable[[Body], None], str]] = {
    "a loader without a step": (
        lambda body: body["training"].update(loader={}),
        "training.step=None does not match the checkpoint's step 0",
    ),
    "a step of another checkpoint": (
        lambda body: body["training"].update(loader={}, step=10**15),
        "training.step=1000000000000000 does not match the checkpoint's step 0",
    ),
    "more updates than steps": (changed("training", "optimizer_steps", value=1), "must be a number from 0 to 0"),
    "updates that are text": (changed("training", "optimizer_steps", value="1"), "is not an integer"),
    "a history of text": (changed("training", "history", value="x"), "training.history='x' is not an object"),
    "a history without end": (
        changed("training", "history", value={"losses": [1.0] * 2000, "norms": [], "skipped": 0, "in_row": 0}),
        "has 2000 entries",
    ),
    "loads of another model": (changed("training", "expert_load", value=[[1.0] * 99]), "has 1 layers with 99 experts"),
}
"""What only those ask who go on with a run."""


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A run whose checkpoints of steps 2 and 4 are good, the newer one of them to be spoilt."""
    for step in (2, 4):
        shutil.copytree(whole, tmp_path / "run" / CHECKPOINTS / f"step_{step:06d}")
    (tmp_path / "run" / "config.toml").write_text("")
    return tmp_path / "run"


def check_passed_over(run: Path, caplog: pytest.LogCaptureFixture, *, by_reading: bool = False) -> str:
    """The older one is taken, the list names the newer one; returns the line that says why."""
    good, bad = (run / CHECKPOINTS / f"step_{step:06d}" for step in (2, 4))
    caplog.clear()
    for resume in ("newest-good", "auto"):
        with within_bounds():
            assert find_resume(run, resume) == good
    lines = [record.getMessage() for record in caplog.records if "Skipped" in record.getMessage()]
    assert len(lines) == 2 == len(set(lines)) + 1
    assert lines[0].startswith(f"Skipped {bad}: ")
    assert len(lines[0].splitlines()) == 1
    check_screen(lines[0])
    for check in (False, True):
        with within_bounds():
            found = [row.health for row in summaries(run, check=check)]
            assert kept_steps(run) is not None
        assert found == [VALID, VALID if by_reading and not check else INVALID]
    return lines[0]


@pytest.mark.few(12)
@pytest.mark.parametrize("forgery", [*FORGED, *UNTRAINABLE])
def test_a_sealed_manifest_that_cannot_be_right_is_passed_over(run: Path, caplog, forgery: str):
    folder = run / CHECKPOINTS / "step_000004"
    body = json.loads((folder / MANIFEST).read_text())
    del body["hash"]
    change, said = (FORGED | UNTRAINABLE)[forgery]
    change(body)
    seal(folder, body)
    line = check_passed_over(run, caplog, by_reading=forgery in ONLY_BY_READING)
    if forgery in UNTRAINABLE:
        assert said in line
    # The model of the run is that of the good one.
    flags = ["--run.output_dir", str(run), "--run.resume", "newest-good", "--model.preset", "none"]
    with within_bounds():
        assert load_run_config(flags).model.num_layers == 2


@pytest.mark.parametrize("content", TEXTS)
def test_what_is_no_strict_json_is_passed_over(run: Path, caplog, content: str):
    (run / CHECKPOINTS / "step_000004" / MANIFEST).write_bytes(TEXTS[content][0])
    check_passed_over(run, caplog)


def test_a_manifest_of_ten_gigabytes_is_passed_over(run: Path, caplog):
    put_sparse_file(run / CHECKPOINTS / "step_000004" / MANIFEST, 10 * 2**30)
    assert "10,737,418,240 bytes" in check_passed_over(run, caplog)


def test_a_pipe_in_the_place_of_a_file_is_passed_over(run: Path, caplog):
    file = run / CHECKPOINTS / "step_000004" / FILE
    file.unlink()
    os.mkfifo(file)
    check_passed_over(run, caplog)


def test_a_file_that_a_disk_cannot_read_is_passed_over(run: Path, caplog, monkeypatch):
    read = Path.open

    def failing(path: Path, *args, **options):
        if path.parent.name == "step_000004" and path.name == FILE:
            raise OSError(5, "Input/output error")
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "open", failing)
    assert find_resume(run, "newest-good") == run / CHECKPOINTS / "step_000002"
    assert f"Skipped {run / CHECKPOINTS / 'step_000004'}: {FILE} cannot be read: Input/output error" in caplog.text


def test_verify_goes_on_behind_them(run: Path, capsys):
    folder = run / CHECKPOINTS / "step_000002"
    body = json.loads((folder / MANIFEST).read_text())
    del body["hash"]
    UNTRAINABLE["a step of another checkpoint"][0](body)
    seal(folder, body)
    code, said, _ = call(capsys, "checkpoint", "verify", run)
    assert code == 1
    assert "training.step=1000000000000000" in said
    assert "step_000004 is intact" in said


def test_where_none_is_good_each_has_its_reason_on_one_screen(run: Path):
    for step in (2, *range(4, 40)):
        folder = run / CHECKPOINTS / f"step_{step:06d}"
        folder.mkdir(exist_ok=True)
        (folder / MANIFEST).write_text("[" * 1000)
    for resume in ("newest-good", "auto"):
        with within_bounds(), pytest.raises(CheckpointError) as caught:
            find_resume(run, resume)
        said = str(caught.value)
        check_screen(said)
        assert f"run.resume='{resume}'" in said
        assert "step_000039: " in said
        assert "and 33 older ones." in said


def test_a_model_of_another_release_is_passed_over_too(run: Path, caplog):
    """Those that stay are older: a release that knows such keys can still be taken."""
    folder = run / CHECKPOINTS / "step_000004"
    body = json.loads((folder / MANIFEST).read_text())
    del body["hash"]
    body["model"]["num_wings"] = 2
    seal(folder, body)
    assert "unknown model keys" in check_passed_over(run, caplog)
    with pytest.raises(LongCtxError, match="unknown model keys"):
        load_run_config(["--run.start_from", str(folder), "--train.lr", "1e-3"])
