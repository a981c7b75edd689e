"""Fill-in-the-middle: some documents are reordered as prefix, suffix, middle, so that a model learns to fill gaps.

"Efficient Training of Language Models to Fill in the Middle" (Bavarian et al., 2022, arXiv 2207.14255). Plans and rows
both count a selected document as a few tokens longer, so every token remains and no text is cut off:

    begin <prefix> P <suffix> S <middle> M end              PSM
    begin <prefix> <suffix> S <middle> P M end              SPM

P, M, S are the document's text, cut at two positions. A document longer than a row is first cut into segments that each
fill one row, so that a gap is never filled from another row. If row lengths differ (a mixture's stages), rows end at
multiples of each length, so the segment length is their greatest common divisor. Selection, cuts and form are functions
of (seed, document): the same in every epoch, for any ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_pipeline.shuffle import fall_below, falls_below, key64
from longctx.errors import ConfigError
from longctx.tokenizer.embedding_rows import check_rows
from longctx.tokenizer.special import FimIds
from longctx.tokenizer.tokenizer_base import Tokenizer

MIN_BODY = 16
"""Minimum text tokens per document: a shorter text has no useful middle."""

# Salts; ``rows.pack`` and ``rows.epoch_blocks`` have the other salts.
_DOCUMENTS, _SPLITS, _SPM = 101, 102, 103


@dataclass(frozen=True)
class FimRule:
    """Rule that sets the fraction of documents with fill-in-the-middle, and their form."""

    rate: float
    """Fraction of documents with fill-in-the-middle."""
    spm_rate: float = 0.5
    """Fraction of the selected documents read as SPM."""
    segment_tokens: int = 0
    """Longer documents are split into segments this long; 0: the greatest common divisor of all row lengths."""

    def __post_init__(self) -> None:
        for name, value in (("fim_rate", self.rate), ("fim_spm_rate", self.spm_rate)):
            if not 0 <= value <= 1:
                raise ConfigError(f"data.{name}={value} must be from 0 to 1. The paper uses 0.5.")
        if self.segment_tokens < 0:
            raise ConfigError(f"data.fim_segment_tokens={self.segment_tokens} must be at least 0 (0: the row length).")

    def for_rows(self, row_lengths: Sequence[int]) -> FimRule:
        """Return the rule with the segment length resolved for rows of these lengths."""
        return replace(self, segment_tokens=self.segment_tokens or math.gcd(*row_lengths))

    def of_state(self, saved_rule: str) -> FimRule | None:
        """Return the rule recorded in a loader state; None if it differs from this rule in more than the segment
        length.
        """
        segments = re.fullmatch(r".* segments of (\d{1,16})", saved_rule)
        if segments is None:
            return None
        found = replace(self, segment_tokens=int(segments[1]))
        if str(found) != saved_rule:
            return None
        return found

    def cut_by(self, row_lengths: Sequence[int]) -> int | None:
        """Return the first of these row lengths that cuts a segment; None if every length is a multiple of it."""
        return next((length for length in row_lengths if length % (self.segment_tokens or length)), None)

    def check_rows(self, row_lengths: Sequence[int]) -> None:
        """Raise ConfigError if rows of these lengths would separate a segment's middle from its prefix or suffix."""
        length = self.cut_by(row_lengths)
        if length is not None:
            raise ConfigError(
                f"data.fim_segment_tokens={self.segment_tokens} does not divide rows of {length} tokens: a row end "
                "would cut a segment and separate its middle from its prefix or suffix.\n"
                f"Try data.fim_segment_tokens=0, which resolves to {math.gcd(*row_lengths)} here."
            )

    def __str__(self) -> str:
        """Return the rule as recorded in the loader state."""
        return f"{self.rate:g} filled in, {self.spm_rate:g} as SPM, segments of {self.segment_tokens}"


