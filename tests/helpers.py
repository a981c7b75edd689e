"""What several tests need: workers, tiny models, packed rows."""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PRELOADED = (
    *(
        "pytest",
        "hypothesis",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "deepspeed.module_inject",
    ),
    "deepspeed.runtime.zero.muon.muon_optimizer",  # of DeepSpeed's first engine; it brings the whole of inductor
    *("launcher.training.trainer", "launcher.report.page"),
)
"""What workers would otherwise import anew, seconds in each."""


def run_distributed(function: Callable[..., None], world_size: int, *args, timeout: float = 60.0) -> None:
    """Run ``function(*args)`` in ``world_size`` gloo processes with one thread each; raise the first failure.

    ``function`` must be a module-level function of a test module. The workers are forked by a server that has imported
    torch and DeepSpeed and run no tensor operation (a forked child of a threaded parent hangs), so starting them costs
    a fraction of a second; ranks meet through a file, so no port can collide. A hang ends after ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((function.__module__, function.__qualname__, args)))
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([folder, world_size, timeout]) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        failures = [p.read_text() for p in sorted(Path(folder).glob("failed_*"))]
    if failures or answer.strip() != "0":
        raise AssertionError("\n".join(failures) or f"{function.__qualname__}: the workers ended with {answer!r}")


def on_ranks(number: int | str, *, timeout: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a test's body run in ``number`` processes; a string names the parameter that says how many.

    What else the test is given goes to ``run_distributed`` as arguments.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(body).parameters.values())

        @wraps(body)
        def test(**values) -> None:
            ranks = values[number] if isinstance(number, str) else number
            run_distributed(test, ranks, *(values[parameter.name] for parameter in own), timeout=timeout)

        asked = list(own)
        if isinstance(number, str):
            asked.append(inspect.Parameter(number, inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        test.on_each_rank = body  # type: ignore[attr-defined]
        return test

    return decorate


@cache
def _server() -> subprocess.Popen:
    """The process that forks workers, started once a test session; it ends when its standard input closes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-c", "from tests.helpers import serve; serve()"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdin=pipe, stdout=pipe, text=True)


def serve() -> None:
    """Answer each request (folder, ranks, seconds) on standard input with the exit code of its workers."""
    # Frozen, a collection of garbage in a worker neither looks at what was imported nor copies its pages.
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    # Forked workers read their command lines in half the time once the docstrings of all keys have been read.
    importlib.import_module("launcher.config.load_config").load_run_config([])
    gc.freeze()
    gc.enable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be read as an answer
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os._exit(_lead(*json.loads(line)))
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _worker(
    folder: str, rank: int, world_size: int, timeout: float, function: Callable[..., None], args: tuple
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_SIZE=str(world_size))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        function(*args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (Path(folder) / f"failed_{rank}").write_text(f"rank {rank} of {world_size}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def _lead(folder: str, world_size: int, timeout: float) -> int:
    """Import what the workers need, fork them, and reap them; kill the rest when one fails or time is up."""
    module, name, args = pickle.loads((Path(folder) / "call").read_bytes())
    function = getattr(importlib.import_module(module), name)
    function = getattr(function, "on_each_rank", function)
    sys.stdout.flush()
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            _worker(folder, rank, world_size, timeout, function, args)
        children.append(child)
    deadline, failed = time.monotonic() + timeout, False
    while children and not failed and time.monotonic() < deadline:
        for child in list(children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                children.remove(child)
                failed |= status != 0
        time.sleep(0.01)
    if children and not failed:
        (Path(folder) / "failed_timeout").write_text(
            f"{len(children)} of {world_size} ranks still ran after {timeout} s"
        )
    # Let the peers write what they saw.
    deadline = time.monotonic() + 1.0
    while failed and children and time.monotonic() < deadline:
        children = [child for child in children if os.waitpid(child, os.WNOHANG) == (0, 0)]
        time.sleep(0.01)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return int(failed or bool(children))


def lines_run(action: Callable[[], object]) -> int:
    """Lines of Python that an action runs: what a loop costs, without a clock."""
    count, before = 0, sys.gettrace()

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def tensors_in_cycles(action: Callable[[], object]) -> list[str]:
    """The tensors that an action leaves to the garbage collector: memory that is free some time later, or never."""
    import torch

    gc.collect()
    gc.disable()
    try:
        action()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return [f"{tuple(x.shape)} {x.dtype}" for x in gc.garbage if isinstance(x, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
