"""Fill in the middle: some documents are read as prefix, suffix, middle, so that a model learns to fill a gap.

"Efficient Training of Language Models to Fill in the Middle" (Bavarian et al., 2022, arXiv 2207.14255). Plans and rows
both treat a selected document as a few tokens longer, so nothing is cut off and no token is lost:

    begin <prefix> P <suffix> S <middle> M end              PSM
    begin <prefix> <suffix> S <middle> P M end              SPM

P, M, S are the document's text, cut at two places. A document longer than a row is first cut into segments that each
fill one row, so that a gap is never filled from another row. Rows of several lengths (a mixture's stages) are cut at
multiples of each, so the segment length is the greatest common divisor of all lengths. The selection of documents,
their cuts and their form are functions of (seed, document): the same in every epoch, for any ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.shuffle import fall_below, falls_below, key64
from longctx.errors import ConfigError
from longctx.tokenizer.contract import Tokenizer
from longctx.tokenizer.rows import check_rows
from longctx.tokenizer.special import FimIds

MIN_BODY = 16
"""Tokens between begin and end of a document, at least: what is shorter has no middle worth the name."""

# Salts; ``rows.pack`` and ``rows.blocks`` have the others.
_DOCUMENTS, _CUTS, _SPM = 101, 102, 103


@dataclass(frozen=True)
class FimRule:
    """Rule that sets the share of documents with fill-in-the-middle, and their form."""

    rate: float
    """Share of the documents."""
    spm_rate: float = 0.5
    """Share of these that are read as SPM."""
    segment_tokens: int = 0
    """Longer documents are filled in by segments of so many tokens; 0: the most that divides all lengths of rows."""

    def __post_init__(self) -> None:
        for name, value in (("fim_rate", self.rate), ("fim_spm_rate", self.spm_rate)):
            if not 0 <= value <= 1:
                raise ConfigError(f"data.{name}={value} must be a share from 0 to 1. The paper has 0.5.")
        if self.segment_tokens < 0:
            raise ConfigError(f"data.fim_segment_tokens={self.segment_tokens} must be at least 0, which is a row's.")

    def for_rows(self, row_lengths: Sequence[int]) -> FimRule:
        """Return the same rule with the segment length resolved for rows of these lengths."""
        return replace(self, segment_tokens=self.segment_tokens or math.gcd(*row_lengths))

    def of_state(self, said: str) -> FimRule | None:
        """Return the rule recorded in a loader's state; None if it differs from this one in more than its segments."""
        segments = re.fullmatch(r".* segments of (\d{1,16})", said)
        if segments is None:
            return None
        found = replace(self, segment_tokens=int(segments[1]))
        if str(found) != said:
            return None
        return found

    def cut_by(self, row_lengths: Sequence[int]) -> int | None:
        """Return the first of these lengths whose rows end within a segment; None if none does."""
        return next((length for length in row_lengths if length % (self.segment_tokens or length)), None)

    def check_rows(self, row_lengths: Sequence[int]) -> None:
        """Raise ConfigError if rows of these lengths would separate a segment's middle from its prefix or suffix."""
        length = self.cut_by(row_lengths)
        if length is not None:
            raise ConfigError(
                f"data.fim_segment_tokens={self.segment_tokens} does not divide rows of {length} tokens: a segment "
                "that a row's end cuts has its middle in another row than its prefix or suffix.\n"
                f"Try data.fim_segment_tokens=0, which is {math.gcd(*row_lengths)} here."
            )

    def __str__(self) -> str:
        """Return the rule as recorded in a loader's state."""
        return f"{self.rate:g} filled in, {self.spm_rate:g} as SPM, segments of {self.segment_tokens}"