@dataclass(frozen=True, kw_only=True)
class Fim:
    """Fill-in-the-middle rule applied to one folder's documents."""

    rule: FimRule
    seed: int
    segment_tokens: int
    ids: FimIds
    begin: int | None
    end: int | None

    @classmethod
    def of(cls, rule: FimRule, tokenizer: Tokenizer, *, seed: int, seq_len: int) -> Fim:
        """Resolve the rule for a folder; raise ConfigError if the three ids are missing or segments are too short."""
        ids = tokenizer.special.fim
        if ids is None:
            raise ConfigError(
                f"data.fim_rate={rule.rate:g} needs a tokenizer with ids for prefix, suffix and middle; "
                f"{tokenizer.path} lacks them.\nTrain one with `longctx tokenizer train --fim`, or set data.fim_rate=0."
            )
        check_rows(tokenizer, np.array(ids), "a fill-in-the-middle document (data.fim_rate)")
        fim = cls(
            rule=rule,
            seed=seed,
            segment_tokens=rule.segment_tokens or seq_len,
            ids=ids,
            begin=tokenizer.document_begin,
            end=tokenizer.document_end,
        )
        least = MIN_BODY + fim._num_begin + fim._overhead
        if fim.segment_tokens < least:
            raise ConfigError(
                f"A segment of {fim.segment_tokens} tokens leaves no room for text between its marks: the minimum is "
                f"{least}.\nSet data.fim_segment_tokens to at least the minimum; or to 0, with row lengths "
                "(data.seq_len, row_tokens in a mixture's stages) that are multiples of the minimum."
            )
        return fim

    @property
    def _num_begin(self) -> int:
        """Number of tokens before a document's text."""
        return int(self.begin is not None)

    @property
    def _ends(self) -> int:
        """Number of tokens after a segment's text; every segment has them, so that a model learns to end a middle."""
        return int(self.end is not None)

    @property
    def _overhead(self) -> int:
        """Non-text tokens per segment, without the document's begin token."""
        return len(self.ids) + self._ends

    def lengths(self, documents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return each document's length as it is read, given its stored length, int64 [n]."""
        # Each segment adds three marks, and each segment after the first its own end token. The planner uses this
        # without reading text.
        body = lengths - self._num_begin - self._ends
        segments = self._segments(body)
        grown = lengths + len(self.ids) * segments + self._ends * (segments - 1)
        return np.where((body >= MIN_BODY) & self._selected(documents), grown, lengths)

    def parts(self, document: int, length: int, segment: int) -> Iterator[list[int] | tuple[int, int]]:
        """Yield a segment's spans in order: ids, or the bounds (start, end) of a span in the stored document."""
        first_text = self.segment_tokens - self._num_begin - self._overhead
        start = 0
        if segment:
            start = first_text + (segment - 1) * (self.segment_tokens - self._overhead)
        stop = first_text + segment * (self.segment_tokens - self._overhead)
        text = min(stop, length - self._num_begin - self._ends) - start
        key = key64(document, self.seed, _SPLITS, segment)
        # Two independent uniform cuts, sorted, as in the paper, but between tokens and not characters: prefix, middle
        # and suffix may each be empty.
        splits = sorted((key % (text + 1), (key >> 32) % (text + 1)))
        # Offset by the document's begin token.
        at = self._num_begin + start
        prefix, middle, suffix = (at, at + splits[0]), (at + splits[0], at + splits[1]), (at + splits[1], at + text)
        head = [self.ids.prefix]
        if self.begin is not None and segment == 0:
            head.insert(0, self.begin)
        # One draw per segment: like the paper, train jointly on both forms, by default half each.
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
        """Return the segment count for documents with ``body`` text tokens."""
        remaining = body - (self.segment_tokens - self._num_begin - self._overhead)
        return 1 + np.maximum(0, -(-remaining // (self.segment_tokens - self._overhead)))

    def _selected(self, documents: np.ndarray) -> np.ndarray:
        """Return which documents are selected, bool [n]."""
        # A fraction of 1 is not representable below 2^64.
        if self.rule.rate >= 1:
            return np.ones(len(documents), bool)
        return fall_below(documents, self.rule.rate, self.seed, _DOCUMENTS)


def fim_of(rule: FimRule | None, tokenizer: Callable[[], Tokenizer], *, seed: int, seq_len: int) -> Fim | None:
    """Resolve the rule for a folder; return None, without loading the tokenizer, if no rule or a rate of 0 is set."""
    if rule is None or not rule.rate:
        return None
    return Fim.of(rule, tokenizer(), seed=seed, seq_len=seq_len)


def rule_of(fim: Fim | None) -> str | None:
    """Return the rule as recorded in a loader state, if any."""
    if fim is None:
        return None
    return str(fim.rule)
