"""Engine interface for building source parts, and the pass over all parts that finds duplicates."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from data_pipeline.prepare.duplicates.decide import decide
from data_pipeline.prepare.duplicates.outcome import Outcome, save_outcome
from data_pipeline.prepare.duplicates.signed import SignedCorpus, SignedPart, SignedRecord
from data_pipeline.prepare.parts.part_work import Advance, Advanced, EncodeJob
from data_pipeline.prepare.parts.source_parts import SourcePart
from data_pipeline.prepare.parts.staging import Staging
from data_pipeline.prepare.parts.worker_messages import PartTask
from longctx.tokenizer.tokenizer_base import Tokenizer

OnPart = Callable[[SourcePart, Any], None]
"""Callback that receives a finished source part and its record."""


class Engine(Protocol):
    """Workers: processes on this machine or in a cluster."""

    def carry_out(
        self, tasks: Sequence[PartTask], context: BuildContext, *, advance: Advance, finished: OnPart
    ) -> None:
        """Carry out all orders, in any sequence; each is done when its folder contains its record.

        ``advance`` receives totals over the source parts in progress. The first failure is raised once all workers have
        stopped: DataError as the part raised it, or ClusterError if the system has removed a worker and the engine has
        no replacement.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """An engine, and the values that all orders in a build share."""

    engine: Engine
    staging: Staging
    job: EncodeJob
    tokenizer: Tokenizer
    workers: int | None = None
    """Concurrent workers; None: as many as the engine has."""

    def carry_out(self, tasks: Sequence[PartTask], records: dict[int, Any], *, advance: Advance) -> None:
        """Carry out the orders for source parts missing from ``records``, and add their records, keyed by part number.

        ``advance`` receives totals over all parts, including those with a record.
        """
        parts = [order.part for order in tasks if order.part.number in records]
        done = sum((_whole(part, records[part.number]) for part in parts), Advanced())

        def finished(part: SourcePart, record: Any) -> None:
            nonlocal done
            records[part.number] = record
            done += _whole(part, record)

        # Start the display here, so that its rate covers only this build.
        if parts:
            advance(done)
        rest = [order for order in tasks if order.part.number not in records]
        self.engine.carry_out(rest, self, advance=lambda of_work: advance(done + of_work), finished=finished)


def _whole(part: SourcePart, record: Any) -> Advanced:
    """Return a finished source part's counts."""
    return Advanced(record.documents, record.text_bytes, part.size)


logger = logging.getLogger(__name__)


def find_duplicates(
    parts: Sequence[SourcePart], context: BuildContext, *, advance: Advance, say: Callable[[str], None]
) -> Outcome:
    """Return the decision on every document in ``parts``, loaded if an earlier build made it and computed otherwise.

    ``advance`` receives totals over all parts. The result does not depend on the number of workers: parts are hashed
    independently, and one process decides.
    """
    staging, job = context.staging, context.job
    outcome = Outcome.load(staging.decisions)
    if outcome is not None:
        # Left by a build that was killed while removing them.
        shutil.rmtree(staging.signatures, ignore_errors=True)
        return outcome
    folders = {part.number: staging.signatures_folder(part.number) for part in parts}
    # Loading verifies every byte: a damaged source part is hashed again.
    found = {number: SignedRecord.load(folder) for number, folder in folders.items()}
    records = {number: record for number, record in found.items() if record is not None}
    if records:
        say(f"resuming: {len(records)} of {len(parts)} parts are already hashed")
    tasks = [PartTask(part=part, folder=folders[part.number], signs=True) for part in parts]
    context.carry_out(tasks, records, advance=advance)
    signed = [SignedPart(folders[part.number], records[part.number].documents, job.duplicates) for part in parts]
    corpus = SignedCorpus(signed)
    logger.info("comparing %s documents", f"{len(corpus):,}")
    outcome = save_outcome(staging.decisions, corpus, decide(corpus, job.duplicates, job.validation_fraction))
    # Remove about four hundred bytes per document that are no longer needed.
    shutil.rmtree(staging.signatures)
    return outcome
