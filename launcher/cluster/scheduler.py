"""Reject tasks that srun or mpirun started without assigning ranks.

Such a task sees neither RANK nor WORLD_SIZE, so each task would train alone, and all would write one run folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping, Sequence

from launcher.cluster.launch_commands import SCRIPT, slurm, started, torchrun
from longctx.errors import ClusterError


def check_tasks(
    hostfile: str,
    arguments: Sequence[str],
    environment: MutableMapping[str, str] = os.environ,
    *,
    script: str = SCRIPT,
) -> None:
    """Raise ClusterError, with a working command, in one of several srun or mpirun tasks without a RANK.

    ``hostfile`` is ``run.hostfile``: "none" lets each task be its own run. ``arguments`` are the script's.
    """
    if "RANK" in environment:
        # mpirun started torchrun: DeepSpeed would compare torchrun's task index with this rank.
        environment.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)
        return
    if hostfile == "none":
        return
    # A job step's own number comes first: SLURM_NTASKS counts the full job.
    tasks = _first_number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks > 1:
        nodes = max(1, _first_number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"))
        line = slurm(*arguments, nodes=nodes, ranks_per_node=math.ceil(tasks / nodes), script=script)
        raise _unranked_task_error("srun", tasks, environment.get("SLURM_PROCID", "0"), line, environment, script)
    tasks = _first_number(environment, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    if tasks > 1:
        task = environment.get("OMPI_COMM_WORLD_RANK") or environment.get("PMI_RANK") or "0"
        line = torchrun(*arguments, ranks=tasks, script=script)
        line += f"\nor, on several machines, deepspeed --hostfile hostfile {started(script, '--module')} …"
        raise _unranked_task_error("mpirun", tasks, task, line, environment, script)


def _unranked_task_error(
    launcher_name: str, tasks: int, task: str, line: str, environment: MutableMapping[str, str], script: str
) -> ClusterError:
    """Build one task's error; tasks other than the first leave the report to it."""
    # From here on, RANK is only read to report this error.
    environment["RANK"] = task
    alone = "train alone, on the same data and"
    if script != SCRIPT:
        alone = "work alone and write"
    return ClusterError(
        f"{launcher_name} started {tasks} tasks without RANK and WORLD_SIZE: each would {alone} into the same folder.\n"
        f"This starts {tasks} ranks that work together:\n\n{line}\n\n"
        f"Pass --run.hostfile none for {tasks} independent runs."
    )


def _first_number(environment: MutableMapping[str, str], *names: str) -> int:
    """Return the first of these variables that is set to a non-negative integer; 0 if all are unset or invalid."""
    for name in names:
        value = environment.get(name, "")
        if value.isdigit():
            return int(value)
    return 0
