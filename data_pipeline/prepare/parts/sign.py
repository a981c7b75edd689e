"""Hash the texts of one part, to compare them with all others: the first pass of a build that looks for duplicates."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.prepare.duplicates.rule import DuplicateRule
from data_pipeline.prepare.duplicates.signed import SignedRecord, SignedWriter
from data_pipeline.prepare.parts.deal import Part
from data_pipeline.prepare.parts.staging import KEPT
from data_pipeline.prepare.parts.work import Advance
from data_pipeline.prepare.reading import ReadAs, Reading
from longctx.files import explained_writes


def sign_part(part: Part, folder: Path, *, read_as: ReadAs, rule: DuplicateRule, advance: Advance) -> SignedRecord:
    """Fill ``folder`` with what tells the part's texts apart, and write its record last.

    What a killed worker left there is removed first. What is left out is not listed: the second pass meets it again.
    """
    with explained_writes(folder, kept=KEPT):
        writer = SignedWriter(folder, rule)
        reading = Reading(read_as)
        for document in reading.documents(part.pieces):
            writer.add(document.name, document.text)
            advance(writer.documents, writer.text_bytes, reading.bytes_read)
        return writer.finish()
