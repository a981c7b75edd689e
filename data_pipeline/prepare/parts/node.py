"""What runs in a worker, here or on a machine of a cluster: a look at what it sees, and the work itself.

Nothing here knows which system started it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.prepare.parts.order import Failed, Order, Report, Setup, carry_out
from data_pipeline.prepare.parts.work import Advanced
from longctx.files import write_synced

_PATIENCE_SECONDS = 10.0
"""How long a file that was written elsewhere may take to be seen here."""

_LIBRARIES = ("longctx-train", "numpy", "pyarrow", "sentencepiece", "tokenizers", "xxhash")
"""What decides a shard's bytes."""


def library_versions() -> dict[str, str]:
    """The versions that this process has of the libraries on which a shard's bytes depend."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # Ours, where it is run from its repository.
            versions[name] = "none"
    return versions


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a machine must see before it gets work: a file that was just written, and the same libraries."""

    folder: Path
    """The staging folder."""
    token: str
    """The name of a file in it, and what the file holds."""
    versions: Mapping[str, str]
    """Those of the process that hands out the orders."""

    def answer(self, name: str) -> Path:
        """The file by which a machine shows that it writes where others read."""
        return self.folder / f"{self.token}.{name}"

    def problem(self, name: str) -> str | None:
        """Why this machine cannot work there; None if it can. It then leaves its answer under ``name``."""
        found = library_versions()
        for library, version in self.versions.items():
            if found[library] != version:
                return (
                    f"has {library} {found[library]}, and here it is {version}: shards could differ.\nInstall the same."
                )
        if not _is_seen(self.folder / self.token, self.token):
            return f"does not see {self.folder}.\n{SHARED}"
        try:
            write_synced(self.answer(name), self.token.encode())
        except OSError as error:
            return f"cannot write to {self.folder} ({error.strerror}).\n{SHARED}"
        return None

    def is_answered(self, name: str) -> bool:
        """Whether what the machine has written is seen here."""
        return _is_seen(self.answer(name), self.token)


SHARED = (
    "Name an --output on a file system that every node mounts in the same place; "
    "for a store's URL, set LONGCTX_CACHE to a folder on one."
)


class NodeWorker:
    """Carries out orders, one after the other, in a process of its own."""

    def __init__(self, setup: Setup, seconds_between_reports: float = 1.0) -> None:
        # Hugging Face's tokenizers read it once, at their first text.
        os.environ["RAYON_NUM_THREADS"] = str(setup.threads)
        self._job, self._seconds = setup.job, seconds_between_reports
        # Not loaded before it is needed: a pass that hashes texts has none.
        self._tokenizer = functools.cache(setup.load_tokenizer)

    def look(self, look: Look, name: str) -> tuple[str, str | None]:
        """What this process is called, and why it cannot work; None if it can."""
        return where(), look.problem(name)

    def carry_out(self, order: Order) -> Iterator[Report]:
        """Yield how far the part is, now and then, and last its record or why it failed."""
        reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

        due = 0.0

        def advance(advanced: Advanced) -> None:
            nonlocal due
            now = time.monotonic()
            # A message for each of a million short documents would cost more than encoding them.
            if now >= due:
                due = now + self._seconds
                reports.put(advanced)

        def work() -> None:
            try:
                reports.put(carry_out(order, job=self._job, tokenizer=self._tokenizer, advance=advance))
            except BaseException as error:
                # Sent, not raised: who gave the order shows a user's error as its own.
                reports.put(Failed.of(error))

        # In a thread: the part calls back, and who asked wants a stream.
        threading.Thread(target=work, daemon=True).start()
        while True:
            report = reports.get()
            yield report
            if not isinstance(report, Advanced):
                return


def where() -> str:
    """This process, as a person finds it."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_seen(path: Path, content: str) -> bool:
    """Whether a file that was written elsewhere is here; a network's file systems may take a moment."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            if path.read_bytes() == content.encode():
                return True
        except OSError:
            # Not there yet, or never.
            pass
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
