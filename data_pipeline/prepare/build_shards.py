"""Builds two shard folders from a source: training, and ``validation`` inside it."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data_pipeline.prepare.build_checks import (
    check_images,
    check_numbers,
    check_paragraphs,
    check_parsing,
    check_splits,
    check_trained,
    preference_rule,
)
from data_pipeline.prepare.duplicates.duplicate_rule import DuplicateRule
from data_pipeline.prepare.duplicates.outcome import DuplicateReport, Outcome, PartDecision, part_file, read_report
from data_pipeline.prepare.encode_preferences import has_chat_template
from data_pipeline.prepare.encode_texts import TextMismatch
from data_pipeline.prepare.images.image_rule import ImageRule
from data_pipeline.prepare.left_out import LEFT_OUT_FILE, LeftOut, read_left_out
from data_pipeline.prepare.parts.build_engine import BuildContext, Engine, find_duplicates
from data_pipeline.prepare.parts.part_record import PartRecord
from data_pipeline.prepare.parts.part_work import SHOWN_DIFFERENCES, Advance, Advanced, EncodeJob, mismatch_message
from data_pipeline.prepare.parts.pool import LocalEngine
from data_pipeline.prepare.parts.source_parts import SourcePart, hash_parts, part_bytes, split_into_parts
from data_pipeline.prepare.parts.staging import Staging, assemble_folder, open_staging, remove_stale_staging
from data_pipeline.prepare.parts.worker_messages import PartTask
from data_pipeline.prepare.publish import check_output_free, send, transfer_folder
from data_pipeline.prepare.source_items import Progress
from data_pipeline.prepare.sources import TextSource
from data_pipeline.shards.manifest import (
    MANIFEST_FILE,
    PARAGRAPHS,
    PREFERENCES,
    VALIDATION_FOLDER,
    Manifest,
    hash_json,
)
from data_pipeline.shards.shard_compression import PACKED_FILE, CompressedFolder
from data_pipeline.shards.shard_verification import open_validated
from data_pipeline.shards.shard_writer import DEFAULT_SHARD_TOKENS
from data_pipeline.stores.client import list_objects
from data_pipeline.stores.urls import Location, ObjectPath, locate
from longctx.chat.chat_rule import ChatRule, chat_options, resolve_time
from longctx.chat.conversation import FIELDS
from longctx.chat.preference import COMPARED, PREFERENCE_FIELDS
from longctx.chat.tuned_chat_files import with_chat
from longctx.errors import DataError
from longctx.files import convert_write_errors
from longctx.tokenizer.tokenizer_base import Tokenizer

logger = logging.getLogger(__name__)

_SHOWN_DIRECTORIES = 3


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """Counts for one shard folder."""

    folder: Path | str
    """Path, or URL of a folder in a store."""
    documents: int
    tokens: int
    text_bytes: int
    shards: int
    source_tokens: int = 0
    """Source tokens in pairs, not included in ``tokens``; 0 without pairs."""

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 text bytes per token; tokens include each document's begin and end tokens."""
        return self.text_bytes / self.tokens


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """Result of ``build_shards``: counts for the new folder, or for the existing one if it was up to date."""

    output: Path | str
    """Path, or URL of a folder in a store."""
    up_to_date: bool
    """True if the folder already existed with the same inputs and no work was needed."""
    training: SplitReport
    validation: SplitReport | None
    """None if no document was held out."""
    skipped: dict[str, int]
    """Skipped records by reason."""
    inexact: int
    """Documents that do not decode exactly to their text."""
    differences: tuple[TextMismatch, ...]
    """First differences in the first few of them; empty for an existing folder."""
    left_out: dict[str, list[str]]
    """First names per reason."""
    left_out_file: Path | str | None
    """List with every skip; None if there are no skips, or if the release that built the folder wrote no list."""
    duplicates: DuplicateReport | None
    """Duplicates found; None if the build did not look for them."""
    seconds: float
    parts: int = 0
    """Source parts to encode; 0 if no work was needed."""
    parts_found: int = 0
    """Source parts that an earlier build had finished."""
    cut_directories: dict[str, int] = field(default_factory=dict)
    """Directories too large to be joined into one document, with their document counts."""
    spelling: int = 0
    """Documents that contain a control token as text; 0 if no work was needed."""
    spelt: dict[str, int] = field(default_factory=dict)
    """Documents per control token."""


