"""Worker code, local or on a cluster machine: a check of its environment, and the work itself.

This module does not depend on the system that started it.
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

from data_pipeline.prepare.parts.part_work import Advanced
from data_pipeline.prepare.parts.worker_messages import Failed, PartTask, Report, Setup, carry_out
from longctx.files import write_synced

_VISIBILITY_TIMEOUT_SECONDS = 10.0
"""Time until a file written elsewhere must be visible here."""

_LIBRARIES = ("longctx-train", "numpy", "pillow", "pyarrow", "sentencepiece", "tokenizers", "xxhash")
"""Libraries that determine a shard's bytes."""


def library_versions() -> dict[str, str]:
    """Return this process's versions of the libraries that determine a shard's bytes."""
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            # Our own package, if it is run from its repository.
            versions[name] = "none"
    return versions


@dataclass(frozen=True, kw_only=True)
class NodeCheck:
    """Conditions that a machine must meet to get work: it sees a new file in the staging folder and has equal
    libraries.
    """

    folder: Path
    """Staging folder."""
    token: str
    """Name of a file in the staging folder, and its content."""
    versions: Mapping[str, str]
    """Library versions in the process that assigns orders."""

    def answer(self, name: str) -> Path:
        """Return the file with which a machine proves that its writes are visible to others."""
        return self.folder / f"{self.token}.{name}"

    def problem(self, name: str) -> str | None:
        """Return the reason this machine cannot work there, if any; otherwise write its answer under ``name``."""
        found = library_versions()
        for library, version in self.versions.items():
            if found[library] != version:
                return (
                    f"has {library} {found[library]}, this machine has {version}: shards could differ.\n"
                    "Install the same version."
                )
        # The token proves that this machine mounts the same folder and not merely the same path.
        if not _is_seen(self.folder / self.token, self.token):
            return f"does not see {self.folder}.\n{SHARED}"
        try:
            write_synced(self.answer(name), self.token.encode())
        except OSError as error:
            return f"cannot write to {self.folder} ({error.strerror}).\n{SHARED}"
        return None

    def has_answer(self, name: str) -> bool:
        """Return whether the machine's answer is visible here."""
        return _is_seen(self.answer(name), self.token)


SHARED = (
    "Choose an --output on a file system that every node mounts at the same path; "
    "for a store URL, set LONGCTX_CACHE to a folder on one."
)


class NodeWorker:
    """Worker that carries out orders sequentially in its own process."""

    def __init__(self, setup: Setup, seconds_between_reports: float = 1.0) -> None:
        # Hugging Face's tokenizers read this once, before their first text.
        os.environ["RAYON_NUM_THREADS"] = str(setup.threads)
        self._job, self._seconds = setup.job, seconds_between_reports
        # Loaded on first use: a pass that hashes texts needs no tokenizer.
        self._tokenizer = functools.cache(setup.load_tokenizer)

    def check_node(self, node_check: NodeCheck, name: str) -> tuple[str, str | None]:
        """Return this process's name and the reason it cannot work, if any."""
        return where(), node_check.problem(name)

    def carry_out(self, task: PartTask) -> Iterator[Report]:
        """Yield the source part's progress from time to time, and finally its record or failure."""
        reports: queue.SimpleQueue[Report] = queue.SimpleQueue()

        due = 0.0

        def advance(advanced: Advanced) -> None:
            nonlocal due
            now = time.monotonic()
            # Limit the rate: a message for each of a million short documents would cost more than encoding them.
            if now >= due:
                due = now + self._seconds
                reports.put(advanced)

        def work() -> None:
            try:
                reports.put(carry_out(task, job=self._job, tokenizer=self._tokenizer, advance=advance))
            except BaseException as error:
                # Send the error as a report: the caller shows a user's error as its own.
                reports.put(Failed.of(error))

        # The source part reports through a callback but the caller expects a stream, so run it in a thread.
        threading.Thread(target=work, daemon=True).start()
        while True:
            report = reports.get()
            yield report
            if not isinstance(report, Advanced):
                return


def where() -> str:
    """Return this process and its host, for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def _is_seen(path: Path, content: str) -> bool:
    """Return whether a file written elsewhere is visible here; network file systems may take a moment."""
    until = time.monotonic() + _VISIBILITY_TIMEOUT_SECONDS
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
