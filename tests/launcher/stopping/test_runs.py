"""Real runs that are asked to stop: all ranks leave with one checkpoint, nobody is left, and nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launcher.cluster.exit import ABORTED, STOPPED
from launcher.metrics.record import read_metrics
from launcher.supervise.progress import last_event, last_step, newest_checkpoint_step
from tests.faults import FaultRow, FaultRows, verdict
from tests.helpers import REPOSITORY
from tests.launcher.cluster.cluster import missing_programs, two_hosts
from tests.launcher.runs import Launch, flags, free_port
from tests.launcher.stopping.stopped import LONG, SECONDS, STEPS, Disturbed, disturbed, send
from tests.launcher.workers import rows, run, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TERM, INT, HUP, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL


@pytest.fixture(scope="module")
def undisturbed(shards, tmp_path_factory) -> Path:
    """The same run to its end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(train, 2, shards, folder, LONG)
    return folder


def check_saved(found: Disturbed, kind: str, *, tracebacks: int = 0) -> None:
    """It has saved the step that it came to, and left nobody; ``tracebacks`` are the most that launchers show."""
    assert found.stop is not None, found.ended.text
    assert found.stop["reason"] == kind
    assert found.saved == found.taken == found.stop["step"] < STEPS
    assert not found.ended.orphans
    assert found.ended.text.count("Traceback") <= tracebacks, found.ended.text
    assert found.seconds < SECONDS


def check_screen(found: Disturbed, program: str) -> None:
    """One screen is the last thing that is said."""
    assert found.ended.text.count("Stopped after step") == 1
    last = found.ended.text.split("Stopped after step")[1].splitlines()
    assert last[3].startswith(f"Resume with: {program} "), found.ended.text
    assert last[3].endswith(" --run.resume latest")
    # A runner that is asked to end starts a pdsh more, which finds nobody to end.
    assert not any(line for line in last[4:] if not line.startswith("pdsh@")), found.ended.text


def check_resumes(shards: Path, folder: Path, undisturbed: Path, changed: dict | None = None) -> None:
    run(train, 2, shards, folder, {**LONG, **(changed or {}), "run.resume": "latest"})
    assert rows(folder) == rows(undisturbed), "to the last bit"


def record(fault_rows: FaultRows, found: Disturbed, folder: Path, undisturbed: Path, kind: str, group: str) -> None:
    """A row of the fault suite, of a run that has stopped and gone on."""
    resumed = [row["step"] for row in read_metrics(folder) if row.get("event") == "resume"][-1]
    fault_rows.add(
        FaultRow(
            group=group,
            kind=kind,
            injected=f"once step 3 of {STEPS} is taken",
            seen=verdict(found.ended.text, "Stopped after step", {folder: "RUN"}),
            seconds=round(found.seconds, 2),
            steps_lost=found.taken - resumed,
            beyond_checkpoint=(found.saved or 0) - resumed,
            equal=rows(folder) == rows(undisturbed),
        )
    )


# What deepspeed ends with: of a signal to its launcher it makes 1, and of the launcher's death by one 0.
@pytest.mark.parametrize(
    ("number", "whom", "code", "kind"),
    [
        *[(number, "rank_1", STOPPED, "signal") for number in (TERM, INT, HUP, USR1)],
        (TERM, "launcher", 1, "signal"),
        *[(number, "launcher", 0, "launcher") for number in (HUP, KILL)],
        *[(number, "runner", -number, "launcher") for number in (TERM, KILL)],
    ],
)
def test_whoever_is_told_all_ranks_save_and_leave(shards, tmp_path, undisturbed, fault_rows, number, whom, code, kind):
    found = disturbed(shards, tmp_path / "run", send(number, whom))
    check_saved(found, kind)
    check_screen(found, "deepspeed --num_gpus 2")
    assert found.ended.code == code
    check_resumes(shards, tmp_path / "run", undisturbed)
    whose = f"the {whom}"
    if whom.startswith("rank"):
        whose = "a rank"
    record(fault_rows, found, tmp_path / "run", undisturbed, f"{number.name} to {whose}", "process")


def test_ctrl_c_in_a_terminal(shards, tmp_path, undisturbed, fault_rows):
    """It goes to every process of the command at once."""

    def act(launch: Launch) -> None:
        for process in launch.family():
            process.send_signal(INT)

    found = disturbed(shards, tmp_path / "run", act)
    # The runner ends at once, with Python's own words.
    check_saved(found, "signal", tracebacks=1)
    check_screen(found, "deepspeed --num_gpus 2")
    check_resumes(shards, tmp_path / "run", undisturbed)
    record(fault_rows, found, tmp_path / "run", undisturbed, "Ctrl-C in a terminal", "process")


def test_a_second_ctrl_c_ends_at_once(shards, tmp_path):
    def act(launch: Launch) -> None:
        ranks = launch.ranks().values()
        for _ in range(2):
            for process in ranks:
                process.send_signal(INT)
            time.sleep(0.05)

    # Steps that take longer than it takes to press a key.
    slow = {"train.tokens_per_step": 512 * 16, "train.steps": 20}
    found = disturbed(shards, tmp_path / "run", act, slow, after_step=1)
    assert (found.ended.code, found.saved, found.stop) == (ABORTED, None, None)
    assert not found.ended.orphans