def build_shards(
    source: TextSource,
    tokenizer: Tokenizer,
    output: str | Path | ObjectPath,
    *,
    validation_fraction: float = 0.05,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    exact: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    engine: Engine | None = None,
    duplicates: DuplicateRule | None = None,
    chat: ChatRule | None = None,
    paragraphs: bool = False,
    parse_special_tokens: bool = False,
    images: ImageRule | None = None,
    comparing: Progress | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = logger.info,
) -> BuildReport:
    """Tokenize ``source`` into the shard folder ``output``, with held-out documents in ``output/validation``.

    A document is held out by a hash of its text alone: equal texts are in the same split, and adding or removing
    documents never moves others. Every document is decoded and compared with its text: one that does not round-trip is
    counted, or raises with ``exact``. A folder already built from the same source, tokenizer and options is kept; a
    different one is an error unless ``overwrite``.

    ``workers`` processes (all cores by default) each encode one source part at a time, on this machine or on the
    machines behind ``engine`` (``parts.cluster.open_cluster``). The folder appears only when complete, and its bytes
    depend neither on ``workers`` nor on interruptions: after a kill, the next build continues from the finished parts.
    ``progress`` receives the documents and text bytes so far, ``say`` other messages for the user. A folder in a store
    is built in the cache and then sent, with its manifest last.

    ``duplicates`` adds a first pass over the source: equal or similar texts are removed and listed, or kept in the same
    split. ``comparing`` reports that pass's progress.

    ``chat`` sets how conversations and preferences are encoded; for conversations the folder records the tokens in the
    loss. With ``parse_special_tokens``, control tokens in texts become their ids, for conversations that are already
    rendered. With ``paragraphs`` the folder records paragraph starts: after blank lines, or after every line if a text
    has no blank line.

    For images, ``image_formats.choose_format`` returns ``tokenizer`` and ``images``; a hash of the pixels decides the
    split.
    """
    place = locate(output)
    check_numbers(validation_fraction, shard_tokens, workers)
    started = time.monotonic()
    _say_cut(source, say)
    chat = _chat_rule(source, chat, tokenizer, place, overwrite=overwrite)
    if chat is not None and (source.fields.kind in FIELDS or has_chat_template(tokenizer, chat)):
        tokenizer = with_chat(tokenizer, chat, say)
    job = EncodeJob(
        paragraphs=paragraphs,
        parse_special_tokens=parse_special_tokens,
        read_as=source.read_as,
        validation_fraction=validation_fraction,
        shard_tokens=shard_tokens,
        exact=exact,
        duplicates=duplicates or DuplicateRule(),
        chat=chat,
        images=images,
    )
    check_images(source, tokenizer, job)
    build = _Build(
        source=source,
        tokenizer=tokenizer,
        sources=[source.fingerprint()],
        options=_options(job, source, tokenizer),
        job=job,
        engine=engine or LocalEngine(),
        workers=workers,
        comparing=_advance(source, comparing),
        encoding=_advance(source, progress),
        say=say,
        started=started,
    )
    if isinstance(place, ObjectPath):
        return build.send_into(place, overwrite=overwrite)
    return build.make(place, overwrite=overwrite)


