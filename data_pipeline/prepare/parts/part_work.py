"""Encodes or signs one source part into its own folder: in this process, a worker, or on another machine."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.prepare.control_tokens import ControlTokenCounter, encode_parsed
from data_pipeline.prepare.duplicates.decide import is_held_out
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.duplicates.outcome import PartDecision
from data_pipeline.prepare.duplicates.signed import SignedRecord, SignedWriter
from data_pipeline.prepare.encode_conversations import encode_conversations
from data_pipeline.prepare.encode_images import encode_images
from data_pipeline.prepare.encode_pairs import encode_pairs
from data_pipeline.prepare.encode_preferences import encode_preferences, with_mismatched_replies
from data_pipeline.prepare.encode_texts import TextMismatch, encode_documents
from data_pipeline.prepare.images.image_rule import ImageRule
from data_pipeline.prepare.left_out import LeftOutFile
from data_pipeline.prepare.parts.part_record import SPLITS, PartRecord, SplitRecord
from data_pipeline.prepare.parts.source_parts import SourcePart
from data_pipeline.prepare.parts.staging import KEPT
from data_pipeline.prepare.source_items import PAIRS, Document
from data_pipeline.prepare.source_reader import ReadAs, SourceReader
from data_pipeline.shards.manifest import IMAGES, PREFERENCES
from data_pipeline.shards.shard_writer import ShardWriter
from longctx.chat.chat_encoder import ChatEncoder
from longctx.chat.chat_rule import ChatRule
from longctx.chat.preference import LABELLED, PREFERENCE_FIELDS
from longctx.errors import DataError
from longctx.files import convert_write_errors, sync_path
from longctx.tokenizer.tokenizer_base import GROUP_CHARACTERS, Tokenizer

SHOWN_DIFFERENCES = 3
_CHARACTERS_PER_THREAD = 1 << 20


@dataclass(frozen=True, slots=True)
class Advanced:
    """Progress of some work."""

    documents: int = 0
    text_bytes: int = 0
    bytes_read: int = 0
    """Bytes read from disk."""

    def __add__(self, other: Advanced) -> Advanced:
        return Advanced(
            self.documents + other.documents, self.text_bytes + other.text_bytes, self.bytes_read + other.bytes_read
        )


Advance = Callable[[Advanced], None]
"""Callback that receives progress."""


@dataclass(frozen=True, kw_only=True)
class EncodeJob:
    """Options for encoding every source part."""

    read_as: ReadAs
    validation_fraction: float
    shard_tokens: int
    exact: bool
    duplicates: DuplicateRule = field(default_factory=DuplicateRule)
    chat: ChatRule | None = None
    """How conversations and preferences are encoded; None if the source has texts."""
    paragraphs: bool = False
    """True if documents record their paragraphs' starts."""
    parse_special_tokens: bool = False
    """True if control tokens in texts become their ids."""
    images: ImageRule | None = None
    """How images are converted; None if the source has texts."""

    @property
    def has_preferences(self) -> bool:
        """True if the records are prompts with replies to compare."""
        return self.read_as.fields.kind in PREFERENCE_FIELDS

    @property
    def kind(self) -> str:
        """Folder kind, as in the manifest."""
        if self.images is not None:
            return IMAGES
        return PREFERENCES if self.has_preferences else ""


def encode_part(
    part: SourcePart,
    folder: Path,
    *,
    job: EncodeJob,
    tokenizer: Tokenizer,
    advance: Advance,
    decision: PartDecision | None = None,
) -> PartRecord:
    """Fill ``folder`` with the source part's shards and lists, and write its record last.

    ``decision`` selects the documents that are kept and the split for some of them. Remains of a killed worker are
    removed first.
    """
    with convert_write_errors(folder, kept=KEPT):
        shutil.rmtree(folder, ignore_errors=True)
        writers: dict[str, ShardWriter] = {}
        for split in SPLITS:
            (folder / split).mkdir(parents=True)
            writers[split] = ShardWriter(
                folder / split,
                vocab_size=tokenizer.vocab_size,
                shard_tokens=job.shard_tokens,
                masked=job.chat is not None and not job.has_preferences,
                pairs=job.read_as.fields.kind == PAIRS,
                paragraphs=job.paragraphs,
                images=job.images is not None,
                preferences=job.has_preferences,
            )
        # One list per source part; ``assemble_folder`` concatenates them in source order.
        left_out = LeftOutFile(folder)
        reader = SourceReader(job.read_as, left_out.add)
        documents = reader.documents(part.pieces)
        if job.read_as.fields.kind == LABELLED:
            # Before duplicates are removed, so that the decision refers to the same documents.
            documents = with_mismatched_replies(documents)
        chosen = _Chosen(decision, documents, one_by_one=job.chat is not None)
        control_counter = ControlTokenCounter(tokenizer)
        num_mismatched, differences = _write_documents(
            chosen, writers, reader, job=job, tokenizer=tokenizer, control_counter=control_counter, advance=advance
        )
        # No manifest per source part: ``assemble_folder`` writes one for all parts.
        for writer in writers.values():
            writer.close()
        record = PartRecord(
            splits={split: _split_record(writers[split], num_mismatched[split]) for split in SPLITS},
            skipped=dict(sorted(reader.left_out.counts.items())),
            examples=reader.left_out.examples,
            left_out=left_out.close(),
            differences=differences,
            spelling=control_counter.documents,
            spelt=dict(control_counter.by_token),
        )
        # The record validates every file, so all files and their names must be on disk first.
        for path in sorted(folder.rglob("*"), reverse=True):
            sync_path(path)
        record.save(folder)
        sync_path(folder)
    return record


