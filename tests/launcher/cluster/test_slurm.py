"""The template of a Slurm job, submitted to a real Slurm of two nodes."""

from __future__ import annotations

import subprocess

import pytest

from launcher.metrics.record import read_metrics
from longctx.checkpoint_format import list_checkpoints
from tests.helpers import REPOSITORY
from tests.launcher.cluster.slurm import slurm, why_no_slurm
from tests.launcher.runs import flags

TEMPLATE = REPOSITORY / "docs" / "clusters" / "slurm.sbatch"

needs_slurm = pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm()))


def test_the_template_is_a_script():
    subprocess.run(["bash", "-n", TEMPLATE], check=True, timeout=10)


@needs_slurm
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_trains_on_all_nodes_and_the_same_line_goes_on(shards, tmp_path):
    run = tmp_path / "run"
    with slurm(tmp_path / "slurm") as cluster:
        cluster.environment["RANKS_PER_NODE"] = "1"
        for steps in (4, 8):
            said = tmp_path / f"job_{steps}.log"
            words = [*flags(shards, run, {"train.stop_after": steps}), "--run.hostfile", "none"]
            options = ["--parsable", "--time", "10", "--output", str(said), "--chdir", str(REPOSITORY)]
            job = cluster.run("sbatch", *options, str(TEMPLATE), *words).strip()
            cluster.wait(job, 120)
            assert "Traceback" not in said.read_text(), said.read_text()
            assert [path.name for path in list_checkpoints(run)][-1] == f"step_{steps:06d}", said.read_text()
    found = list(read_metrics(run))
    assert [record["step"] for record in found if record["kind"] == "train"] == list(range(1, 9))
    assert [record["step"] for record in found if record.get("event") == "resume"] == [4]
    assert "2 ranks = data 1 × context 2" in (tmp_path / "job_8.log").read_text()