def _options(job: EncodeJob, source: TextSource, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the options that a manifest records; raise DataError for options that do not suit the source."""
    options: dict[str, Any] = {
        "validation_fraction": job.validation_fraction,
        "shard_tokens": job.shard_tokens,
        **job.duplicates.options(),
    }
    if job.chat is not None:
        options["chat"] = chat_options(tokenizer, job.chat)
    if job.has_preferences:
        kind = source.fields.kind
        options[PREFERENCES] = "pairs" if kind == COMPARED else kind
    if job.images is not None:
        options |= job.images.options()
    if job.paragraphs:
        check_paragraphs(source)
        options[PARAGRAPHS] = True
    if job.parse_special_tokens:
        check_parsing(source, tokenizer, paragraphs=job.paragraphs, exact=job.exact)
        options["parse_controls"] = True
    return options


def _advance(source: TextSource, progress: Progress | None) -> Advance:
    """Return a callback that updates the source's bytes read and calls ``progress``."""

    def advance(done: Advanced) -> None:
        source.bytes_read = done.bytes_read
        if progress is not None:
            progress(done.documents, done.text_bytes)

    return advance


def _chat_rule(
    source: TextSource, chat: ChatRule | None, tokenizer: Tokenizer, output: Location, *, overwrite: bool
) -> ChatRule | None:
    """Return the rule for encoding conversations; None for texts. Raise DataError for an invalid rule."""
    if source.fields.kind in PREFERENCE_FIELDS:
        chat = preference_rule(chat)
    elif source.fields.kind not in FIELDS:
        if chat is not None:
            raise DataError(f"{source.spec} contains no conversations: chat template and reply options do not apply.")
        return None
    # A finished folder keeps its date, so that building it again finds it up to date.
    recorded = {}
    if not overwrite and (output / MANIFEST_FILE).is_file():
        recorded = Manifest.load(output).options.get("chat", {})
    return resolve_time(chat or ChatRule(), tokenizer, recorded)


def _is_occupied(output: Path, *, overwrite: bool) -> bool:
    """Return whether a folder exists that must not be replaced; raise DataError if ``overwrite`` may not replace it."""
    # An empty folder made by the user may be filled.
    with convert_write_errors(output):
        occupied = output.exists() and not (output.is_dir() and not any(output.iterdir()))
    # --overwrite replaces shards, never a folder with other contents.
    if occupied and overwrite and not (output / MANIFEST_FILE).is_file():
        raise DataError(
            f"output={output} exists and is not a shard folder, so it is not overwritten. Name another folder."
        )
    return occupied and not overwrite


@dataclass(frozen=True, kw_only=True)
class _Build:
    """Inputs, options and engine for one build."""

    source: TextSource
    tokenizer: Tokenizer
    sources: list[dict[str, Any]]
    """Source fingerprints."""
    options: dict[str, Any]
    """Options as recorded in the manifest."""
    job: EncodeJob
    engine: Engine
    workers: int | None
    comparing: Advance
    encoding: Advance
    say: Callable[[str], None]
    started: float

    def send_into(self, output: ObjectPath, *, overwrite: bool) -> BuildReport:
        """Build in the cache folder and send the result to a store, unless the store already has it."""
        if (output / MANIFEST_FILE).is_file() and not overwrite:
            return self._keep(output)
        check_output_free(output, overwrite=overwrite)
        # One folder per recipe, so that leftovers from another build do not interfere.
        name = hash_json([self.sources, self.tokenizer.fingerprint, self.options])
        local = transfer_folder(output) / name
        made = self.make(local, overwrite=False)
        send(local, output, overwrite=overwrite, say=self.say)
        # Read the counts back from the store, as readers will see them.
        report = _report(output, self.source, differences=made.differences, started=self.started)
        shutil.rmtree(transfer_folder(output), ignore_errors=True)
        counts = {name: getattr(made, name) for name in ("parts", "parts_found", "spelling", "spelt")}
        return replace(report, **counts)

    def make(self, output: Path, *, overwrite: bool) -> BuildReport:
        """Build or continue in a staging folder next to the output, unless the output is up to date."""
        if _is_occupied(output, overwrite=overwrite):
            report = self._keep(output)
            remove_stale_staging(output)
            return report
        source, say = self.source, self.say
        # The recipe hash covers everything that determines the output's bytes, including the division into source
        # parts; finished parts are reused only under the same recipe.
        most_bytes = part_bytes(self.job.shard_tokens, images=self.job.images is not None)
        parts = split_into_parts(source.pieces(), most_bytes)
        made_from = {"source": self.sources, "tokenizer": self.tokenizer.fingerprint, "options": self.options}
        recipe = made_from | {"parts": hash_parts(parts)}
        with open_staging(output, recipe, count=len(parts), overwrite=overwrite, say=say) as staging:
            context = BuildContext(
                engine=self.engine, staging=staging, job=self.job, tokenizer=self.tokenizer, workers=self.workers
            )
            outcome = None
            # Duplicates are decided before encoding, over all source parts together: a single part does not know the
            # documents in others.
            if self.job.duplicates.finds:
                outcome = find_duplicates(parts, context, advance=self.comparing, say=say)
                source.bytes_read = 0
            records = _find_finished(staging, parts, say)
            found = len(records)
            tasks = [_part_task(part, staging, outcome) for part in parts]
            context.carry_out(tasks, records, advance=self.encoding)
            source.bytes_read = source.num_bytes
            # Source order, not the order in which parts were finished.
            done = [records[part.number] for part in parts]
            differences = self._put_together(staging, done, outcome)
            staging.publish()
        report = _report(output, source, differences=differences, started=self.started)
        special_token_counts = sum((Counter(record.spelt) for record in done), Counter[str]())
        num_with_special_tokens = sum(record.spelling for record in done)
        return replace(
            report,
            parts=len(parts),
            parts_found=found,
            spelling=num_with_special_tokens,
            spelt=dict(special_token_counts.most_common()),
        )

    def _keep(self, output: Location) -> BuildReport:
        """Return an existing folder's report; raise DataError unless this build would produce the same folder."""
        _check_same_recipe(output, sources=self.sources, tokenizer=self.tokenizer, options=self.options)
        return _report(output, self.source, is_current=True, exact=self.job.exact, started=self.started)

    def _put_together(
        self, staging: Staging, records: list[PartRecord], outcome: Outcome | None
    ) -> Sequence[TextMismatch]:
        """Assemble all encoded source parts into the final folder and return the first round-trip differences."""
        differences = [difference for record in records for difference in record.differences]
        # These parts may come from an earlier build without --exact.
        if self.job.exact and differences:
            raise DataError(mismatch_message(differences[0], self.tokenizer))
        source = self.source
        # Merge in source order, so that examples do not depend on which worker finished first.
        source.left_out = LeftOut(source.listing_skipped)
        for record in records:
            source.left_out.merge(record.skipped, record.examples)
        if self.job.chat is not None:
            check_trained(records, source, self.job.chat)
        check_splits(records, source, self.options)
        assemble_folder(
            staging,
            records,
            listing_skipped=source.listing_skipped,
            skipped=source.skipped,
            tokenizer=self.tokenizer,
            sources=self.sources,
            options=self.options,
            outcome=outcome,
            kind=self.job.kind,
        )
        return differences[:SHOWN_DIFFERENCES]


def _find_finished(staging: Staging, parts: Sequence[SourcePart], say: Callable[[str], None]) -> dict[int, PartRecord]:
    """Return the source parts that an earlier build finished, after verifying all their bytes."""
    records, invalid_files = staging.finished(len(parts))
    if records:
        say(f"resuming: {len(records)} of {len(parts)} parts are finished")
    for path in invalid_files:
        logger.warning("%s is damaged: encoding its source part again", path)
    return records


def _part_task(part: SourcePart, staging: Staging, outcome: Outcome | None) -> PartTask:
    """Create the order to encode a source part, without the documents that ``outcome`` removes."""
    decision = None
    if outcome is not None:
        decision = PartDecision(staging.decisions / part_file(part.number), outcome.documents[part.number])
    return PartTask(part=part, folder=staging.part_folder(part.number), decision=decision)


def _check_same_recipe(
    output: Location, *, sources: list[dict[str, Any]], tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    """Raise ``DataError`` with the differences unless ``output`` was built from this recipe."""
    if not (output / MANIFEST_FILE).is_file():
        raise DataError(f"output={output} exists and is not a shard folder. Name another folder.")
    manifest = _verify_manifest(output)
    # Compare recipes and not shards: builds are deterministic, so an equal recipe gives equal bytes.
    wanted = {"source": sources, "tokenizer": tokenizer.fingerprint, "options": options}
    found = {"source": manifest.sources, "tokenizer": manifest.tokenizer, "options": manifest.options}
    mismatches = [name for name in wanted if wanted[name] != found[name]]
    if mismatches:
        raise DataError(
            f"output={output} exists and was built from another {' and '.join(mismatches)}.\n"
            "Name another folder, or replace it with --overwrite (overwrite=True)."
        )
    if (output / VALIDATION_FOLDER).exists():
        # Raises if the split is damaged, because then it is not up to date either.
        _verify_manifest(output / VALIDATION_FOLDER)


def _verify_manifest(folder: Location) -> Manifest:
    """Return the manifest of a verified folder; in a store, check only for missing files and sizes."""
    if isinstance(folder, Path):
        # Check all files, since damage may be the reason to build again. Files verified before are not read again.
        return open_validated(folder, whole=True).manifest
    manifest = Manifest.load(folder)
    stored_sizes = list_objects(folder)
    sizes = {entry.file: entry.bytes for entry in manifest.shards}
    if PACKED_FILE in stored_sizes:
        sizes = {entry.file: entry.bytes for entry in CompressedFolder.load(folder, manifest).shards}
    for name, size in sizes.items():
        # Reading terabytes back would take as long as sending them.
        if stored_sizes.get(name) != size:
            found = stored_sizes.get(name, "no")
            raise DataError(
                f"{folder / name} has {found} bytes, expected {size}. Build the folder again with --overwrite."
            )
    return manifest


def _say_cut(source: TextSource, say: Callable[[str], None]) -> None:
    """Report directories too large for one document."""
    cut = source.cut_directories()
    if cut:
        shown = ", ".join(list(cut)[:_SHOWN_DIRECTORIES])
        if len(cut) > _SHOWN_DIRECTORIES:
            shown += ", …"
        say(
            f"{len(cut)} directories exceed the document size limit (--join-bytes) and are split between files into "
            f"{sum(cut.values())} documents: {shown}"
        )


def _report(
    output: Location,
    source: TextSource,
    *,
    started: float,
    is_current: bool = False,
    exact: bool = False,
    differences: Sequence[TextMismatch] = (),
) -> BuildReport:
    """Return the report for ``output`` from its manifests; if ``exact``, raise DataError for inexact documents."""
    training = Manifest.load(output)
    num_mismatched = training.inexact_documents
    held_out = output / VALIDATION_FOLDER
    validation = None
    if held_out.exists():
        held_out_manifest = Manifest.load(held_out)
        validation = _split_report(held_out, held_out_manifest)
        num_mismatched += held_out_manifest.inexact_documents
    if exact and num_mismatched:
        raise DataError(
            f"{output} contains {num_mismatched} documents that do not round-trip exactly through the tokenizer.\n"
            "Leave --exact out, or choose another folder and another tokenizer."
        )
    if validation is None and training.options["validation_fraction"]:
        logger.warning("%s: the validation split is empty; the folder contains only training data", output)
    left_out, left_out_file = LeftOut(), None
    if training.left_out:
        left_out, left_out_file = read_left_out(output), _named(output / LEFT_OUT_FILE)
    return BuildReport(
        output=_named(output),
        up_to_date=is_current,
        training=_split_report(output, training),
        validation=validation,
        skipped=training.skipped,
        inexact=num_mismatched,
        differences=tuple(differences),
        left_out=left_out.examples,
        left_out_file=left_out_file,
        duplicates=read_report(output, training),
        seconds=time.monotonic() - started,
        cut_directories=source.cut_directories(),
    )


def _named(place: Location) -> Path | str:
    if isinstance(place, Path):
        return place
    return str(place)


def _split_report(folder: Location, manifest: Manifest) -> SplitReport:
    return SplitReport(
        folder=_named(folder),
        documents=manifest.documents,
        tokens=manifest.tokens,
        text_bytes=manifest.text_bytes,
        shards=len(manifest.shards),
        source_tokens=manifest.source_tokens,
    )
