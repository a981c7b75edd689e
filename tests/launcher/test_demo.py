"""The demos start a rank for each GPU, and two where there is none."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers import REPOSITORY


def starts_of(script: str, folder: Path, gpus: int) -> list[str]:
    """The deepspeed commands of a demo on a machine with so many GPUs; nothing is run."""
    # Functions of the shell come before programs: python tells the number of GPUs, or a port.
    functions = {"python": f'case "$*" in *device_count*) echo {gpus};; *) echo 29500;; esac', "deepspeed": ":"}
    functions["longctx"] = ":"
    environment = {**os.environ, **{f"BASH_FUNC_{name}%%": f"() {{ {body}; }}" for name, body in functions.items()}}
    command = ["bash", str(REPOSITORY / "launcher" / script), str(folder / "run")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return re.findall(r"^ +\$ deepspeed (.*)$", ran.stdout, re.M)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (2, 2), (3, 2), (8, 8)])
@pytest.mark.parametrize(("script", "trainings"), [("demo.sh", 2), ("demo_recall.sh", 3)])
def test_a_demo_starts_a_rank_for_each_gpu(tmp_path, script, trainings, gpus, ranks):
    starts = starts_of(script, tmp_path, gpus)
    assert len(starts) >= trainings
    assert all(f"--num_gpus {ranks} " in start for start in starts)
    shared = [start for start in starts if f" --parallel.context {ranks}" in start]
    assert len(shared) == trainings, "a row is shared by all ranks"
