"""Record of a finished source part: a small file written last, so that a part with a record is complete."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.prepare.completion_record import load_record, save_record
from data_pipeline.prepare.encode_texts import TextMismatch
from data_pipeline.prepare.left_out import LEFT_OUT_FILE
from data_pipeline.shards.block_checksum import checksum_file
from data_pipeline.shards.manifest import ShardEntry
from longctx.files import hash_file

# Changes with any field: source parts in another format are rebuilt.
FORMAT = "longctx-part-3"
RECORD_FILE = "part.json"
SPLITS = ("training", "validation")
"""Splits, each in a folder with its name."""


@dataclass(frozen=True, kw_only=True)
class SplitRecord:
    """One split of a source part."""

    shards: list[ShardEntry]
    documents: int
    tokens: int
    text_bytes: int
    length_histogram: dict[str, int]
    inexact: int
    """Documents that do not decode exactly to their text."""


@dataclass(frozen=True, kw_only=True)
class PartRecord:
    """A finished source part."""

    splits: dict[str, SplitRecord]
    skipped: dict[str, int]
    """Skipped records by reason."""
    examples: dict[str, list[str]]
    """First names per reason."""
    left_out: str
    """xxh3_128 checksum of the source part's list of skips; empty without skips."""
    differences: list[TextMismatch]
    """First differences in the first few inexact documents."""
    spelling: int = 0
    """Documents that contain a control token as text."""
    spelt: dict[str, int] = field(default_factory=dict)
    """Documents per control token."""

    @property
    def documents(self) -> int:
        """Documents in all splits."""
        return sum(split.documents for split in self.splits.values())

    @property
    def text_bytes(self) -> int:
        """Text bytes in all splits."""
        return sum(split.text_bytes for split in self.splits.values())

    def save(self, folder: Path) -> None:
        """Write the record."""
        save_record(folder / RECORD_FILE, FORMAT, dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> PartRecord | None:
        """Return the record in a source part's folder; None if it is missing or damaged."""
        body = load_record(folder / RECORD_FILE, FORMAT)
        if body is None:
            return None
        splits = {name: _split(fields) for name, fields in body.pop("splits").items()}
        differences = [TextMismatch(**fields) for fields in body.pop("differences")]
        return cls(splits=splits, differences=differences, **body)


def find_invalid_file(folder: Path, record: PartRecord) -> str | None:
    """Return the first missing or damaged file in a finished source part, if any."""
    files = [(folder / split / entry.file, entry) for split in SPLITS for entry in record.splits[split].shards]
    for path, entry in files:
        # Size first: a truncated file is found without reading it.
        if not path.is_file() or path.stat().st_size != entry.bytes or hash_file(path) != entry.xxh3_128:
            return str(path)
        sums = path.with_name(checksum_file(path.name))
        if not sums.is_file() or hash_file(sums) != entry.sums:
            return str(sums)
    path = folder / LEFT_OUT_FILE
    if record.left_out and not (path.is_file() and hash_file(path) == record.left_out):
        return str(path)
    return None


def _split(fields: dict[str, Any]) -> SplitRecord:
    shards = [ShardEntry(**entry) for entry in fields.pop("shards")]
    return SplitRecord(shards=shards, **fields)
