"""Find the duplicates of a whole source: sign its parts, decide once, keep the decision in the staging folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence

from data_pipeline.prepare.duplicates.corpus import SignedCorpus
from data_pipeline.prepare.duplicates.decide import decide
from data_pipeline.prepare.duplicates.outcome import Outcome, save_outcome
from data_pipeline.prepare.duplicates.signed import SignedPart, SignedRecord
from data_pipeline.prepare.parts.deal import Part
from data_pipeline.prepare.parts.engine import Crew
from data_pipeline.prepare.parts.work import Advance

logger = logging.getLogger(__name__)


def find_duplicates(parts: Sequence[Part], crew: Crew, *, advance: Advance, say: Callable[[str], None]) -> Outcome:
    """What becomes of every document of ``parts``: read where an earlier build has decided it, else found out.

    ``advance`` is told the sums over all parts. Nothing depends on the number of workers: parts are hashed each by
    itself, and one process decides.
    """
    staging, job = crew.staging, crew.job
    outcome = Outcome.load(staging.decisions)
    if outcome is not None:
        # Left by a build that was killed while it removed them.
        shutil.rmtree(staging.signatures, ignore_errors=True)
        return outcome
    records: dict[int, SignedRecord] = {}
    # Each is checked to the byte: a damaged one is hashed again.
    for part in parts:
        record = SignedRecord.load(staging.signatures_folder(part.number))
        if record is not None:
            records[part.number] = record
    if records:
        say(f"going on: the texts of {len(records)} of {len(parts)} parts are hashed")
    signing = _Signing(parts, records, advance)
    crew.sign(
        [part for part in parts if part.number not in records],
        advance=signing.in_work,
        finished=signing.finished,
    )
    signed = [
        SignedPart(staging.signatures_folder(part.number), records[part.number].documents, job.duplicates)
        for part in parts
    ]
    corpus = SignedCorpus(signed)
    logger.info("comparing %s documents", f"{len(corpus):,}")
    outcome = save_outcome(staging.decisions, corpus, decide(corpus, job.duplicates, job.validation_fraction))
    # Some four hundred bytes a document, which nobody reads any more.
    shutil.rmtree(staging.signatures)
    return outcome


class _Signing:
    """Adds up what was done of a pass over all parts."""

    def __init__(self, parts: Sequence[Part], records: dict[int, SignedRecord], advance: Advance) -> None:
        self._records, self._advance = records, advance
        self._documents = sum(record.documents for record in records.values())
        self._text_bytes = sum(record.text_bytes for record in records.values())
        self._passed = sum(part.size for part in parts if part.number in records)

    def in_work(self, documents: int, text_bytes: int, bytes_read: int) -> None:
        """Pass on how far the parts in work are, on top of those that are done."""
        self._advance(self._documents + documents, self._text_bytes + text_bytes, self._passed + bytes_read)

    def finished(self, part: Part, record: SignedRecord) -> None:
        """Take a part that is done."""
        self._records[part.number] = record
        self._documents += record.documents
        self._text_bytes += record.text_bytes
        self._passed += part.size
