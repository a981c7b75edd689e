"""The options of ``data build`` about texts that stand in a corpus more than once, and what it says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from launcher.cli.console import human_bytes
from launcher.wording import plural

if TYPE_CHECKING:
    from data_pipeline.prepare.duplicates.outcome import DuplicateReport
    from data_pipeline.prepare.duplicates.rule import DuplicateRule


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """What to do about texts that stand in the corpus more than once."""

    duplicates: Literal["keep", "together", "exact", "near"] = "keep"
    """keep: nobody looks. exact: of equal texts one stays. near: of similar texts one stays, the longest. together: all
    stay, and similar texts fall on one side of the validation split (they do with near, too)."""
    similarity: float = 0.8
    """Share of common shingles (Jaccard similarity) from which on texts are near duplicates."""
    shingles: Literal["words", "characters"] = "words"
    """What shingles are runs of. Case, spaces and punctuation do not count among words."""
    shingle_size: int | None = None
    """Length of a shingle, 5 words or 9 characters unless given."""
    permutations: int = 128
    """Values of a MinHash signature: more estimate the similarity better, and take 2 bytes a document each."""

    def rule(self) -> DuplicateRule:
        """The options, checked."""
        # Here, as in every verb: `--help` imports nothing of the data pipeline.
        from data_pipeline.prepare.duplicates.rule import DuplicateRule

        return DuplicateRule(
            kind=self.duplicates,
            similarity=self.similarity,
            shingles=self.shingles,
            shingle_size=self.shingle_size,
            permutations=self.permutations,
        )


def duplicate_lines(report: DuplicateReport) -> list[str]:
    """What a build found of duplicates: how many were removed, which ones for example, and how large groups are."""
    counts = report.counts
    # Of all kinds: a low threshold shows itself by a group as large as the corpus.
    groups = f"{plural(counts.groups, 'group')} of documents, the largest of {counts.largest_group:,}."
    if report.file is None:
        if not counts.groups:
            return ["Duplicates: none found."]
        return [f"Duplicates: none removed; {groups}"]
    lines = [f"Duplicates removed, about {report.about_tokens:,} tokens (all names in {report.file}):"]
    for kind, documents, text_bytes in (
        ("exact", counts.exact_documents, counts.exact_bytes),
        ("near", counts.near_documents, counts.near_bytes),
    ):
        names = [str(example) for example in report.examples if example.kind == kind]
        # A list may have more of one kind than anybody reads before the first of the other.
        shown = ""
        if names:
            shown = f": {', '.join(names)}"
        if documents > len(names) > 0:
            shown += ", …"
        if documents:
            lines.append(f"  {documents:,} {kind}, {human_bytes(text_bytes)}{shown}")
    lines.append(f"  {groups}")
    return lines
