"""A duplicate decision on disk: actions for each source part's documents, and the list of removed documents.

``NNNNN.bin`` has a row for each document in a source part whose group has other members; ``duplicates.jsonl`` goes into
the shard folder; ``decided.json`` is written last and validates them.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data_pipeline.prepare.completion_record import are_whole, load_record, save_record, sync_files
from data_pipeline.prepare.duplicates.decide import Decision
from data_pipeline.prepare.duplicates.signed import SignedCorpus
from data_pipeline.prepare.source_items import Document
from data_pipeline.shards.manifest import Manifest
from data_pipeline.stores.urls import Location
from longctx.errors import DataError
from longctx.files import sync_path

DUPLICATES_FILE = "duplicates.jsonl"
_EXAMPLES = 3
_MAX_EXAMPLE_LINES = 100_000


@dataclass(frozen=True, kw_only=True)
class DuplicateCounts:
    """Duplicate statistics for a corpus."""

    exact_documents: int
    """Documents removed because an equal text is kept."""
    exact_bytes: int
    """UTF-8 bytes in their texts."""
    near_documents: int
    """Documents removed because a similar text is kept."""
    near_bytes: int
    groups: int
    """Groups with several documents."""
    largest_group: int
    """Documents in the largest group."""


@dataclass(frozen=True, kw_only=True)
class DuplicateExample:
    """A removed document."""

    name: str
    kind: str
    """``exact`` or ``near``."""
    of: str
    """Name of the kept document."""
    similarity: float = 1.0

    def __str__(self) -> str:
        if self.kind == "exact":
            return f"{self.name} = {self.of}"
        return f"{self.name} ≈ {self.of} ({self.similarity:.2f})"


@dataclass(frozen=True, kw_only=True)
class DuplicateReport:
    """Duplicates that a build found."""

    counts: DuplicateCounts
    about_tokens: int
    """Approximate tokens in the removed documents, estimated from the kept documents' bytes per token."""
    examples: list[DuplicateExample]
    """First removed documents of each kind."""
    file: Location | None
    """Complete list, if any document was removed."""


def read_report(folder: Location, manifest: Manifest) -> DuplicateReport | None:
    """Return the duplicates recorded in a shard folder; None if its build did not look for them."""
    found = dict(manifest.duplicates)
    if not found:
        return None
    file = None
    if found.pop("list", ""):
        file = folder / DUPLICATES_FILE
    counts = DuplicateCounts(**found)
    tokens = (counts.exact_bytes + counts.near_bytes) / (manifest.bytes_per_token or 1)
    return DuplicateReport(counts=counts, about_tokens=round(tokens), examples=_read_examples(file), file=file)


def _read_examples(path: Location | None) -> list[DuplicateExample]:
    """Return the first lines of each kind."""
    if path is None:
        return []
    found: dict[str, list[DuplicateExample]] = {"exact": [], "near": []}
    with path.open("rb") as lines:
        # The list may be as long as the corpus, so read only its start.
        for line in islice(lines, _MAX_EXAMPLE_LINES):
            example = DuplicateExample(**json.loads(line))
            if len(found[example.kind]) < _EXAMPLES:
                found[example.kind].append(example)
    return found["exact"] + found["near"]


