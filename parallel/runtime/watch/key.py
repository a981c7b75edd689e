"""Authentication key for a run's watch, and its distribution from rank 0 to the others.

Ranks rendezvous in torch's store, which any client that reaches its port can read and write. So the key is not sent
there:

* a launcher may pass it to every rank in ``LONGCTX_WATCH_KEY``;
* otherwise rank 0 writes it to a file that only this user may read: on one machine in the temporary folder, on several
  in ``~/.cache/longctx``, which a cluster's machines often share. The file is removed once all ranks have joined;
* a rank that can use neither requests it in the store, and rank 0 warns that it is exposed there.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from parallel.runtime.listening import is_one_machine

KEY_VARIABLE = "LONGCTX_WATCH_KEY"
_FORM = re.compile(r"[0-9a-zA-Z]{16,128}")
_POLL_SECONDS = 2.0
"""How long a rank polls for a file written on another machine: NFS shows it late."""


@dataclass(frozen=True)
class WatchKey:
    """Key, and the file from which the other ranks read it."""

    value: str
    file: Path | None = None

    def remove(self) -> None:
        """Remove the file: all ranks have read it."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink()
            with contextlib.suppress(OSError):
                self.file.parent.rmdir()


def environment_key() -> str | None:
    """Return the key passed to this rank in the environment, if it is well-formed."""
    value = os.environ.get(KEY_VARIABLE, "")
    if _FORM.fullmatch(value):
        return value
    return None


def new_key() -> WatchKey:
    """Return the key for a new run, on rank 0: the one passed to it, or a new one in a private file.

    Without a file if it cannot be written.
    """
    from_environment = environment_key()
    if from_environment is not None:
        return WatchKey(from_environment)
    value = secrets.token_hex(32)
    folder = None
    if not is_one_machine():
        folder = Path("~/.cache/longctx").expanduser()
    with contextlib.suppress(OSError, RuntimeError):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        # mkdtemp creates the folder with permissions for its user only.
        file = Path(tempfile.mkdtemp(prefix="watch-", dir=folder)) / "key"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(value)
        return WatchKey(value, file)
    return WatchKey(value)


def read_key(file: str) -> str | None:
    """Return the key from this user's file that no other user may read; None if there is no such file.

    The path comes from the store, which an attacker may have written: text that is not a well-formed key is not
    returned.
    """
    deadline = time.monotonic() + _POLL_SECONDS
    while True:
        with contextlib.suppress(OSError, ValueError):
            with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as read:
                status = os.fstat(read.fileno())
                is_private = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
                value = read.read(256).decode("ascii", "replace")
            if is_private and stat.S_ISREG(status.st_mode) and _FORM.fullmatch(value):
                return value
            return None
        if is_one_machine() or time.monotonic() > deadline:
            return None
        time.sleep(0.05)
