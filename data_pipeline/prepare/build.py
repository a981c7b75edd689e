"""Tokenize a source into two shard folders: training, and inside it ``validation``."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.prepare.documents import Progress
from data_pipeline.prepare.encode import Difference, encode_documents
from data_pipeline.prepare.left_out import LEFT_OUT_FILE, LeftOut, LeftOutFile, read_left_out
from data_pipeline.prepare.sources import Source
from data_pipeline.shards.manifest import MANIFEST_FILE, Manifest
from data_pipeline.shards.verify import open_verified
from data_pipeline.shards.writer import DEFAULT_SHARD_TOKENS, ShardWriter
from data_pipeline.shuffle import falls_below
from longctx.errors import DataError
from longctx.files import explained_writes, staged_folder
from longctx.tokenizer.contract import Tokenizer

logger = logging.getLogger(__name__)

VALIDATION_FOLDER = "validation"
_SHOWN_DIFFERENCES = 3
# Part of the format: another number would move documents between the splits.
_SPLIT_SALT = 0x76616C6964


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """What one shard folder holds."""

    folder: Path
    documents: int
    tokens: int
    text_bytes: int
    shards: int

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text for each token, document begins and ends counted as tokens."""
        return self.text_bytes / self.tokens


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """What ``build_shards`` did or found."""

    output: Path
    up_to_date: bool
    """True if the folder was already there, built from the same things, and nothing had to be done."""
    training: SplitReport
    validation: SplitReport | None
    """None if no document was held out."""
    skipped: dict[str, int]
    """What the source left out, by reason."""
    inexact: int
    """Documents whose text does not come back exactly from their ids."""
    differences: tuple[Difference, ...]
    """Where the first few of them differ; empty for a folder that was there already."""
    left_out: dict[str, list[str]]
    """The first names of each reason."""
    left_out_file: Path | None
    """The whole list; None if nothing was left out, or by a release that wrote no list."""
    seconds: float


