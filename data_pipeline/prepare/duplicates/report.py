"""What a build found of duplicates: counts, a few examples, and the list in the shard folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice

from data_pipeline.shards.manifest import Manifest
from data_pipeline.stores.urls import Location

DUPLICATES_FILE = "duplicates.jsonl"
_EXAMPLES = 3
_LOOKED_AT = 100_000


@dataclass(frozen=True, kw_only=True)
class DuplicateCounts:
    """Duplicates of a corpus in numbers."""

    exact_documents: int
    """Documents that were removed because an equal text stays."""
    exact_bytes: int
    """UTF-8 bytes of their text."""
    near_documents: int
    """Documents that were removed because a similar text stays."""
    near_bytes: int
    groups: int
    """Groups of several documents."""
    largest_group: int
    """Documents of the largest group."""


@dataclass(frozen=True, kw_only=True)
class DuplicateExample:
    """A document that was removed."""

    name: str
    kind: str
    """``exact`` or ``near``."""
    of: str
    """The document that stays."""
    similarity: float = 1.0

    def __str__(self) -> str:
        if self.kind == "exact":
            return f"{self.name} = {self.of}"
        return f"{self.name} ≈ {self.of} ({self.similarity:.2f})"


@dataclass(frozen=True, kw_only=True)
class DuplicateReport:
    """What a build found."""

    counts: DuplicateCounts
    about_tokens: int
    """Tokens that the removed documents would have been, judging by the bytes of those that stay."""
    examples: list[DuplicateExample]
    """The first few removed documents of each kind."""
    file: Location | None
    """The whole list; None if nothing was removed."""


def read_report(folder: Location, manifest: Manifest) -> DuplicateReport | None:
    """What a shard folder says of duplicates; None for one whose build did not look for them."""
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
    """The first few lines of each kind."""
    if path is None:
        return []
    found: dict[str, list[DuplicateExample]] = {"exact": [], "near": []}
    with path.open("rb") as lines:
        # The list may be as long as the corpus.
        for line in islice(lines, _LOOKED_AT):
            example = DuplicateExample(**json.loads(line))
            if len(found[example.kind]) < _EXAMPLES:
                found[example.kind].append(example)
    return found["exact"] + found["near"]
