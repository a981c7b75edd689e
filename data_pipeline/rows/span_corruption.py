"""Span corruption: the encoder reads the text that remains, and the decoder writes the missing spans.

"T5" (Raffel et al., 2019, arXiv 1910.10683, §3.1.4 and §3.3.4): a fraction of a piece's n tokens is removed, in spans
with a given mean length. Each span is replaced by its own sentinel, in order; the target is each sentinel followed by
its span, and the end token. Kept and removed spans alternate, starting with a kept one, and both are cut at random
positions, as in T5's own ``random_spans_noise_mask``.

    text      Thank you for inviting me to your party last week
    source    Thank you <0> me to your party <1> week
    target    <0> for inviting <1> last

A piece's cuts are a function of (seed, epoch, folder, document, position): the same for any ranks, threads and
resumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.rows.examples import Example, PieceOfEpoch, check_texts, read_text_pieces
from data_pipeline.rows.pack import Piece
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shuffle import key64
from longctx.errors import ConfigError
from longctx.integer_hash import mix64_array
from longctx.tokenizer.pair_ids import start_of_targets

# Salts; ``rows.token_masking`` has the previous ones.
_TAKEN, _LEFT = 301, 302


@dataclass(frozen=True)
class SpanRule:
    """Rule that sets the fraction of text to remove and the mean span length."""

    rate: float = 0.15
    """Fraction of tokens to remove."""
    length: float = 3.0
    """Mean tokens per span."""
    least_tokens, has_segments, has_labels, pixel_bytes = 1, False, False, 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ConfigError(f"data.mask_rate={self.rate} must be above 0 and below 1. T5 uses 0.15.")
        if not self.length >= 1:
            raise ConfigError(f"data.span_length={self.length} must be at least 1 token. T5 uses 3.")

    def __str__(self) -> str:
        """Return the rule as recorded in the loader state."""
        return f"spans of {self.length:g}, {self.rate:g} of the tokens"

    def taken(self, lengths: np.ndarray) -> np.ndarray:
        """Return the number of tokens to remove from pieces of these lengths; 0 for a single token."""
        wanted = np.rint(lengths * self.rate).astype(np.int64)
        return np.minimum(np.maximum(wanted, 1), np.maximum(lengths - 1, 0))

    def spans(self, lengths: np.ndarray) -> np.ndarray:
        """Return the number of spans to remove from pieces of these lengths; as many spans are kept."""
        taken = self.taken(lengths)
        # At least one span if any token is removed, and at most one per kept token, because every removed span follows
        # a kept one.
        found = np.maximum(np.rint(taken / self.length).astype(np.int64), np.minimum(taken, 1))
        return np.minimum(found, lengths - taken)

    def source_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return the source lengths: kept tokens, one sentinel per span, and the end token."""
        return lengths - self.taken(lengths) + self.spans(lengths) + 1

    def lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return the target lengths: a start token, one sentinel per span with the span's tokens, and the end token."""
        return self.taken(lengths) + self.spans(lengths) + 2

    def most_tokens(self, seq_len: int, source_seq_len: int) -> int:
        """Return the longest piece length with both sides within a row; raise ConfigError if no piece fits."""
        # Each removed token costs at least one target token and each kept one a source token, so no longer piece can
        # fit.
        lengths = np.arange(1, 2 * (seq_len + source_seq_len) + 2)
        fits = (self.lengths(lengths) <= seq_len) & (self.source_lengths(lengths) <= source_seq_len)
        if not fits.any():
            raise ConfigError(
                f"data.seq_len={seq_len} and data.source_seq_len={source_seq_len} do not fit a single token with "
                "corrupted text: a target adds 2 special tokens, a source 1. Try 128 and 512."
            )
        return int(lengths[fits].max())


class Spans:
    """Span rule applied to a folder's documents."""

    def __init__(self, rule: SpanRule, shards: ShardSet, *, seq_len: int, source_seq_len: int, seed: int) -> None:
        """Initialize; raise ConfigError if the folder does not contain texts or the tokenizer has too few sentinels."""
        self.rule, self.seed, self.shards = rule, seed, shards
        tokenizer = shards.tokenizer()
        self.sentinels = np.array(tokenizer.special.sentinels, np.int32)
        self.start, self.end = start_of_targets(tokenizer), int(tokenizer.suffix_ids[-1])
        check_texts(shards, "train.objective=spans", "use train.objective=causal")
        longest = rule.most_tokens(seq_len, source_seq_len)
        needed = int(rule.spans(np.array([longest]))[0])
        if needed > len(self.sentinels):
            have = f"{len(self.sentinels)} sentinels"
            if not len(self.sentinels):
                have = "no sentinels"
            raise ConfigError(
                f"rows of {seq_len} and {source_seq_len} tokens hold pieces of {longest} with {needed} spans, but "
                f"{tokenizer.path} has {have}.\nTrain one with `longctx tokenizer train --sentinels {needed}` and "
                "build the shards with it, or increase data.span_length."
            )
        self._key = int(shards.manifest.hash[:16], 16)

    def examples(self, pieces: Sequence[PieceOfEpoch]) -> list[Example]:
        """Return one example per piece: removed spans as target, the remaining text as source."""
        texts = read_text_pieces(self.shards, [piece for piece, _ in pieces])
        return [self.corrupt(*piece, tokens) for piece, tokens in zip(pieces, texts, strict=True)]

    def corrupt(self, piece: Piece, epoch: int, tokens: np.ndarray) -> Example:
        """Build the example for a piece with these tokens, int32."""
        document, start, _ = piece
        count = len(tokens)
        taken, spans = (int(of(np.array([count]))[0]) for of in (self.rule.taken, self.rule.spans))
        sentinels = self.sentinels[:spans, None]
        parts = (key64(document, self._key), self.seed, epoch, start)
        # Kept and removed spans alternate, starting with a kept one.
        sizes = np.stack([_segments(count - taken, spans, parts, _LEFT), _segments(taken, spans, parts, _TAKEN)], 1)
        cut = np.split(tokens, np.cumsum(sizes.ravel())[:-1])
        # A piece too short for a span is copied: its source is complete and its target empty.
        left, out = (cut[0::2], cut[1::2]) if spans else ([tokens], [])
        source = [part for pair in zip(left, sentinels, strict=False) for part in pair] or left
        target = [part for pair in zip(sentinels, out, strict=True) for part in pair]
        end, begin = np.array([self.end], np.int32), np.array([self.start], np.int32)
        return Example(np.concatenate([begin, *target, end]), np.concatenate([*source, end]))


def _segments(count: int, parts: int, key: tuple[int, ...], seed_tag: int) -> np.ndarray:
    """Return ``parts`` random lengths, each at least 1, that add up to ``count``; cuts have the smallest hashes."""
    if parts <= 1:
        return np.array([count] * parts, np.int64)
    # Every set of cuts is equally likely, because the positions' hashes are in random order.
    positions = np.arange(1, count)
    hashes = mix64_array(positions.astype(np.uint64) ^ np.uint64(key64(*key, seed_tag)))
    split_points = np.sort(positions[np.argsort(hashes, kind="stable")[: parts - 1]])
    return np.diff(split_points, prepend=0, append=count)
