"""Definition of duplicates and their treatment: the options of ``data build``, validated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longctx.errors import DataError

KINDS = ("keep", "together", "exact", "near")
UNITS = ("words", "characters")
DEFAULT_SIMILARITY, DEFAULT_PERMUTATIONS = 0.8, 128
_DEFAULT_SIZES = {"words": 5, "characters": 9}
_FOUND_AT_THRESHOLD = 0.99
"""The least chance of a pair whose similarity is just the threshold to be compared."""


@dataclass(frozen=True, kw_only=True)
class DuplicateRule:
    """Options for finding duplicates and treating them."""

    kind: str = "keep"
    """``keep`` looks for none; ``exact`` removes equal texts, ``near`` also similar ones; ``together`` removes nothing,
    and has similar texts fall on one side of the validation split."""
    similarity: float = DEFAULT_SIMILARITY
    """Jaccard similarity of two texts' shingles from which on they are near duplicates, as signatures estimate it."""
    shingles: str = "words"
    """What shingles are runs of: ``words`` or ``characters``."""
    shingle_size: int | None = None
    """Length of those runs: 5 words or 9 characters unless given."""
    permutations: int = DEFAULT_PERMUTATIONS
    """Values of a signature: the estimate's standard deviation is at most half of one by their square root."""

    def __post_init__(self) -> None:
        """Raise ``DataError`` if a value is out of range or would have no effect."""
        for name, value, known in (("duplicates", self.kind, KINDS), ("shingles", self.shingles, UNITS)):
            if value not in known:
                raise DataError(f"{name}={value} is not known. Try {', '.join(known)}.")
        if not 0.1 <= self.similarity <= 1:
            raise DataError(
                f"similarity={self.similarity} must be from 0.1 to 1, where 1 is the same shingles. "
                f"Try {DEFAULT_SIMILARITY}."
            )
        if not 16 <= self.permutations <= 4096:
            raise DataError(
                f"permutations={self.permutations} must be from 16 to 4096: fewer tell nothing, more cost 2 bytes a "
                f"document each. Try {DEFAULT_PERMUTATIONS}."
            )
        if not 1 <= self.size <= 1000:
            raise DataError(f"shingle_size={self.size} must be from 1 to 1000. Try {_DEFAULT_SIZES[self.shingles]}.")
        # An option without effect usually means that the other one is wrong.
        described = (self.similarity, self.shingles, self.shingle_size, self.permutations)
        if not self.finds_near and described != (DEFAULT_SIMILARITY, "words", None, DEFAULT_PERMUTATIONS):
            raise DataError(
                f"similarity, shingles, shingle_size and permutations say what near duplicates are, and duplicates="
                f"{self.kind} looks for none.\nAsk for near duplicates with --duplicates near, or leave these out."
            )

    @property
    def finds(self) -> bool:
        """True if texts are compared at all."""
        return self.kind != "keep"

    @property
    def finds_near(self) -> bool:
        """True if similar texts are looked for."""
        return self.kind in ("near", "together")

    @property
    def removes(self) -> bool:
        """True if documents are removed."""
        return self.kind in ("exact", "near")

    @property
    def size(self) -> int:
        """Words or characters of a shingle."""
        if self.shingle_size is None:
            return _DEFAULT_SIZES[self.shingles]
        return self.shingle_size

    def bands(self) -> tuple[int, int]:
        """Return the number of bands of a signature and the values of each; texts that share a band are compared.

        Choose the longest bands, for the fewest useless comparisons, with which 99 % of the pairs at the threshold
        share one.
        """
        for rows in range(self.permutations, 1, -1):
            count = self.permutations // rows
            if shares_a_band(self.similarity, count, rows) >= _FOUND_AT_THRESHOLD:
                return count, rows
        return self.permutations, 1

    def options(self) -> dict[str, Any]:
        """Return the options that affect the result, JSON-able; empty without a search, as in older releases."""
        if not self.finds:
            return {}
        found: dict[str, Any] = {"kind": self.kind}
        if self.finds_near:
            found["similarity"] = self.similarity
            found["shingles"] = f"{self.size} {self.shingles}"
            found["permutations"] = self.permutations
        return {"duplicates": found}


def shares_a_band(similarity: float, bands: int, rows: int) -> float:
    """Return the chance that two texts of this similarity share one of ``bands`` bands of ``rows`` values (S-curve)."""
    return 1 - (1 - similarity**rows) ** bands
