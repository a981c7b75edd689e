"""Python imports this when it starts: one rank of a run then meets an accident, of which the product knows nothing.

``LONGCTX_ACCIDENT`` has the accident as JSON: the rank, the place (a module and a function in it), which of its calls
count (from a step on, about one file), the number of the call, what happens in it and after how many seconds. The time
is written to a file.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib.abc
import importlib.machinery
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STALLING = "LONGCTX_STALLING" in os.environ
SKEW = json.loads(os.environ.get("LONGCTX_SKEW", "null"))
"""A rank whose clock is wrong, and the environment that makes it so."""
ACCIDENT = json.loads(os.environ.get("LONGCTX_ACCIDENT", "null"))
WORDS = "an accident for the drill"


def pause() -> None:
    """Be stopped for a while."""
    subprocess.Popen(["sh", "-c", f"sleep {ACCIDENT['seconds']}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def spin() -> None:
    """Compute for ever."""
    while True:
        pass


def lock(library: type[ctypes.CDLL]) -> None:
    """Wait in C for a mutex that this thread holds: with Python's own lock in hand, or without."""
    mutex = ctypes.create_string_buffer(128)
    library(None).pthread_mutex_lock(mutex)
    library(None).pthread_mutex_lock(mutex)


def other_port() -> None:
    """Look for the others where they are not."""
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)


def other_code() -> None:
    """Seem to be of another state of the packages."""
    import parallel.comm.process

    parallel.comm.process.code_version = lambda: "0.0.9, sources 00000000"


def drop_hop() -> None:
    """What this rank sends next goes nowhere."""
    _change_next(lambda dist, ops: [op for op in ops if op.op is not dist.isend])


def send_twice() -> None:
    """What this rank sends next is sent twice; nobody waits for the copy."""

    def change(dist, ops):
        for op in ops:
            if op.op is dist.isend:
                SENT.append((op.tensor, dist.isend(op.tensor, op.peer, op.group, op.tag)))
        return ops

    _change_next(change)


def _change_next(change) -> None:
    import torch.distributed as dist

    start = dist.batch_isend_irecv

    def changed(ops):
        dist.batch_isend_irecv = start
        ops = change(dist, ops)
        return start(ops) if ops else []

    dist.batch_isend_irecv = changed


SENT: list = []
HANGS = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "pause": pause,
    "late": lambda: time.sleep(4.0),
    "sleep": lambda: time.sleep(1e6),
    "spin": spin,
    "block": lambda: lock(ctypes.CDLL),
    "hold": lambda: lock(ctypes.PyDLL),
    "other port": other_port,
    "other code": other_code,
    "drop a hop": drop_hop,
    "send a hop twice": send_twice,
}
"""What raises nothing by itself."""


def happen(kind: str) -> None:
    """Raise an error of this kind, or die."""
    # The other ranks are inside of a collective by then.
    time.sleep(ACCIDENT["after"])
    Path(ACCIDENT["happened"]).write_text(str(time.time()))
    if kind == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "SIGINT":
        # To the process, as a terminal sends it: the accident may be in another thread than the main one.
        os.kill(os.getpid(), signal.SIGINT)
        return
    if kind == "exit":
        os._exit(7)
    if kind in HANGS:
        HANGS[kind]()
        return
    if kind == "command":
        subprocess.run(["sh", "-c", ACCIDENT["command"]], check=True)
        return
    if kind == "OSError":
        raise OSError(errno.EIO, WORDS)
    if kind == "disk full":
        raise OSError(errno.ENOSPC, WORDS)
    if kind in ("ConfigError", "DataError", "CheckpointError", "ClusterError"):
        from longctx import errors

        raise getattr(errors, kind)(WORDS)
    if kind in ("OutOfMemoryError", "AcceleratorError"):
        import torch

        raise getattr(torch, kind, RuntimeError)(WORDS)
    if kind == "SystemExit":
        raise SystemExit(3)
    raise getattr(__builtins__, kind, None) or getattr(__import__("builtins"), kind)(WORDS)


def counts(args: tuple) -> bool:
    """Whether a call with these arguments is one that counts."""
    if ACCIDENT["step"]:
        from parallel.runtime.activity import ACTIVITY

        if ACCIDENT["step"] > ACTIVITY.step:
            return False
    return not ACCIDENT["file"] or Path(args[0]).name == ACCIDENT["file"]


def breaking(function, call: int, kind: str):
    """The function, in whose ``call``-th call something happens first."""
    calls = 0

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        nonlocal calls
        counted = counts(args)
        calls += counted
        if counted and calls == call:
            happen(kind)
        return function(*args, **kwargs)

    return wrapped


def break_function(module) -> None:
    """Put the accident into its function."""
    if ACCIDENT["kind"] == "SIGINT":
        # A shell starts what runs in the background without it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    owner, name = module, ACCIDENT["function"]
    while "." in name:
        part, _, name = name.partition(".")
        owner = getattr(owner, part)
    original = owner.__dict__[name]
    wrap = functools.partial(breaking, call=ACCIDENT["call"], kind=ACCIDENT["kind"])
    if isinstance(original, classmethod):
        setattr(owner, name, classmethod(wrap(original.__func__)))
    else:
        setattr(owner, name, wrap(original))


def stall_groups(module) -> None:
    """Replace gloo by groups that block as NCCL's do."""
    import stalling

    stalling.install()


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Acts on one module as soon as it is imported."""

    def __init__(self, module: str, act) -> None:
        self.module, self.act = module, act

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.act(module)


if SKEW and os.environ.get("RANK") == SKEW["rank"]:
    # A library that is loaded before all others: the process must begin anew, and once.
    del os.environ["LONGCTX_SKEW"]
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **SKEW["environment"]})
if ACCIDENT and os.environ.get("RANK") == str(ACCIDENT["rank"]):
    sys.meta_path.insert(0, AfterImport(ACCIDENT["module"], break_function))
if STALLING and "RANK" in os.environ:
    # The first module of ours that knows process groups: torch is whole by then.
    sys.meta_path.insert(0, AfterImport("parallel.comm.process_groups", stall_groups))
