"""Definition and treatment of duplicates: the validated options for ``data build``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longctx.errors import DataError

KINDS = ("keep", "together", "exact", "near")
UNITS = ("words", "characters")
DEFAULT_SIMILARITY, DEFAULT_PERMUTATIONS = 0.8, 128
_DEFAULT_SIZES = {"words": 5, "characters": 9}
_FOUND_AT_THRESHOLD = 0.99
"""Minimum probability that a pair exactly at the similarity threshold is compared."""


@dataclass(frozen=True, kw_only=True)
class DuplicateRule:
    """Options for finding and treating duplicates."""

    kind: str = "keep"
    """``keep``: no search. ``exact``: remove equal texts. ``near``: also remove similar texts. ``together``: remove no
    texts, but assign similar ones to the same split."""
    similarity: float = DEFAULT_SIMILARITY
    """Minimum estimated Jaccard similarity between two texts' shingles to count as near duplicates."""
    shingles: str = "words"
    """Shingle unit: ``words`` or ``characters``."""
    shingle_size: int | None = None
    """Units per shingle; default 5 words or 9 characters."""
    permutations: int = DEFAULT_PERMUTATIONS
    """Values per signature: the estimate's standard deviation is at most 0.5 / √permutations."""

    def __post_init__(self) -> None:
        """Raise ``DataError`` if a value is out of range or would have no effect."""
        for name, value, known in (("duplicates", self.kind, KINDS), ("shingles", self.shingles, UNITS)):
            if value not in known:
                raise DataError(f"{name}={value} is not known. Try {', '.join(known)}.")
        if not 0.1 <= self.similarity <= 1:
            raise DataError(
                f"similarity={self.similarity} must be from 0.1 to 1 (1: identical shingles). Try {DEFAULT_SIMILARITY}."
            )
        if not 16 <= self.permutations <= 4096:
            raise DataError(
                f"permutations={self.permutations} must be from 16 to 4096: fewer are too inaccurate, and each costs "
                f"2 bytes per document. Try {DEFAULT_PERMUTATIONS}."
            )
        if not 1 <= self.size <= 1000:
            raise DataError(f"shingle_size={self.size} must be from 1 to 1000. Try {_DEFAULT_SIZES[self.shingles]}.")
        # An option without effect usually means that another option is missing.
        near_settings = (self.similarity, self.shingles, self.shingle_size, self.permutations)
        if not self.finds_near and near_settings != (DEFAULT_SIMILARITY, "words", None, DEFAULT_PERMUTATIONS):
            raise DataError(
                f"similarity, shingles, shingle_size and permutations apply only to near duplicates, but duplicates="
                f"{self.kind} does not detect these.\nSet --duplicates near, or leave these options out."
            )

    @property
    def finds(self) -> bool:
        """True if texts are compared at all."""
        return self.kind != "keep"

    @property
    def finds_near(self) -> bool:
        """True if similar texts are found too."""
        return self.kind in ("near", "together")

    @property
    def removes(self) -> bool:
        """True if documents are removed."""
        return self.kind in ("exact", "near")

    @property
    def size(self) -> int:
        """Words or characters per shingle."""
        if self.shingle_size is None:
            return _DEFAULT_SIZES[self.shingles]
        return self.shingle_size

    def bands(self) -> tuple[int, int]:
        """Return the number of bands per signature and the values per band; texts that share a band are compared.

        These are the longest bands, so the fewest useless comparisons, for which 99 % of the pairs at the threshold
        share one.
        """
        # Banding (Leskovec, Rajaraman and Ullman, "Mining of Massive Datasets", §3.4): with b bands and r values per
        # band, two texts with similarity s share a band with probability 1 − (1 − s^r)^b. Longer bands give fewer
        # false candidates and more misses.
        for rows in range(self.permutations, 1, -1):
            count = self.permutations // rows
            if shares_a_band(self.similarity, count, rows) >= _FOUND_AT_THRESHOLD:
                return count, rows
        return self.permutations, 1

    def options(self) -> dict[str, Any]:
        """Return the options that affect the result as JSON values; empty without a search, as in older releases."""
        if not self.finds:
            return {}
        found: dict[str, Any] = {"kind": self.kind}
        if self.finds_near:
            found["similarity"] = self.similarity
            found["shingles"] = f"{self.size} {self.shingles}"
            found["permutations"] = self.permutations
        return {"duplicates": found}


def shares_a_band(similarity: float, bands: int, rows: int) -> float:
    """Return the probability that two texts with this similarity share one of ``bands`` bands of ``rows`` values."""
    return 1 - (1 - similarity**rows) ** bands