def sign_part(part: SourcePart, folder: Path, *, job: EncodeJob, advance: Advance) -> SignedRecord:
    """Fill ``folder`` with the hashes and signatures of the source part's texts, and write its record last.

    Remains of a killed worker are removed first. Skipped records are not listed: the second pass finds them again.
    """
    with convert_write_errors(folder, kept=KEPT):
        writer = SignedWriter(folder, job.duplicates)
        reader = SourceReader(job.read_as)
        for document in reader.documents(part.pieces):
            writer.add(document.name, document.text)
            advance(Advanced(writer.documents, writer.text_bytes, reader.bytes_read))
        return writer.finish()


class _Chosen:
    """Kept documents in a source part, and the split for each."""

    def __init__(
        self, decision: PartDecision | None, documents: Iterator[Document], *, one_by_one: bool = False
    ) -> None:
        """Initialize; with ``one_by_one``, each document is completely encoded before the next one is requested.

        Such a document may become any number of encoded documents.
        """
        self._decision, self._documents, self._one_by_one = decision, documents, one_by_one
        # Documents are encoded in groups, so their splits wait here until they are done.
        self._held_out: deque[bool | None] = deque()

    def __iter__(self) -> Iterator[Document]:
        if self._decision is None:
            yield from self._documents
            return
        for document, side in self._decision.applied(self._documents):
            if self._one_by_one:
                self._held_out.clear()
            self._held_out.append(side)
            yield document

    def split(self, text_hash: int, fraction: float) -> str:
        """Return the split for the next encoded document."""
        held_out = None
        if self._decision is not None and self._one_by_one:
            held_out = self._held_out[-1]
        elif self._decision is not None:
            held_out = self._held_out.popleft()
        if held_out is None:
            # Decide by the text's hash: equal texts anywhere in the corpus get the same split.
            held_out = is_held_out(text_hash, fraction)
        if held_out:
            return "validation"
        return "training"


def _write_documents(
    chosen: _Chosen,
    writers: dict[str, ShardWriter],
    reader: SourceReader,
    *,
    job: EncodeJob,
    tokenizer: Tokenizer,
    control_counter: ControlTokenCounter,
    advance: Advance,
) -> tuple[dict[str, int], list[TextMismatch]]:
    """Encode the source part's documents into the splits' writers; return inexact counts per split and first
    differences.
    """
    num_mismatched: dict[str, int] = dict.fromkeys(SPLITS, 0)
    differences: list[TextMismatch] = []
    text_bytes = 0
    size = group_characters(tokenizer.threads)
    # All encoders yield documents lazily and in order, so memory holds one group.
    if job.images is not None:
        documents = encode_images(chosen, tokenizer, job.images, reader.leave_out)
    elif job.read_as.fields.kind == PAIRS:
        documents = encode_pairs(chosen, tokenizer, size)
    elif job.parse_special_tokens:
        documents = encode_parsed(chosen, tokenizer)
    elif job.has_preferences:
        assert job.chat is not None, "preferences are encoded by a rule"
        documents = encode_preferences(chosen, tokenizer, job.chat, reader.note)
    elif job.chat is None:
        documents = encode_documents(control_counter.noting(chosen), tokenizer, size, paragraphs=job.paragraphs)
    else:
        documents = encode_conversations(chosen, ChatEncoder(tokenizer, job.chat), reader.note)
    for number, (encoded, difference) in enumerate(documents, start=1):
        # Fail at the first difference: encoding the rest would be wasted.
        if difference is not None and job.exact:
            raise DataError(mismatch_message(difference, tokenizer))
        split = chosen.split(encoded.hash, job.validation_fraction)
        writers[split].add(encoded)
        if difference is not None:
            num_mismatched[split] += 1
            if len(differences) < SHOWN_DIFFERENCES:
                differences.append(difference)
        text_bytes += encoded.text_bytes
        advance(Advanced(number, text_bytes, reader.bytes_read))
    return num_mismatched, differences


def group_characters(threads: int) -> int:
    """Return the number of characters to encode at once: enough to keep the threads busy, with minimal memory."""
    if threads < 1:
        return GROUP_CHARACTERS
    return min(GROUP_CHARACTERS, _CHARACTERS_PER_THREAD * threads)


def mismatch_message(difference: TextMismatch, tokenizer: Tokenizer) -> str:
    """Return a message about why a document is rejected, and how to keep every character."""
    return (
        f"{difference}: it does not round-trip exactly through {tokenizer.path}.\n"
        "Leave --exact out to count such documents, or train a tokenizer with `longctx tokenizer train`, which "
        "preserves every character."
    )


def _split_record(writer: ShardWriter, num_mismatched: int) -> SplitRecord:
    return SplitRecord(
        shards=writer.shards,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        text_bytes=writer.text_bytes,
        length_histogram=writer.length_histogram,
        inexact=num_mismatched,
    )
