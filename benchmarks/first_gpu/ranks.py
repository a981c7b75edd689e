"""Several ranks on one GPU over NCCL (2.30 or newer), or on the CPU over gloo.

Each rank believes that it is alone on its machine (LOCAL_RANK 0 of 1), so the product's rule of one rank per GPU holds.
$NCCL names a newer library, which is loaded instead of PyTorch's own.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from benchmarks.first_gpu.commands import Command

# Kernels from two ranks that wait for each other advance at the ends of time slices; few thread blocks leave room for
# both.
_NCCL = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


def run_ranks(ranks: int, words: Sequence[str], *, seconds: float) -> str:
    """Return rank 0's output from a script that all ranks run; RuntimeError with the first problem of any rank."""
    world = {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "OMP_NUM_THREADS": "2"}
    if os.environ.get("NCCL"):
        world["LD_PRELOAD"] = os.environ["NCCL"]
    commands = []
    for rank in range(ranks):
        environment = _NCCL | world | {"RANK": str(rank)}
        commands.append(Command([sys.executable, *words], seconds=seconds, environment=environment))
    said = [command.output() for command in commands]
    problems = [f"rank {rank}: {problem}" for rank, c in enumerate(commands) if (problem := c.problem())]
    if problems:
        raise RuntimeError(problems[0])
    return said[0]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
