"""Command lines for training and evaluation, as printed in messages."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from parallel.runtime.launched import COMMAND

SCRIPT = "launcher/pretrain.py"


def ours(*words: object) -> str:
    """Return a command line for this program, in the user's form even inside a rank."""
    program, _, _ = os.environ.get(COMMAND, "longctx train").rpartition(" ")
    return _joined(program, words)


def torchrun(*arguments: object, ranks: int, script: str = SCRIPT) -> str:
    """Return the torchrun command that starts ``ranks`` ranks on this machine."""
    return _joined(f"torchrun --standalone --nproc_per_node {ranks} {started(script, '-m')}", arguments)


def started(script: str, flag: str) -> str:
    """Return a script in the form that a launcher takes: its path in a checkout, otherwise ``flag`` and its module."""
    if Path(script).is_file():
        return script
    return f"{flag} {script.removesuffix('.py').replace('/', '.')}"


def slurm(*arguments: object, nodes: int, ranks_per_node: int, script: str = SCRIPT) -> str:
    """Return the command for a Slurm job: srun starts torchrun once per node, and torchrun starts the ranks."""
    # No binding: otherwise all ranks on a node would share their task's single core.
    once_a_node = f"srun --nodes {nodes} --ntasks {nodes} --ntasks-per-node 1 --cpu-bind none"
    if nodes == 1:
        return f"{once_a_node} {torchrun(*arguments, ranks=ranks_per_node, script=script)}"
    # $( ) is literal: the shell that starts srun asks Slurm for the job's first node.
    endpoint = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500"'
    start = (
        f"torchrun --nnodes {nodes} --nproc_per_node {ranks_per_node} --rdzv_backend c10d --rdzv_endpoint {endpoint}"
    )
    return _joined(f"{once_a_node} {start} {started(script, '-m')}", arguments)


def _joined(start: str, arguments: tuple[object, ...]) -> str:
    """Append the arguments to ``start``, shell-quoted if necessary."""
    return f"{start} {shlex.join(str(argument) for argument in arguments)}".rstrip()
