"""Start and stop the process group, from the environment that the launcher sets."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longctx.errors import ClusterError
from parallel.comm.process_groups import clear_groups, control_group, warm, world_group
from parallel.runtime.flight_recorder import dump_collectives, record_collectives, trace_hint
from parallel.runtime.interface import choose_gloo_interface
from parallel.runtime.launched import code_version, environment_rank, ranks_of_machine
from parallel.runtime.listening import free_port, is_agents_store, listen, rendezvous_host
from parallel.runtime.watch.current import active_watch, start_watch, stop_watch
from parallel.runtime.watch.last_message import print_last_message
from parallel.runtime.watch.watch_options import WatchOptions

RENDEZVOUS_SECONDS = 45.0
"""How long ranks wait at rendezvous. Including shutdown, a failed start ends within a minute."""
_LONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def start_process_group(
    *,
    timeout_seconds: float,
    rendezvous_seconds: float = RENDEZVOUS_SECONDS,
    device: torch.device | None = None,
    traces: Path | None = None,
) -> None:
    """Join the process group, or create a single-rank group if the process was started without a launcher.

    CPU tensors use gloo; if ``device`` is a GPU, its tensors use NCCL. From here on, a rank that fails or hangs ends
    all ranks: each then writes its stacks into the folder ``traces``, and NCCL its last collectives.

    Raise ClusterError if rendezvous takes longer than ``rendezvous_seconds``, or if the ranks' code differs.
    """
    if "RANK" not in os.environ:
        os.environ.update(_LONE_PROCESS, MASTER_PORT=str(free_port()))
    choose_gloo_interface()
    # Ranks on one machine share its cores: with all cores each, they would stall one another.
    threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    torch.set_num_threads(threads or _threads_per_process())
    rank, world_size = environment_rank()
    # torch 2.13 renames collectives that torch 2.11 has only under the old names: silence one warning per rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    try:
        # gloo in addition to NCCL: tensors that ranks compare before they compute are on the CPU.
        backend = "cpu:gloo,cuda:nccl"
        if device is None or device.type == "cpu":
            backend = "gloo"
        elif traces is not None:
            record_collectives(traces)
        timeout = timedelta(seconds=timeout_seconds)
        store = rendezvous_store(rank, world_size, timedelta(seconds=rendezvous_seconds))
        if world_size > 1:
            options = WatchOptions(
                rank=rank,
                world_size=world_size,
                timeout=timeout_seconds,
                rendezvous_seconds=rendezvous_seconds,
                version=code_version(),
                folder=traces,
                hint=trace_hint(),
                last_act=partial(dump_collectives, rank),
                spins=backend != "gloo",
            )
            start_watch(store, options)
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        # The first call on every group, including the world group, must be one that all ranks enter.
        warm(world_group())
        control_group()
    except (RuntimeError, ValueError, OSError) as error:
        text = (
            f"rank {rank} of {world_size} on {socket.gethostname()} could not rendezvous at "
            f"{rendezvous_host()}:{os.environ.get('MASTER_PORT')}: {str(error).splitlines()[0]}\n"
            "Check that every host in the hostfile reaches that address, and that the port is free (--master_port)."
        )
        # Rank 0 knows which ranks are missing, but not why. Without a watch, one rank per machine reports its own
        # cause.
        if active_watch() is None and rank != 0 and os.environ.get("LOCAL_RANK", "0") in ("0", str(rank)):
            print_last_message(f"ClusterError: {text}")
        raise ClusterError(text) from error


def stop_process_group() -> None:
    """Leave the process group, if any. Call it only after success: after an error NCCL may block here forever."""
    if dist.is_initialized():
        dist.destroy_process_group()
        clear_groups()
    stop_watch()


@contextmanager
def process_group(*, timeout_seconds: float, device: torch.device, traces: Path | None = None) -> Iterator[None]:
    """Run the ``with`` block as one of the launcher's ranks. A single process needs no group.

    An error that leaves the block ends the process (``launcher/cluster/exit.py``) without leaving the group first: with
    NCCL that would wait for kernels that wait for this rank.
    """
    # Ranks in a test already have a group.
    starts = environment_rank()[1] > 1 and not dist.is_initialized()
    if starts:
        start_process_group(timeout_seconds=timeout_seconds, device=device, traces=traces)
    yield
    if starts:
        stop_process_group()


def _threads_per_process() -> int:
    return max(1, (os.cpu_count() or 1) // (ranks_of_machine() or 1))


def rendezvous_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Connect to the rendezvous store, which rank 0 hosts; rank 0 returns immediately, the others once connected.

    Raise OSError if that takes longer than ``timeout`` (twice as long if another program listens without answering), or
    if rank 0 cannot bind the port.
    """
    host, port = rendezvous_host(), int(os.environ["MASTER_PORT"])
    if rank != 0:
        _wait_for_listener(host, port, timeout.total_seconds())
    is_master = rank == 0 and not is_agents_store()

    def build() -> dist.TCPStore:
        # Do not wait for all ranks here: the store's timeout error would not name the missing ones.
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}
        if is_master:
            # By default the store listens on every interface, and any host that reaches it could write into it.
            options["master_listen_fd"] = listen(host, port).detach()
        return dist.TCPStore(host, port, world_size, is_master=is_master, timeout=timeout, **options)

    if is_master:
        store = build()
    else:
        store = _within(build, timeout.total_seconds())
    # torchrun's store outlives a failed start and still has its keys.
    prefix = "longctx"
    if is_agents_store():
        prefix = f"longctx/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return dist.PrefixStore(prefix, store)


def _within(build: Callable[[], dist.TCPStore], seconds: float) -> dist.TCPStore:
    """Return the store from ``build``. Raise OSError if it takes longer than ``seconds``."""
    # torch waits without a limit for the first reply, and the listener may be another program.
    found: list[dist.TCPStore | BaseException] = []

    def act() -> None:
        try:
            found.append(build())
        # The caller raises it.
        except BaseException as error:
            found.append(error)

    # A stuck thread does not keep the process alive: it exits by ``os._exit``.
    thread = threading.Thread(target=act, name="meeting", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise OSError(f"the listener there did not respond within {seconds:.0f} s, so it is not rank 0")
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _wait_for_listener(host: str, port: int, seconds: float) -> None:
    """Return once a program listens at the address. Raise OSError after ``seconds``."""
    # Probe before torch does: torch's error is half a screen of C++.
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=min(5.0, seconds)).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise OSError(f"no process answers there within {seconds:.0f} s ({error})") from error
        time.sleep(0.1)
