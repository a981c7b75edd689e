"""A run's folder and its data are taken away while it runs, are read-only, or belong to another run."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from longctx.checkpoint_format import list_checkpoints
from tests.launcher.faults.disk import Disk, failing_disk, small_disk
from tests.launcher.faults.scene import Scene
from tests.launcher.runs import Launch
from tests.launcher.test_accidents import Accident, Place, environment_of
from tests.launcher.workers import rows

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEXT_STEP = Place("step", "launcher.training.step_prefetch", "StepPrefetcher.next_step", rank=0)
BEFORE_A_SAVE = Place("save", "launcher.training.trainer", "Trainer._save", rank=0)


def command(place: Place, line: str, *, step: int = 4, rank: int = 0) -> Accident:
    """A shell command that is run as rank 0 comes to a place."""
    return Accident(rank=rank, place=place, kind="command", ranks=2, step=step, command=line, after=0.0)


def test_the_output_folder_is_removed(scene: Scene):
    run, gone = shlex.quote(str(scene.run)), shlex.quote(str(scene.folder / "gone"))
    # Renamed first: a save under way writes on in what `rm` has just emptied, and `rm` then fails.
    outcome = scene.strike(command(NEXT_STEP, f"mv {run} {gone} && rm -r {gone}"))
    assert outcome.codes == [1, 1], outcome.text
    assert "Traceback" not in outcome.text, outcome.text
    # The folder cannot say it any more: the console has a line for each step.
    taken = int(re.findall(r"^step (\d+)/", outcome.text, flags=re.MULTILINE)[-1])
    scene.record(
        "files",
        "the output folder is removed",
        injected="with all that is in it, in step 4; begun anew",
        seen=scene.seen(outcome.text, "file was removed"),
        seconds=outcome.seconds,
        recovered=scene.recover(taken=taken),
    )


def test_the_output_folder_is_renamed_before_a_save(scene: Scene):
    aside = scene.folder / "aside"
    outcome = scene.strike(command(BEFORE_A_SAVE, f"mv {shlex.quote(str(scene.run))} {shlex.quote(str(aside))}"))
    assert outcome.codes == [1, 1], outcome.text
    assert "Traceback" not in outcome.text, outcome.text
    shutil.rmtree(scene.run, ignore_errors=True)
    aside.rename(scene.run)
    scene.record(
        "files",
        "the output folder is renamed",
        injected="before the save of step 4; put back afterwards",
        seen=scene.seen(outcome.text, "is missing"),
        seconds=outcome.seconds,
    )


@pytest.mark.parametrize(
    ("what", "line", "said"),
    [
        ("removed", "rm -r {data}", "is missing"),
        ("truncated", "truncate --size 100 {data}/00000.arrow", "changed while it was being read"),
    ],
)
def test_the_data_is_taken_away(scene: Scene, shards: Path, what: str, line: str, said: str):
    """What is mapped lives on when it is removed; the held-out shard is opened for the validation after step 4."""
    data = Path(shutil.copytree(shards, scene.folder / "data"))
    scene.names[data] = "DATA"
    accident = command(NEXT_STEP, line.format(data=shlex.quote(str(data))))
    outcome = scene.strike(accident, {"data.train": data})
    assert outcome.codes == [1, 1], outcome.text
    assert "Traceback" not in outcome.text, outcome.text
    scene.record(
        "files",
        f"the data is {what}",
        injected="under a run that reads it, in step 4",
        seen=scene.seen(outcome.text, said),
        seconds=outcome.seconds,
    )


def test_a_folder_that_is_read_only(scene: Scene):
    with small_disk(scene.folder / "disk", "4m") as disk:
        disk.remount("ro")
        seen, seconds = scene.refused("cannot be written", 2, {"run.output_dir": disk.folder / "run"})
    scene.record("files", "a read-only output folder", injected="a file system mounted so", seen=seen, seconds=seconds)


def test_checkpoints_become_read_only(scene: Scene):
    """As the system does with a file system whose disk fails."""
    with small_disk(scene.run / "checkpoints", "8m") as disk:
        line = f"mount -o remount,ro {shlex.quote(str(disk.folder))}"
        outcome = scene.strike(command(BEFORE_A_SAVE, line), {"checkpoint.wait": True})
        assert outcome.codes == [1, 1], outcome.text
        disk.remount("rw")
        scene.record(
            "files",
            "a file system becomes read-only",
            injected="that of the checkpoints, before the save of step 4",
            seen=scene.seen(outcome.text, "Read-only file system"),
            seconds=outcome.seconds,
        )


def test_a_file_system_that_loses_what_was_not_synced(scene: Scene):
    """A checkpoint that is there has the records up to it: both are on the disk before it has its name."""
    with failing_disk(scene.folder / "image", scene.run) as disk:
        outcome = scene.strike(command(NEXT_STEP, disk.fail(), step=6), {"checkpoint.wait": True})
        assert outcome.codes == [1, 1], outcome.text
        assert "Traceback" not in outcome.text, outcome.text
        disk.unmount()
        disk.mount()
        assert [path.name for path in list_checkpoints(scene.run)][-1] == "step_000004"
        assert [row["step"] for row in rows(scene.run) if row["kind"] == "train"][:4] == [1, 2, 3, 4]
        scene.record(
            "files",
            "a file system that loses what was not synced",
            injected="ext4, shut down without its journal in step 6, and mounted again",
            seen=scene.seen(outcome.text, "hit a disk error"),
            seconds=outcome.seconds,
        )


def fill(disk: Disk) -> str:
    """A shell command that leaves no byte."""
    return f"dd if=/dev/zero of={shlex.quote(str(disk.folder))}/filler bs=4096 2>/dev/null || true"


@pytest.mark.parametrize("part", ["checkpoints", "", "logs", "tensorboard"])
def test_a_full_disk(scene: Scene, part: str):
    """One that has checkpoints alone, all but checkpoints, logs alone, or curves alone."""
    name = {
        "checkpoints": "in a save",
        "": "in the metrics",
        "logs": "in a log",
        "tensorboard": "in TensorBoard's curves",
    }[part]
    place = BEFORE_A_SAVE if part == "checkpoints" else NEXT_STEP
    with small_disk(scene.run / part, "8m") as disk:
        inner = scene.run / "checkpoints"
        if part == "":
            (scene.folder / "elsewhere").mkdir()
            inner.mkdir()
        with small_disk(inner, "8m", wanted=part == ""):
            outcome = scene.strike(command(place, fill(disk)), {"checkpoint.wait": part == "checkpoints"})
            assert "Traceback" not in outcome.text, outcome.text
            (disk.folder / "filler").unlink()
            if part in ("logs", "tensorboard"):
                assert outcome.codes == [0, 0], outcome.text
                words = {"logs": "Log lines are missing", "tensorboard": "Tracker tensorboard failed"}[part]
                seen, recovered = scene.seen(outcome.text, words), scene.went_on()
            else:
                assert outcome.codes == [1, 1], outcome.text
                seen, recovered = scene.seen(outcome.text, "No space left on device"), scene.recover()
            scene.record(
                "files",
                f"a full disk {name}",
                injected="a small tmpfs that is filled in step 4",
                seen=seen,
                seconds=outcome.seconds,
                recovered=recovered,
            )


def test_a_second_run_in_the_folder_of_one_that_runs(scene: Scene):
    go = scene.folder / "go"
    waits = command(NEXT_STEP, f"while ! test -e {shlex.quote(str(go))}; do sleep 0.1; done")
    first = Launch(scene.settings(), environment=environment_of(waits, scene.folder / "waits"))
    first.wait_until((scene.folder / "waits").exists)
    seen, seconds = scene.refused("ClusterError: run.output_dir", 1, {"run.resume": "latest"})
    go.touch()
    ended = first.wait()
    assert ended.code == 0, ended.text
    scene.record(
        "files",
        "a second run in the same folder",
        injected="resumed from latest while the first one is in step 4",
        seen=seen,
        seconds=seconds,
        recovered=scene.went_on(),
    )
