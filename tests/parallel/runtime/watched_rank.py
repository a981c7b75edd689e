"""A rank under the watch, in a process of its own that knows nothing of torch: ``python watched_rank.py FOLDER ACT``.

ACT is Python code, run once all ranks have met, with the names of this module; ``block()`` in it never returns and
hears no signal, as a collective of NCCL whose peer is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from launcher.cluster import exit as ending
from longctx.errors import ClusterError, ConfigError, DataError  # noqa: F401
from parallel.runtime.activity import begin, waiting  # noqa: F401
from parallel.runtime.watch import current  # noqa: F401
from parallel.runtime.watch.current import active_watch, start_watch, stop_watch  # noqa: F401
from parallel.runtime.watch.watch_options import WatchOptions

FOLDER, ACT = Path(sys.argv[1]), sys.argv[2]
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TIMEOUT, MEET = float(os.environ.get("TIMEOUT", "30")), float(os.environ.get("MEET", "30"))
VERSION = os.environ.get(f"VERSION_{RANK}", "")


class FolderStore:
    """Where the ranks meet: a folder."""

    def set(self, key: str, value: str, /) -> None:
        """Write a file."""
        partial = FOLDER / f"{RANK}.partial"
        partial.write_text(value)
        partial.rename(FOLDER / key.replace("/", "_"))

    def get(self, key: str, /) -> bytes:
        """Wait for a file."""
        path = FOLDER / key.replace("/", "_")
        while not path.exists():
            time.sleep(0.01)
        return path.read_bytes()

    def check(self, keys: list[str], /) -> bool:
        """Look for files."""
        return all((FOLDER / key.replace("/", "_")).exists() for key in keys)

    def delete_key(self, key: str, /) -> bool:
        """Remove a file."""
        (FOLDER / key.replace("/", "_")).unlink(missing_ok=True)
        return True


def block() -> None:
    """Wait in C, without Python's lock, for a mutex that this thread holds."""
    mutex = ctypes.create_string_buffer(128)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def meet(place: str = "here") -> None:
    """Wait for all ranks."""
    store = FolderStore()
    store.set(f"{place}_{RANK}", "")
    for rank in range(RANKS):
        store.get(f"{place}_{rank}")


def act() -> None:
    """Be watched, and do what was asked for."""
    last_act = (FOLDER / f"last_act_{RANK}").touch
    options = WatchOptions(
        rank=RANK,
        world_size=RANKS,
        timeout=TIMEOUT,
        rendezvous_seconds=MEET,
        version=VERSION,
        hint="A remark.",
        last_act=last_act,
        folder=FOLDER,
    )
    start_watch(FolderStore(), options)
    meet()
    exec(ACT, globals())
    stop_watch()


if __name__ == "__main__":
    # A shell starts what runs in the background without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ending.run_script(act, abort_message="It was interrupted.")