def build_shards(
    source: Source,
    tokenizer: Tokenizer,
    output: str | Path,
    *,
    validation_fraction: float = 0.05,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    exact: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> BuildReport:
    """Tokenize ``source`` into the shard folder ``output``, with the held-out documents in ``output/validation``.

    A document is held out by a hash of its text alone: equal texts fall on one side, and nothing moves when other
    documents come or go. Every document is decoded again and compared: one whose text does not come back is counted,
    and with ``exact`` it is an error. The folder appears when it is complete, or not at all. A folder that was built
    from the same source, tokenizer and options is left as it is; another one is an error unless ``overwrite``.
    """
    output = Path(output)
    if not 0 <= validation_fraction < 1:
        raise DataError(f"validation_fraction={validation_fraction} must be at least 0 and less than 1. Try 0.05.")
    started = time.monotonic()
    options = {"validation_fraction": validation_fraction, "shard_tokens": shard_tokens}
    sources = [source.fingerprint()]
    # An empty folder that the user has made is free to fill.
    with explained_writes(output):
        occupied = output.exists() and not (output.is_dir() and not any(output.iterdir()))
    if occupied and not overwrite:
        _check_same_recipe(output, sources=sources, tokenizer=tokenizer, options=options)
        return _report(output, up_to_date=True, exact=exact, started=started)
    # --overwrite replaces shards, never a folder that holds something else.
    if occupied and not (output / MANIFEST_FILE).is_file():
        raise DataError(
            f"output={output} exists and is not a shard folder, so it is not overwritten. Name another folder."
        )
    with staged_folder(output, replace=occupied) as staging:
        differences = _write_splits(
            source, tokenizer, staging, options=options, sources=sources, exact=exact, progress=progress
        )
    return _report(output, up_to_date=False, differences=differences, started=started)


def _write_splits(
    source: Source,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    options: dict[str, Any],
    sources: list[dict[str, Any]],
    exact: bool,
    progress: Progress | None,
) -> list[Difference]:
    """Fill ``folder`` and its ``validation``, and return the first differences; an empty split gets no shards."""
    held_out = folder / VALIDATION_FOLDER
    held_out.mkdir()
    sizes = {"vocab_size": tokenizer.vocab_size, "shard_tokens": options["shard_tokens"]}
    training = ShardWriter(folder, **sizes)
    validation = ShardWriter(held_out, **sizes)
    text_bytes = 0
    left_out = LeftOutFile(folder)
    inexact = {"training": 0, "validation": 0}
    differences: list[Difference] = []
    encoded_documents = encode_documents(source.read(left_out.add), tokenizer)
    for number, (encoded, difference) in enumerate(encoded_documents, start=1):
        if difference is not None and exact:
            raise DataError(_explain_inexact(difference, tokenizer))
        # By the text's hash: a copy of a held-out text elsewhere in the corpus is held out too.
        if falls_below(encoded.hash, options["validation_fraction"], _SPLIT_SALT):
            split, writer = "validation", validation
        else:
            split, writer = "training", training
        writer.add(encoded)
        if difference is not None:
            inexact[split] += 1
            if len(differences) < _SHOWN_DIFFERENCES:
                differences.append(difference)
        text_bytes += encoded.text_bytes
        if progress is not None:
            progress(number, text_bytes)
    left_out_hash = left_out.close()
    # Can happen with a handful of documents, and a run would only find out when it starts.
    if not training.num_documents:
        raise DataError(
            f"All {validation.num_documents} documents of {source.spec} fell into the validation split "
            f"(validation_fraction={options['validation_fraction']}).\nTry validation_fraction=0 or more documents."
        )
    common = {"tokenizer": tokenizer, "sources": sources, "options": options, "skipped": source.skipped}
    for writer, split_folder, split in ((training, folder, "training"), (validation, held_out, "validation")):
        if writer.num_documents:
            tokenizer.save(split_folder)
            # The list belongs to the source: it lies once in the folder, beside the training split.
            listed = ""
            if split == "training":
                listed = left_out_hash
            writer.finish(split=split, left_out=listed, inexact_documents=inexact[split], **common)
    if not validation.num_documents:
        held_out.rmdir()
    return differences


def _explain_inexact(difference: Difference, tokenizer: Tokenizer) -> str:
    """Why a document is refused, and what keeps every character."""
    return (
        f"{difference}: it does not come back exactly from its ids by {tokenizer.path}.\n"
        "Leave --exact out to count such documents, or train a tokenizer with `longctx tokenizer train`, which keeps "
        "every character."
    )


def _check_same_recipe(
    output: Path, *, sources: list[dict[str, Any]], tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    """Raise ``DataError`` unless ``output`` is what this build would make; say what differs."""
    if not (output / MANIFEST_FILE).is_file():
        raise DataError(f"output={output} exists and is not a shard folder. Name another folder.")
    # Whole: who builds again may do so because something is damaged. What is stamped is not read again.
    manifest = open_verified(output, whole=True).manifest
    wanted = {"source": sources, "tokenizer": tokenizer.fingerprint, "options": options}
    found = {"source": manifest.sources, "tokenizer": manifest.tokenizer, "options": manifest.options}
    differing = [name for name in wanted if wanted[name] != found[name]]
    if differing:
        raise DataError(
            f"output={output} exists and was built from another {' and '.join(differing)}.\n"
            "Name another folder, or replace it with --overwrite (overwrite=True)."
        )
    if (output / VALIDATION_FOLDER).exists():
        # Raises for a damaged split, which is not up to date either.
        open_verified(output / VALIDATION_FOLDER, whole=True)


def _report(
    output: Path, *, up_to_date: bool, started: float, exact: bool = False, differences: Sequence[Difference] = ()
) -> BuildReport:
    """What lies in ``output`` now, read from its manifests; DataError for inexact documents where ``exact``."""
    training = Manifest.load(output)
    inexact = training.inexact_documents
    held_out = output / VALIDATION_FOLDER
    validation = None
    if held_out.exists():
        held_out_manifest = Manifest.load(held_out)
        validation = _split_report(held_out, held_out_manifest)
        inexact += held_out_manifest.inexact_documents
    if exact and inexact:
        raise DataError(
            f"{output} holds {inexact} documents whose text does not come back exactly from their ids.\n"
            "Leave --exact out, or name another folder and another tokenizer."
        )
    if validation is None and training.options["validation_fraction"]:
        logger.warning("%s: no document fell into the validation split; it holds training data only", output)
    left_out, left_out_file = LeftOut(), None
    if training.left_out:
        left_out, left_out_file = read_left_out(output), output / LEFT_OUT_FILE
    return BuildReport(
        output=output,
        up_to_date=up_to_date,
        training=_split_report(output, training),
        validation=validation,
        skipped=training.skipped,
        inexact=inexact,
        differences=tuple(differences),
        left_out=left_out.examples,
        left_out_file=left_out_file,
        seconds=time.monotonic() - started,
    )


def _split_report(folder: Path, manifest: Manifest) -> SplitReport:
    """The counts of one split."""
    return SplitReport(
        folder=folder,
        documents=manifest.documents,
        tokens=manifest.tokens,
        text_bytes=manifest.text_bytes,
        shards=len(manifest.shards),
    )
