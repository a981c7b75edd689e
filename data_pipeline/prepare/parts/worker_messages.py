"""Messages to and from workers, shared by all engines, and the single function that does the work."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from data_pipeline.prepare.duplicates.outcome import PartDecision
from data_pipeline.prepare.duplicates.signed import SignedRecord
from data_pipeline.prepare.parts.part_record import PartRecord
from data_pipeline.prepare.parts.part_work import Advance, Advanced, EncodeJob, encode_part, sign_part
from data_pipeline.prepare.parts.source_parts import SourcePart
from longctx.errors import LongCtxError
from longctx.tokenizer.load_tokenizer import load_files
from longctx.tokenizer.tokenizer_base import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Setup:
    """First message to a worker."""

    job: EncodeJob
    threads: int
    """Tokenizer threads."""
    files: Mapping[str, bytes]
    """Tokenizer files."""
    path: Path
    """Path the files were read from, for messages."""
    fingerprint: str

    @classmethod
    def of(cls, job: EncodeJob, tokenizer: Tokenizer, threads: int) -> Setup:
        """Return a setup with which a worker behaves as this process would."""
        return cls(
            job=job, threads=threads, files=tokenizer.files, path=tokenizer.path, fingerprint=tokenizer.fingerprint
        )

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer from its files."""
        # Use the files in memory: those on disk may have been replaced since they were read.
        tokenizer = load_files(self.files, self.path)
        assert tokenizer.fingerprint == self.fingerprint
        tokenizer.threads = self.threads
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class PartTask:
    """A source part to encode or to sign."""

    part: SourcePart
    folder: Path
    signs: bool = False
    """True if its texts are only hashed for comparison."""
    decision: PartDecision | None = None
    """Decision on its documents; None without a search for duplicates."""

    @property
    def done(self) -> str:
        """Past tense of the worker's task, for messages."""
        if self.signs:
            return "compared"
        return "encoded"


@dataclass(frozen=True, kw_only=True)
class Failed:
    """Reason a worker stopped: a user error, or an internal error's traceback."""

    error: LongCtxError | None
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        """Build the report for an error that was just caught."""
        # Tracebacks travel as text: exceptions from libraries may not survive pickling.
        known = None
        if isinstance(error, LongCtxError):
            known = error
        return cls(error=known, traceback="".join(traceback.format_exception(error)))

    def at(self, place: str) -> Failed:
        """Return the same report with the process that failed: a node may see other files than its driver."""
        if self.error is None:
            return replace(self, traceback=f"({place})\n{self.traceback}")
        return replace(self, error=type(self.error)(f"{self.error}\nSeen by {place}."))

    def reraise(self, part: SourcePart) -> NoReturn:
        """Raise in this process the error that ended ``part`` in a worker."""
        if self.error is not None:
            raise self.error
        raise RuntimeError(f"{part} failed in its worker:\n{self.traceback}")


Record = PartRecord | SignedRecord
Report = Advanced | Record | Failed


def carry_out(task: PartTask, *, job: EncodeJob, tokenizer: Callable[[], Tokenizer], advance: Advance) -> Record:
    """Encode or sign an order's source part. ``tokenizer`` is called only if it is needed."""
    if task.signs:
        return sign_part(task.part, task.folder, job=job, advance=advance)
    return encode_part(task.part, task.folder, job=job, tokenizer=tokenizer(), advance=advance, decision=task.decision)