@dataclass(frozen=True, kw_only=True)
class Fim:
    """A fill-in-the-middle rule applied to the documents of one folder."""

    rule: FimRule
    seed: int
    segment_tokens: int
    ids: FimIds
    begin: int | None
    end: int | None

    @classmethod
    def of(cls, rule: FimRule, tokenizer: Tokenizer, *, seed: int, seq_len: int) -> Fim:
        """Return the rule for a folder; raise ConfigError if the three ids are missing or segments are too short."""
        ids = tokenizer.special.fim
        if ids is None:
            raise ConfigError(
                f"data.fim_rate={rule.rate:g} needs a tokenizer with ids for prefix, suffix and middle; "
                f"{tokenizer.path} has none.\nTrain one with `longctx tokenizer train --fim`, or set data.fim_rate=0."
            )
        check_rows(tokenizer, np.array(ids), "a document whose middle is filled in (data.fim_rate)")
        fim = cls(
            rule=rule,
            seed=seed,
            segment_tokens=rule.segment_tokens or seq_len,
            ids=ids,
            begin=tokenizer.document_begin,
            end=tokenizer.document_end,
        )
        least = MIN_BODY + fim._begins + fim._overhead
        if fim.segment_tokens < least:
            raise ConfigError(
                f"A segment of {fim.segment_tokens} tokens leaves no room for a text beside its marks: it needs "
                f"{least}.\nSet data.fim_segment_tokens to so many or more; or to 0, with rows (data.seq_len, "
                "row_tokens of a mixture's stages) that are multiples of so many."
            )
        return fim

    @property
    def _begins(self) -> int:
        """Number of tokens before a document's text."""
        return int(self.begin is not None)

    @property
    def _ends(self) -> int:
        """Number of tokens after the text; every segment has them, so that a model learns where a middle ends."""
        return int(self.end is not None)

    @property
    def _overhead(self) -> int:
        """Tokens of a segment that are not text, without the document's begin."""
        return len(self.ids) + self._ends

    def lengths(self, documents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the tokens of each document as it is read, given its own tokens: int64 [n]."""
        body = lengths - self._begins - self._ends
        segments = self._segments(body)
        grown = lengths + len(self.ids) * segments + self._ends * (segments - 1)
        return np.where((body >= MIN_BODY) & self._draws(documents), grown, lengths)

    def parts(self, document: int, length: int, segment: int) -> Iterator[list[int] | tuple[int, int]]:
        """Yield the parts of a segment of a document: ids, or the bounds (first, stop) of a stretch of the document."""
        first_text = self.segment_tokens - self._begins - self._overhead
        start = 0
        if segment:
            start = first_text + (segment - 1) * (self.segment_tokens - self._overhead)
        stop = first_text + segment * (self.segment_tokens - self._overhead)
        text = min(stop, length - self._begins - self._ends) - start
        key = key64(document, self.seed, _CUTS, segment)
        cuts = sorted((key % (text + 1), (key >> 32) % (text + 1)))
        # After the document's begin.
        at = self._begins + start
        prefix, middle, suffix = (at, at + cuts[0]), (at + cuts[0], at + cuts[1]), (at + cuts[1], at + text)
        head = [self.ids.prefix]
        if self.begin is not None and segment == 0:
            head.insert(0, self.begin)
        if falls_below(document, self.rule.spm_rate, self.seed, _SPM, segment):
            yield [*head, self.ids.suffix]
            yield suffix
            yield [self.ids.middle]
            yield prefix
        else:
            yield head
            yield prefix
            yield [self.ids.suffix]
            yield suffix
            yield [self.ids.middle]
        yield middle
        if self.end is not None:
            yield [self.end]

    def _segments(self, body: np.ndarray) -> np.ndarray:
        """Return the number of segments of documents with ``body`` tokens of text."""
        behind_first = body - (self.segment_tokens - self._begins - self._overhead)
        return 1 + np.maximum(0, -(-behind_first // (self.segment_tokens - self._overhead)))

    def _draws(self, documents: np.ndarray) -> np.ndarray:
        """Return which documents are selected, bool [n]."""
        # A share of 1 is not representable below 2^64.
        if self.rule.rate >= 1:
            return np.ones(len(documents), bool)
        return fall_below(documents, self.rule.rate, self.seed, _DOCUMENTS)


def fim_of(rule: FimRule | None, tokenizer: Callable[[], Tokenizer], *, seed: int, seq_len: int) -> Fim | None:
    """Return the rule for a folder; None, without loading the tokenizer, if there is no rule or its rate is 0."""
    if rule is None or not rule.rate:
        return None
    return Fim.of(rule, tokenizer(), seed=seed, seq_len=seq_len)


def rule_of(fim: Fim | None) -> str | None:
    """Return the rule as recorded in a loader's state; None without fill-in-the-middle."""
    if fim is None:
        return None
    return str(fim.rule)