def test_a_stop_breaks_validation_off_and_it_is_made_up_for(shards, tmp_path):
    changed = {"validation.every_steps": 4, "validation.rows": 200, "train.steps": 12}
    folder = tmp_path / "run"
    found = disturbed(shards, folder, send(USR1, "rank_0"), changed, after_step=4)
    assert found.ended.code == STOPPED
    assert found.saved == found.taken == 4
    assert not any(record["kind"] == "validation" for record in read_metrics(folder)), "it was over before the signal"
    run(train, 2, shards, folder, {**LONG, **changed, "run.resume": "latest"})
    run(train, 2, shards, tmp_path / "whole", {**LONG, **changed})
    assert rows(folder) == rows(tmp_path / "whole"), "to the last bit"


def test_threads_that_read_do_not_keep_a_rank(shards, tmp_path, undisturbed):
    changed = {"data.workers": 3, "data.prefetch_steps": 4}
    found = disturbed(shards, tmp_path / "run", send(TERM, "rank_1"), changed)
    check_saved(found, "signal")
    check_resumes(shards, tmp_path / "run", undisturbed)


def test_a_limit_of_time_is_kept(shards, tmp_path):
    limit = 15.0
    folder = tmp_path / "run"
    launch = Launch(flags(shards, folder, {**LONG, "train.steps": 4000, "run.max_seconds": limit}))
    launch.wait_until(lambda: last_step(folder) is not None)
    began = min(process.create_time() for process in launch.ranks().values())
    ended = launch.wait(SECONDS * 2)
    stop = last_event(folder)
    assert ended.code == STOPPED
    assert stop is not None
    assert stop["reason"] == "max_seconds"
    assert stop["step"] == last_step(folder) == newest_checkpoint_step(folder)
    saved = (folder / "checkpoints" / f"step_{stop['step']:06d}" / "manifest.json").stat().st_mtime
    assert limit - 5.0 < saved - began < limit + 1.0, "an unmeasured save may come a little late"
    assert not ended.orphans


def test_orphans_whose_step_takes_too_long_end_without_a_save(shards, tmp_path):
    found = disturbed(shards, tmp_path / "run", send(KILL, "launcher"), {"run.orphan_seconds": 0.001})
    assert found.saved is None
    assert "is gone, so rank" in found.ended.text
    assert "longer than run.orphan_seconds=0.001" in found.ended.text
    assert "--run.resume latest" in found.ended.text
    assert "Traceback" not in found.ended.text
    assert found.seconds < 10 + SECONDS / 2


@pytest.mark.parametrize(("number", "kind"), [(TERM, "signal"), (INT, "signal"), (KILL, "launcher")])
def test_torchrun(shards, tmp_path, undisturbed, number, kind):
    starter = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", "2", "--master_port"]
    found = disturbed(
        shards,
        tmp_path / "run",
        send(number, "runner"),
        {"run.hostfile": "none"},
        starter=[*starter, str(free_port())],
    )
    # torchrun shows where it was when the signal came.
    check_saved(found, kind, tracebacks=3)
    check_screen(found, "torchrun --nproc_per_node 2")
    check_resumes(shards, tmp_path / "run", undisturbed)


@pytest.mark.parametrize(
    ("number", "whom", "kind"),
    [(TERM, "rank", "signal"), (TERM, "runner", "launcher"), (KILL, "runner", "launcher"), (KILL, "ssh", "launcher")],
)
def test_over_two_hosts(shards, tmp_path, undisturbed, fault_rows, number, whom, kind):
    if reason := missing_programs():
        pytest.skip(reason)

    def act(launch: Launch) -> None:
        if whom == "runner":
            launch.runner().send_signal(number)
            return
        chosen = {"rank": is_rank_1, "ssh": lambda process: process.name() == "ssh"}[whom]
        next(process for process in launch.family() if chosen(process)).send_signal(number)

    with two_hosts(tmp_path) as (hostfile, environment):
        found = disturbed(shards, tmp_path / "run", act, hostfile=hostfile, environment=environment)
    check_saved(found, kind)
    # Whatever is left of pdsh and ssh: it goes to the terminal itself.
    check_screen(found, "deepspeed --hostfile")
    if kind == "signal":
        assert found.ended.code == STOPPED
    check_resumes(shards, tmp_path / "run", undisturbed)
    what = f"{number.name} to {whom}, over two hosts"
    record(fault_rows, found, tmp_path / "run", undisturbed, what, "cluster")


def is_rank_1(process: psutil.Process) -> bool:
    return process.name().startswith("python") and process.environ().get("RANK") == "1"


def test_a_run_whose_shell_has_ended_goes_on(shards, tmp_path):
    """No launcher started it, and nobody shall end it."""
    words = [sys.executable, "launcher/pretrain.py", *flags(shards, tmp_path / "run", {"parallel.context": 1})]
    line = " ".join(["nohup", *words, "> /dev/null 2>&1 & echo $!"])
    shell = subprocess.run(["sh", "-c", line], cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True)
    started = psutil.Process(int(shell.stdout))
    deadline = time.monotonic() + SECONDS
    try:
        while last_step(tmp_path / "run") is None and time.monotonic() < deadline:
            time.sleep(0.02)
        # What a terminal sends when it is closed.
        started.send_signal(HUP)
        started.wait(SECONDS * 2)
    finally:
        if started.is_running():
            started.kill()
    assert newest_checkpoint_step(tmp_path / "run") == 8
    assert last_event(tmp_path / "run") is None
