"""The commands that start training, as pages and programs print them, typed on a machine without an ssh server."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.cli_commands import overview
from launcher.cluster.launch_commands import slurm, torchrun
from tests.docs.pages import ALL_COMMANDS, PAGES
from tests.helpers import REPOSITORY
from tests.launcher.runs import free_port, path_without_ssh

SCRIPT = "launcher/pretrain.py"
FOR_CLUSTERS = (
    *("README.md", "2-your-data-128k-on-8-gpus.md", "5-when-it-breaks.md", "commands.md"),
    *("verbs.py", "pretrain.py", "scheduler.py"),
)
"""Files that may show the line for several machines: ``deepspeed --hostfile hostfile``."""

# A stand-in for the script: what its ranks were told is all that a launcher has to get right.
STUB = """\
import json, os, sys
told = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
print(json.dumps({"told": told, "arguments": sys.argv[1:]}), flush=True)
"""


def printed() -> Iterator[tuple[str, str]]:
    """File name and text of every command with our script: of pages, and of whatever the packages print."""
    for where, command in ALL_COMMANDS:
        if SCRIPT in command:
            yield where.partition(":")[0], shlex.join(command)
    # Inline code in pages, and text in programs: up to a quote, the end of the line or an ellipsis.
    shown = re.compile(rf"(?:deepspeed|torchrun) --?[a-z][^\n`\"']*?{re.escape(SCRIPT)}[^\n`\"'…\\]*")
    sources = [*PAGES, *(REPOSITORY / "launcher").rglob("*.py"), *(REPOSITORY / "launcher").rglob("*.sh")]
    for path in sources:
        for match in shown.findall(path.read_text()):
            if "{" not in match:
                yield path.name, match
    yield from (("verbs.py", line) for line in overview().splitlines() if SCRIPT in line)
    yield "command.py", torchrun("--data.train", "runs/data", ranks=2)
    yield "command.py", slurm("--data.train", "runs/data", nodes=1, ranks_per_node=2)


def start_of(command: str) -> str:
    """What stands before the script, with one number for all numbers of ranks."""
    start = command.partition(SCRIPT)[0].replace("\\", " ")
    # Who starts it again when it fails is tested in tests/launcher/supervise/.
    start = re.sub(r"^longctx run .*?-- ", "", start)
    return re.sub(r"(--num_gpus|--nproc_per_node) (\d+|N|\$ranks)", r"\1 2", " ".join(start.split()))


DEEPSPEED = "deepspeed --num_gpus 2"
STARTS = {
    DEEPSPEED,
    "torchrun --standalone --nproc_per_node 2",
}
"""The ways to start on one machine."""


def test_every_command_that_is_printed_starts_in_one_of_the_known_ways():
    found = set()
    for where, command in printed():
        start = start_of(command)
        if "srun" in start or "rdzv" in start:
            # Typed in tests/launcher/cluster/test_scheduler.py, with a stand-in for srun.
            continue
        if start.startswith("deepspeed --hostfile hostfile"):
            assert where in FOR_CLUSTERS, f"{where} shows the line of a cluster: {command}"
            continue
        if start == "python":
            # One rank, without any launcher: tests/launcher/test_pretrain.py types it.
            continue
        assert start in STARTS, f"{where}: nothing types {command!r}"
        found.add(start)
    assert found == STARTS


@pytest.fixture
def without_ssh(tmp_path: Path) -> dict[str, str]:
    """An environment in which every ssh and pdsh fails, and leaves a trace."""
    path = path_without_ssh(tmp_path)
    free = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {**free, "PATH": path, "HOME": str(tmp_path), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


# The run that tests/launcher/conftest.py makes starts by deepspeed, where ssh fails as here.
@pytest.mark.timeout(120)
@pytest.mark.parametrize("start", [pytest.param(DEEPSPEED, marks=pytest.mark.slow), *sorted(STARTS - {DEEPSPEED})])
def test_a_start_needs_no_ssh_and_no_hostfile(start: str, tmp_path, without_ssh):
    script = tmp_path / SCRIPT
    script.parent.mkdir()
    script.write_text(STUB)
    words = start.split()
    if words[0] == "deepspeed":
        # Two tests at once must not meet at DeepSpeed's usual port.
        words += ["--master_port", str(free_port())]
    ended = subprocess.run(
        [*words, SCRIPT, "--run.output_dir", "a run"],
        cwd=tmp_path, env=without_ssh, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "asked").exists(), (tmp_path / "asked").read_text()
    ranks = [json.loads(text) for text in re.findall(r'\{"told".*?\]\}', ended.stdout)]
    assert sorted(rank["told"]["RANK"] for rank in ranks) == ["0", "1"]
    for rank in ranks:
        assert rank["told"]["WORLD_SIZE"] == "2"
        assert rank["arguments"][-2:] == ["--run.output_dir", "a run"]
