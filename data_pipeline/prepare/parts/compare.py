"""Find the duplicates of a whole source: sign its parts, decide once, keep the decision in the staging folder."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence

from data_pipeline.prepare.duplicates.decide import decide
from data_pipeline.prepare.duplicates.outcome import Outcome, save_outcome
from data_pipeline.prepare.duplicates.signed import SignedCorpus, SignedPart, SignedRecord
from data_pipeline.prepare.parts.deal import Part
from data_pipeline.prepare.parts.engine import Crew
from data_pipeline.prepare.parts.order import Order
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
    folders = {part.number: staging.signatures_folder(part.number) for part in parts}
    # Each is checked to the byte: a damaged one is hashed again.
    found = {number: SignedRecord.load(folder) for number, folder in folders.items()}
    records = {number: record for number, record in found.items() if record is not None}
    if records:
        say(f"going on: the texts of {len(records)} of {len(parts)} parts are hashed")
    orders = [Order(part=part, folder=folders[part.number], signs=True) for part in parts]
    crew.carry_out(orders, records, advance=advance)
    signed = [SignedPart(folders[part.number], records[part.number].documents, job.duplicates) for part in parts]
    corpus = SignedCorpus(signed)
    logger.info("comparing %s documents", f"{len(corpus):,}")
    outcome = save_outcome(staging.decisions, corpus, decide(corpus, job.duplicates, job.validation_fraction))
    # Some four hundred bytes a document, which nobody reads any more.
    shutil.rmtree(staging.signatures)
    return outcome
