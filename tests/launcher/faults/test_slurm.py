"""A node of a Slurm job is lost: Slurm begins the job anew, and the run goes on from its newest good checkpoint."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

import pytest

from launcher.metrics.record import read_metrics
from launcher.supervise.progress import newest_checkpoint_step
from tests.helpers import REPOSITORY
from tests.launcher.cluster.slurm import slurm, why_no_slurm
from tests.launcher.cluster.test_slurm import TEMPLATE
from tests.launcher.faults.scene import Recovered, Scene
from tests.launcher.faults.test_folders import NEXT_STEP, command
from tests.launcher.test_accidents import environment_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SECOND = "zz-second"
LIMIT = 200.0


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))
def test_a_node_is_lost(scene: Scene):
    go, said = scene.folder / "go", scene.folder / "job.log"
    # The first attempt waits in step 4 for what befalls it.
    waits = command(NEXT_STEP, f"while ! test -e {shlex.quote(str(go))}; do sleep 0.1; done")
    with slurm(scene.folder / "slurm") as cluster:
        cluster.environment.update(environment_of(waits, scene.folder / "waits"), RANKS_PER_NODE="1")
        options = ["--parsable", "--requeue", "--time", "10", "--output", str(said), "--open-mode", "append"]
        job = cluster.run("sbatch", *options, "--chdir", str(REPOSITORY), str(TEMPLATE), *scene.settings()).strip()
        wait_until((scene.folder / "waits").exists, "it did not begin")
        wait_until(lambda: newest_checkpoint_step(scene.run) == 2, "it did not save")
        go.touch()
        lost = time.time()
        cluster.lose(SECOND)
        wait_until(
            lambda: "PENDING" in cluster.run("squeue", "--noheader", "--jobs", job, "--format", "%T"), "no requeue"
        )
        seconds = time.time() - lost
        cluster.start("slurmd", "-D", "-N", SECOND)
        # A job that is begun anew waits two minutes.
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        cluster.wait(job, LIMIT)
    text = said.read_text()
    assert newest_checkpoint_step(scene.run) == 8, text
    resumed = [row["step"] for row in read_metrics(scene.run) if row.get("event") == "resume"]
    assert len(resumed) == 1, text
    scene.record(
        "cluster",
        "a node of a Slurm job is lost",
        injected="the second of two, with its rank; Slurm begins the job anew on both",
        seen=scene.seen(text, "srun: error: Node failure on"),
        seconds=seconds,
        # Step 3 was recorded, and step 4 never was.
        recovered=Recovered(3 - resumed[0], 2 - resumed[0], scene.went_on().equal),
    )