FORMAT = "longctx-decided-1"
_RECORD_FILE = "decided.json"
_REMOVE, _TRAINING, _VALIDATION = 0, 1, 2
# 17 bytes per document in a group; documents without duplicates have no row.
_ROW = np.dtype([("document", "<i8"), ("hash", "<u8"), ("action", "u1")])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A decision written to disk."""

    counts: DuplicateCounts
    documents: list[int]
    """Documents per source part when they were compared."""
    files: dict[str, str]
    """xxh3_128 checksum per file."""

    @classmethod
    def load(cls, folder: Path) -> Outcome | None:
        """Return the decision in a folder if all its files are intact."""
        body = load_record(folder / _RECORD_FILE, FORMAT)
        if body is None or not are_whole(folder, body["files"]):
            return None
        return cls(counts=DuplicateCounts(**body.pop("counts")), **body)


def save_outcome(folder: Path, corpus: SignedCorpus, decision: Decision) -> Outcome:
    """Write a decision into a folder, which is emptied first."""
    # Leftovers from a killed attempt would be hashed into the record.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    removal = decision.removal
    documents = np.concatenate([removal.documents, decision.assigned])
    actions = np.full(len(documents), _REMOVE, dtype=np.uint8)
    actions[len(removal.documents) :] = np.where(decision.is_held_out, _VALIDATION, _TRAINING)
    # Document numbers are unique: a document is either removed or placed.
    order = np.argsort(documents)
    documents, actions = documents[order], actions[order]
    # First row per source part: documents are numbered across all parts.
    borders = np.searchsorted(documents, corpus.starts)
    for number in range(len(corpus.parts)):
        span = slice(borders[number], borders[number + 1])
        rows = np.empty(borders[number + 1] - borders[number], dtype=_ROW)
        rows["document"] = documents[span] - corpus.starts[number]
        # Each row has the text's hash, so that the second pass detects a changed source.
        rows["hash"] = corpus.parts[number].document_rows["hash"][rows["document"]]
        rows["action"] = actions[span]
        rows.tofile(folder / part_file(number))
    _write_list(folder, corpus, decision)
    outcome = Outcome(
        counts=_counts(corpus, decision),
        documents=[part.documents for part in corpus.parts],
        files=sync_files(folder),
    )
    save_record(folder / _RECORD_FILE, FORMAT, dataclasses.asdict(outcome))
    sync_path(folder)
    return outcome


def part_file(number: int) -> str:
    """Return the file name of a source part's decision."""
    return f"{number:05d}.bin"


@dataclass(frozen=True)
class PartDecision:
    """Decision about one source part's documents."""

    path: Path
    """The decision file."""
    documents: int
    """The part's document count when its texts were compared."""

    def applied(self, documents: Iterable[Document]) -> Iterator[tuple[Document, bool | None]]:
        """Yield each kept document and whether it is held out; None if its own hash decides.

        Raises DataError if the source part has changed since it was compared.
        """
        rows = np.fromfile(self.path, dtype=_ROW)
        positions, hashes, actions = rows["document"].tolist(), rows["hash"].tolist(), rows["action"].tolist()
        # Merge join: rows are sorted by document, and documents arrive in the same order.
        at = count = 0
        for number, document in enumerate(documents):
            count += 1
            if at == len(positions) or positions[at] != number:
                yield document, None
                continue
            # Only documents in a group are checked here; the total count below detects added and removed ones.
            if xxhash.xxh3_64_intdigest(document.text.encode()) != hashes[at]:
                raise DataError(_changed(document.name))
            action = actions[at]
            at += 1
            if action != _REMOVE:
                yield document, action == _VALIDATION
        if count != self.documents:
            raise DataError(_changed("the source"))


def _changed(subject: str) -> str:
    return (
        f"{subject} changed during the build: it differs from the version that was compared for duplicates.\n"
        "Stop other writers, then build again with --overwrite (overwrite=True)."
    )


def _write_list(folder: Path, corpus: SignedCorpus, decision: Decision) -> None:
    """Write one line per removed document; without removed documents, write no file."""
    removal = decision.removal
    if not len(removal.documents):
        return
    with (folder / DUPLICATES_FILE).open("wb") as lines:
        for document, kept, is_exact, similarity in zip(
            removal.documents.tolist(),
            removal.kept.tolist(),
            removal.is_exact.tolist(),
            removal.similarity.tolist(),
            strict=True,
        ):
            entry: dict[str, Any] = {"name": corpus.name(document), "kind": "near", "of": corpus.name(kept)}
            if is_exact:
                entry["kind"] = "exact"
            else:
                entry["similarity"] = round(similarity, 4)
            lines.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")


def _counts(corpus: SignedCorpus, decision: Decision) -> DuplicateCounts:
    removal = decision.removal
    text_bytes = corpus.document_rows(removal.documents)["text_bytes"]
    return DuplicateCounts(
        exact_documents=int(removal.is_exact.sum()),
        exact_bytes=int(text_bytes[removal.is_exact].sum()),
        near_documents=int((~removal.is_exact).sum()),
        near_bytes=int(text_bytes[~removal.is_exact].sum()),
        groups=decision.num_groups,
        largest_group=decision.largest_group,
    )
